"""Tiny models of every family, with the values that released configs have, and what works with each.

    python tests/families.py              # tries all on three prompts of 40 tokens, and writes docs/targets.md
    python tests/families.py phi3 gemma2  # prints the rows of these

Each model is saved to a folder and loaded from it, as a released one would be.
"""

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny
import torch
from by_keys import new_head
from conformance import NO_EOS, prompt, rows_of
from rigged import dflash, eagle3, perturbed
from simulated_cuda import simulated_cuda
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.export import check, export
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.model.ends import load_frozen_ends, load_norm
from drafters.model.stock import body_of, decoder_layers
from train.core.losses import Pairs
from train.eagle import EagleConfig, EagleTask

PAGE = Path(__file__).resolve().parents[1] / "docs" / "targets.md"
LAYERS, LONG = 3, 12
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
WINDOW = {"sliding_window": tiny.SLIDING_WINDOW}
WIDE = {"hidden_size": 64}  # where heads are hidden_size / heads wide
LATENT = WIDE | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 24, "kv_lora_rank": 16}
LATENT |= {"q_lora_rank": 16, "num_key_value_heads": 4}
SHARED = ["full_attention", "sliding_attention", "full_attention"]  # the last has no keys and values of its own
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
GRANITE |= {"attention_multiplier": 0.0625}

LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LINEAR |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4}
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
HEADS2 = {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}
NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}

DECODED: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "ministral3")},
    **{name: {} for name in ("smollm3", "glm", "glm4", "glm4_moe", "olmo", "olmo2", "phi3", "phimoe", "starcoder2")},
    **{name: {} for name in ("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2")},
    **{name: {} for name in ("nemotron", "seed_oss", "apertus", "arcee", "dots1", "internlm3", "solar_open", "gemma")},
    **dict.fromkeys(("ministral", "exaone4", "cwm", "olmo3", "gpt_oss", "laguna", "mimo_v2_flash"), WINDOW),
    **dict.fromkeys(("olmoe", "helium", "stablelm", "phi", "gpt_neox", "gpt2"), WIDE),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), LATENT),
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    **dict.fromkeys(("gemma2", "vaultgemma"), WINDOW | CAPS),
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 16},
    "gemma4_text": WINDOW
    | {"final_logit_softcapping": 30.0, "num_kv_shared_layers": 1, "layer_types": SHARED}
    | {"vocab_size_per_layer_input": tiny.VOCAB_SIZE},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granite_swa": WINDOW | GRANITE,
    "cohere": {"logit_scale": 0.0625},
    "cohere2": WINDOW | {"logit_scale": 0.25},
    "llama4_text": {"attention_chunk_size": 8, "interleave_moe_layer_step": 1},
    "nanochat": {"final_logit_softcapping": 15.0},
    "jetmoe": {},
    # With a running state.
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "minimax"), LINEAR),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), LATENT | LINEAR),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONV),
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": GRANITE | MAMBA2 | LINEAR,
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 96, "ssm_in_multiplier": 0.25, "key_multiplier": 0.5},
    "nemotron_h": NEMOTRON | {"layers_block_type": ["mamba", "attention", "moe"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "zamba": {},
    "zamba2": {"mamba_d_state": 8, "n_mamba_heads": 6, "num_key_value_heads": 4}
    | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "mamba2": HEADS2,
    **dict.fromkeys(("mamba", "falcon_mamba"), {"state_size": 8}),
}
INDEX = "choose the tokens that they attend to"
REFUSED: dict[str, tuple[dict[str, Any], str]] = dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), (LATENT, INDEX))


def build(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A tiny model of a family, in float32."""
    options = {**tiny._COMMON, "num_hidden_layers": LAYERS, "sliding_window": None, **EXPERTS, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=torch.float32)
    for name, weights in model.named_parameters():
        if weights.dim() == 1 and name.endswith("weight"):  # norms start at one and biases at zero, which hides them
            weights.data.uniform_(0.5, 1.5)
        elif weights.dim() == 1:
            weights.data.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model.eval()


def saved(family: str, changes: dict[str, Any], folder: Path) -> PreTrainedModel:
    """As ``build``, and saved to ``folder``."""
    model = build(family, changes)
    model.save_pretrained(folder)
    return model


def decode(target: TargetModel, drafter: Drafter, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of each prompt, one after the other."""
    texts = [generate(target, drafter, [ids], max_new_tokens=new, eos_token_id=NO_EOS) for ids in prompts]
    return [rows_of(text)[0] for text in texts]


def trial(family: str, folder: Path, prompts: int = 1, new: int = 16) -> dict[str, str]:
    """Return what works with a family: a column of the page -> "yes", or why not.

    Raises:
        AssertionError: what is decoded is not what the model's own ``generate`` gives.
    """
    stock = saved(family, DECODED[family], folder)
    texts = [prompt(LONG, seed) for seed in range(prompts)]
    expected = stock_tokens(stock, texts, new)
    check_norm(stock, folder)
    target = TargetModel.from_pretrained(str(folder), "float32", "cpu")
    near = perturbed(target, 0.02, 0)
    drafters = [make_drafter("autoregressive", target), make_drafter("prompt_lookup", target)]
    drafters += [make_drafter("speculative", target, draft_model=near, gamma=3), *heads(target)]
    for drafter in drafters:
        assert decode(target, drafter, texts, new) == expected, type(drafter).__name__
    pair = generate(target, drafters[1], [texts[0], prompt(7, 9)], max_new_tokens=new, eos_token_id=NO_EOS)
    assert rows_of(pair)[0] == expected[0], "in a batch of unequal lengths"
    row = {
        "engine": target.engine,
        "decoding": "chains" if target.chains_only else "yes",
        "EAGLE": eagle(target, folder),
    }
    row["Kangaroo"] = kangaroo(target, texts, new, expected)
    row["graphs"] = graphs(family, texts, new, expected)
    return row


def stock_tokens(model: Any, texts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of the model's own ``generate``."""
    out = [model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0) for ids in texts]
    return [row[0, len(ids) :].tolist() for row, ids in zip(out, texts, strict=True)]


def graphs(family: str, texts: list[list[int]], new: int, expected: list[list[int]]) -> str:
    """What the simulated GPU captures: "yes", "in bf16", or "no".

    A mixture of experts is captured only where CUDA has a kernel for grouped products, which takes bf16.
    """
    for dtypes, answer in ((set[torch.dtype](), "yes"), ({torch.float32}, "in bf16")):
        with simulated_cuda() as gpu:
            gpu.grouped |= dtypes
            if captured(family, texts, new, expected):
                return answer
    return "no"


def captured(family: str, texts: list[list[int]], new: int, expected: list[list[int]]) -> bool:
    """Return whether a GPU captures a family's forwards.

    Raises:
        AssertionError: captured chains, trees or taps give other tokens than ``expected``.
    """
    model: Any = build(family, DECODED[family])
    target = TargetModel(model.to("cuda"), name=family)
    if target.engine != "graphs":
        return False
    _, tree, with_taps, _ = heads(target)
    for drafter in (make_drafter("prompt_lookup", target), tree, with_taps):
        assert decode(target, drafter, texts, new) == expected, type(drafter).__name__
    assert all(part.captured and not part.uncaptured for part in target._parts.values())
    return True


def heads(target: TargetModel) -> list[Drafter]:
    """Drafters with untrained heads."""
    trees = ("chain",) if target.chains_only else ("chain", "dynamic")
    shape = EagleShape(layer="llama")
    made: list[Drafter] = [
        EagleDrafter(target, EagleHead(target.config, shape), EagleOptions(tree=tree)) for tree in trees
    ]
    return [*made, eagle3(target, None, trees[-1], taps=[1, 2]), dflash(target, None, "chain", taps=[1, 2])]


def check_norm(stock: PreTrainedModel, folder: Path) -> None:
    """What ``load_norm`` reads from the folder is the norm behind the model's layers."""
    found: list[torch.Tensor] = []
    body = body_of(stock)
    hook = decoder_layers(body)[-1].register_forward_hook(
        lambda layer, given, out: found.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        last = body(input_ids=torch.tensor([prompt(LONG)]), use_cache=False).last_hidden_state
        assert torch.equal(load_norm(str(folder), "float32")(found[0]), last)
    hook.remove()


def eagle(target: TargetModel, folder: Path) -> str:
    """Train a head for one step, save it, load it, export it; "yes", or why not."""
    try:
        ends = load_frozen_ends(str(folder), "float32")
        given = {
            "target": str(folder),
            "features": "f",
            "out": "o",
            "steps": 1,
            "batch_tokens": 8,
            "learning_rate": 0.1,
        }
        task: Any = EagleTask(EagleConfig(**given, layer="llama"), ends)
    except ValueError as error:
        return str(error).partition(": ")[2].split("; ")[0]
    states = torch.randn(1, 9, target.hidden_size)
    predicted = task.module(states[:, :8], target.embed(torch.tensor([prompt(8)])), torch.arange(8)[None])
    torch.testing.assert_close(ends.lm_head(states), target.lm_head(states), atol=1e-4, rtol=1e-4)
    task.heads.classification(Pairs(predicted[0][None], states[0, 1:])).sum().backward()
    assert all(weights.grad is not None for weights in task.module.parameters() if weights.requires_grad)
    options = task.head.stored()
    with tempfile.TemporaryDirectory() as place:
        head, out = Path(place) / "head", Path(place) / "vllm"
        save_checkpoint(head, task.module, make_config("eagle", options, target), dtype=None)
        config, weights = load_checkpoint(str(head))
        again: Any = new_head(EagleDrafter, target.config, **config["drafter"])
        again.load_state_dict(weights)
        export(str(head), "vllm", out)
        check(out, "vllm", str(folder))
    return "yes"


def kangaroo(target: TargetModel, texts: list[list[int]], new: int, expected: list[list[int]]) -> str:
    """ "yes", or why no adapter can be made."""
    try:
        adapter = KangarooAdapter(target.config, KangarooShape(exit_layer=1))
        drafter = KangarooDrafter(target, adapter, KangarooOptions(eta=0.0))
    except ValueError as error:
        return "no: " + ("in two parts" if "two parts" in str(error) else "its layers alone")
    assert decode(target, drafter, texts, new) == expected
    return "yes"


def page(rows: dict[str, dict[str, str]]) -> str:
    """The page, from a row of each family."""
    columns = list(next(iter(rows.values())))
    lines = ["| family | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {family} | " + " | ".join(row.values()) + " |" for family, row in rows.items()]
    refused = [f"| {family} | {reason(family)} |" for family in REFUSED]
    refused = ["| family | why |", "| --- | --- |", *refused]
    return INTRODUCTION.format(rows="\n".join(lines), refused="\n".join(refused))


def reason(family: str) -> str:
    """Why a family is refused, in the words of the error."""
    try:
        TargetModel(build(family, REFUSED[family][0]), name=family)
    except ValueError as error:
        return str(error).partition(": ")[2].partition("; ")[0]
    raise AssertionError(f"{family} was taken")


INTRODUCTION = """\
# Which targets work?
Tried with a tiny model of each family that has the values of released configs (multipliers, caps, windows, latent
attention), saved to a folder and loaded from it: `python tests/families.py` (three prompts of 40 tokens, float32). A
family that is not listed may work, too: loading compares a tree of tokens with the model's own forward, and refuses
what differs.

{rows}

- engine: `fused` runs layers rewritten for decoding, `stock` calls the model itself
- decoding: greedy tokens of plain decoding, prompt lookup, a draft model, EAGLE's chain and dynamic tree, EAGLE-3's
  dynamic tree and DFlash's chain are those of stock `generate`; `chains`: the same with chains in place of trees
- EAGLE: a head with a Llama layer trains, saves, loads and is exported for vLLM
- Kangaroo runs the first layers alone. *in two parts*: the forward does something between embedding and layers, or
  after a layer. *its layers alone*: no adapter can be made of its attention
- graphs: [captured as CUDA graphs](gpu.md#cuda-graphs), tried on a simulated GPU with chains and trees. *in bf16*: for
  the products of its experts CUDA has a kernel in bf16 only, on Hopper and Blackwell. *no*: it keeps a running state,
  or its forward waits for the GPU (`jetmoe`, `phimoe`)

Of a multimodal folder (Gemma 3, Mistral 3, LLaVA, Qwen2.5-VL, Qwen3-VL) the text model is taken, for text only.

## Running states
Linear attention, Mamba and short convolutions keep one state per sequence, from which no token can be taken away. Such
a layer reads a draft token by token, and the cache keeps the state after each, so a draft is a **chain**: set
`tree: chain` for heads and `chain: true` for suffix and REST; `auto` chooses among chains. Lookahead, Ouroboros,
SpecInfer, SpecTr, LLMCad and MJGD draft trees and are refused, as is MJSD with such a draft model. Other draft models
may have running states. A cache holds one state per token of a draft, so long chains in large batches take memory.
`target.quantize: int8` and `int4` keep drafts exact there, too; mixtures of experts are refused.

Seconds of a step of 6 tokens that keeps 3 of them, relative to three other steps; `python tests/undo_costs.py` on two
busy cores, float32, one thread, 4 layers of hidden size 1,024 ([JSON](results/2-core-cpu/kept-counts.json)):

| state | model | to one pass without undoing | to keeping all 6 | to one token |
| --- | --- | ---: | ---: | ---: |
| gated DeltaNet | qwen3_5_text | 1.22 | 0.98 | 2.64 |
| Mamba 2 | bamba | 0.53 | 1.03 | 2.89 |
| Mamba 1 | mamba | 1.01 | 1.01 | 2.97 |
| convolution | lfm2 | 1.13 | 0.97 | 2.07 |
| lightning attention | minimax | 1.09 | 1.05 | 2.59 |

transformers pads a pass of Mamba 2 to 256 tokens, and its Mamba 1 also reads the one pass token by token.

## Quantised
A checkpoint that transformers loads is decoded, captured and trained for. Each kind was tried on a CPU with a tiny
folder (`tests/test_quantised.py`). bitsandbytes was tried by hand, in 4 and 8 bits; there bf16 rounding may choose
another token. **None of them has run on a GPU yet.** A missing package is named before weights are read. Training from
captured states needs no package, only an LM head that is not quantised.

| published as | `quant_method` | package | weights in memory | engine |
| --- | --- | --- | --- | --- |
| FP8 in blocks (DeepSeek-V3, Qwen3-FP8) | `fp8` | none | bf16 | as not quantised |
| MXFP4 (GPT-OSS) | `mxfp4` | none | bf16 | stock |
| both, on a GPU | | kernels | as stored | stock |
| W4A16, W8A16 of llm-compressor | `compressed-tensors` | compressed-tensors | bf16 | as not quantised |
| FP8, INT8 of llm-compressor | `compressed-tensors` | compressed-tensors | bf16, rounded activations | stock |
| AWQ | `awq` | gptqmodel | as stored | stock |
| GPTQ | `gptq` | optimum, gptqmodel | as stored | stock |
| bitsandbytes | `bitsandbytes` | bitsandbytes | as stored | stock |

## Refused
Their states can still be captured (`python -m data_prep.features`), and drafters trained from them.

{refused}
"""


def main() -> None:
    """Try all, and write the page."""
    logging.disable(logging.WARNING)
    rows: dict[str, dict[str, str]] = {}
    for family in sys.argv[1:] or DECODED:
        with tempfile.TemporaryDirectory() as folder:
            rows[family] = trial(family, Path(folder), 3, 40)
        print(family, rows[family], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
