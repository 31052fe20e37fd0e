"""Train a small Llama target (or draft model) from scratch, tokenizer included.

    python train/target.py --config configs/target/stdlib.yaml [key=value ...] [--resume]

The run folder holds run.json, metrics.jsonl, TensorBoard events, checkpoints and `export/`, a Hugging Face snapshot
that is refreshed while training goes on. A killed run continues with --resume, bit for bit. The schedule is
warm-up, constant, linear decay: give a resumed run another `steps=` to choose when the decay comes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it also runs as a script

import torch
import torch.nn.functional as F
import transformers
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|endoftext|>"
SPECIAL_TOKENS = [PAD, END, "<|user|>", "<|assistant|>"]
# A system message is folded into the first user turn: a token that training never saw would only be noise.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set ns.system = message['content'] + '\n\n' -%}"
    "{%- elif message['role'] == 'user' -%}{{- '<|user|>' + ns.system + message['content'] -}}"
    "{%- set ns.system = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelShape(_Strict):
    """Shape of the Llama model."""

    vocab_size: int = Field(4096, ge=300)
    hidden_size: int = Field(256, ge=8)
    layers: int = Field(12, ge=1)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=2, multiple_of=2)
    intermediate_size: int = Field(480, ge=8)
    max_positions: int = Field(2048, ge=16)

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class TargetConfig(_Strict):
    """One training run, complete."""

    name: str
    corpus: Path = Path("runs/stdlib")
    run_dir: Path
    final_dir: Path
    model: ModelShape = ModelShape()
    max_bytes: int = Field(16_000_000, description="largest allowed size of the weights in bf16")
    steps: int = Field(ge=1)
    warmup_steps: int = Field(100, ge=0)
    decay_fraction: float = Field(0.2, ge=0, le=1)
    seq_len: int = Field(512, ge=8)
    batch_rows: int = Field(8, ge=1)
    micro_rows: int = Field(1, ge=1, description="rows of one worker's forward")
    muon_lr: float = Field(0.02, gt=0)
    embed_lr: float = Field(3e-3, gt=0)
    norm_lr: float = Field(3e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    precision: Literal["float32", "autocast", "bf16"] = "bf16"
    threads: int = Field(2, ge=1, description="workers, each with its own rows and one core")
    seed: int = 0
    eval_every: int = Field(200, ge=1)
    eval_tokens: int = Field(40_000, ge=1)
    save_minutes: float = Field(5, ge=0)
    export_minutes: float = Field(10, ge=0)

    @model_validator(mode="after")
    def _check(self) -> TargetConfig:
        if self.batch_rows % self.micro_rows:
            raise ValueError(f"batch_rows ({self.batch_rows}) must be a multiple of micro_rows ({self.micro_rows})")
        if self.seq_len > self.model.max_positions:
            raise ValueError(f"seq_len ({self.seq_len}) exceeds model.max_positions ({self.model.max_positions})")
        return self


def load_config(path: Path, overrides: list[str]) -> TargetConfig:
    """Read a YAML config and apply `key=value` overrides (`model.layers=2` reaches inside)."""
    if not path.is_file():
        raise ValueError(f"no config at {path}")
    raw = yaml.safe_load(path.read_text()) or {}
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign:
            raise ValueError(f"override {override!r} is not key=value")
        *parents, last = key.split(".")
        node = raw
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = yaml.safe_load(value)
    try:
        return TargetConfig.model_validate(raw)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc'])) or 'config'}: {item['msg']}" for item in error.errors()]
        known = ", ".join(TargetConfig.model_fields)
        raise ValueError("\n".join([f"{path} is not a valid config:", *lines, f"known keys: {known}"])) from None


# ---------------------------------------------------------------------------------------------- tokenizer and data


def read_dialogues(path: Path) -> list[list[dict[str, str]]]:
    """Chat messages of each ShareGPT line."""
    if not path.is_file():
        raise ValueError(f"no corpus at {path}; make it with: python -m data_prep.stdlib_corpus --out {path.parent}")
    dialogues = []
    for line in path.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["conversations"]
        dialogues.append([{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns])
    return dialogues


def train_tokenizer(dialogues: list[list[dict[str, str]]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the chat template; the same dialogues give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for d in dialogues for m in d), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def get_tokenizer(config: TargetConfig) -> PreTrainedTokenizerFast:
    """The corpus's tokenizer: trained once, shared by every model of that corpus (target and draft must agree)."""
    folder = config.corpus / f"tokenizer-{config.model.vocab_size}"
    if not folder.is_dir():
        tokenizer = train_tokenizer(read_dialogues(config.corpus / "train.jsonl"), config.model.vocab_size)
        replace_folder(folder, lambda temporary: tokenizer.save_pretrained(temporary))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.model_max_length = config.model.max_positions
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, dialogues: list[list[dict[str, str]]]) -> list[list[int]]:
    """Token ids of each dialogue, by the chat template."""
    texts = [tokenizer.apply_chat_template(dialogue, tokenize=False) for dialogue in dialogues]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def pack_rows(documents: list[list[int]], length: int, generator: random.Random, pool: int = 64) -> list[list[int]]:
    """Rows of exactly `length` tokens, each beginning with a dialogue, so that short prompts are in distribution.

    A row takes the next dialogue, then from a pool of waiting ones the longest that still fits, and ends with the
    beginning of some dialogue: nothing is padded. A dialogue longer than a row is cut at a random place.
    """
    pieces = []
    for document in documents:
        while len(document) > length:
            cut = generator.randint(length // 2, length)
            pieces.append(document[:cut])
            document = document[cut:]
        pieces.append(document)
    generator.shuffle(pieces)
    rows: list[list[int]] = []
    waiting: list[list[int]] = []
    remaining = iter(pieces)
    while True:
        waiting.extend(itertools.islice(remaining, pool - len(waiting)))
        if not waiting:
            return rows
        row = list(waiting.pop(0))
        while len(row) < length:
            fitting = [i for i, piece in enumerate(waiting) if len(piece) <= length - len(row)]
            if fitting:
                row += waiting.pop(max(fitting, key=lambda i: len(waiting[i])))
            else:
                row += pieces[generator.randrange(len(pieces))][: length - len(row)]
        rows.append(row)


@dataclasses.dataclass
class DataPosition:
    """Where the run is in its data; the order follows from the seed and the epoch alone."""

    epoch: int = 0
    cursor: int = 0


def batches(
    documents: list[list[int]], config: TargetConfig, position: DataPosition
) -> Iterator[tuple[Tensor, DataPosition]]:
    """Endless batches `[batch_rows, seq_len + 1]` from `position` on, each with the position after it."""
    epoch, cursor = position.epoch, position.cursor
    while True:
        rows = pack_rows(documents, config.seq_len + 1, random.Random(f"{config.seed}-{epoch}"))
        if len(rows) < config.batch_rows:
            raise ValueError(f"the corpus fills {len(rows)} rows of {config.seq_len} tokens; a batch needs more")
        while cursor + config.batch_rows <= len(rows):
            batch = torch.tensor(rows[cursor : cursor + config.batch_rows])
            cursor += config.batch_rows
            yield batch, DataPosition(epoch, cursor)
        epoch, cursor = epoch + 1, 0


# ---------------------------------------------------------------------------------------------- model and optimiser


def build_model(config: TargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialised Llama of the configured shape, refused when its bf16 weights exceed `max_bytes`."""
    shape = config.model
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
    )
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    if size > config.max_bytes:
        raise ValueError(f"the model takes {size:,} bytes in bf16, more than max_bytes={config.max_bytes:,}")
    return model


class Optimizer:
    """Muon on the hidden matrices, AdamW on embeddings and norms, over float32 master weights.

    With `precision: bf16` the model itself computes in bf16 and the masters are copies; else they are its parameters.
    """

    def __init__(self, model: nn.Module, config: TargetConfig, pool: ThreadPoolExecutor) -> None:
        self.config, self.pool = config, pool
        self.working = dict(model.named_parameters())
        self.copied = next(iter(self.working.values())).dtype != torch.float32
        self.master = {n: p.detach().float().clone() if self.copied else p for n, p in self.working.items()}
        matrices = [p for n, p in self.master.items() if p.ndim == 2 and "embed" not in n]
        embeddings = [p for n, p in self.master.items() if "embed" in n]
        norms = [p for p in self.master.values() if p.ndim == 1]
        adam_groups = [{"params": embeddings, "lr": config.embed_lr}, {"params": norms, "lr": config.norm_lr}]
        adam = torch.optim.AdamW(adam_groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        # Muon orthogonalises matrix by matrix, a fifth of a step's time: the workers share the matrices.
        shares = [matrices[i :: config.threads] for i in range(config.threads)]
        self.parts: list[torch.optim.Optimizer] = [adam]
        for share in filter(None, shares):
            self.parts.append(
                torch.optim.Muon(share, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95)
            )
        self.base = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, gradients: list[Tensor], scale: float) -> float:
        """One update at `scale` times the base learning rates; returns the gradient norm."""
        for master, gradient in zip(self.master.values(), gradients, strict=True):
            master.grad = gradient
        norm = float(nn.utils.clip_grad_norm_(list(self.master.values()), self.config.grad_clip))
        for part, rates in zip(self.parts, self.base, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        list(self.pool.map(lambda part: part.step(), self.parts))
        for master in self.master.values():
            master.grad = None
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the computing model."""
        if self.copied:
            for name, parameter in self.working.items():
                parameter.copy_(self.master[name])


def lr_scale(step: int, config: TargetConfig) -> float:
    """Warm-up, constant, linear decay to zero over the last `decay_fraction` of `steps` (step counts from 0)."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    decay_steps = config.decay_fraction * config.steps
    left = config.steps - step
    return min(warm, left / decay_steps) if left < decay_steps else warm


def blocked_causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention without padding, query block by query block, over only the keys that a block may see.

    On CPUs PyTorch's fused kernel took half of a training step (its backward pass above all); plain matrix products
    over blocks are more than twice as fast at these sizes. A transformers attention function.
    """
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    q = (query * scaling).reshape(batch * heads, length, width)
    k = key.repeat_interleave(groups, dim=1).reshape(batch * heads, length, width)
    v = value.repeat_interleave(groups, dim=1).reshape(batch * heads, length, width)
    mask = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    blocks = []
    for first in range(0, length, ATTENTION_BLOCK):
        last = min(first + ATTENTION_BLOCK, length)
        block_mask = mask[first:last, :last].expand(batch * heads, last - first, last)
        scores = torch.baddbmm(block_mask, q[:, first:last], k[:, :last].transpose(1, 2))
        blocks.append(torch.bmm(torch.softmax(scores, dim=-1), v[:, :last]))
    return torch.cat(blocks, dim=1).view(batch, heads, length, width).transpose(1, 2), None


ATTENTION_BLOCK = 256
AttentionInterface.register("blocked_causal", blocked_causal_attention)


def next_token_loss(model: nn.Module, rows: Tensor, precision: str) -> Tensor:
    """Mean cross-entropy of every next token; logits in the computing dtype, the softmax in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


# ---------------------------------------------------------------------------------------------- files of a run


def replace_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary folder, then put it in `folder`'s place by renaming."""
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@dataclasses.dataclass
class Progress:
    """What a checkpoint remembers beside tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    position: DataPosition = dataclasses.field(default_factory=DataPosition)


def save_checkpoint(run_dir: Path, optimizer: Optimizer, progress: Progress) -> None:
    """Write `checkpoint-<step>` under a temporary name, rename it, then remove the older ones."""

    def write(folder: Path) -> None:
        save_file({n: p.detach().contiguous() for n, p in optimizer.master.items()}, folder / "model.safetensors")
        torch.save([part.state_dict() for part in optimizer.parts], folder / "optimizer.pt")
        (folder / "progress.json").write_text(json.dumps(dataclasses.asdict(progress)))

    older = checkpoints(run_dir)
    target = run_dir / f"checkpoint-{progress.step:08d}"
    replace_folder(target, write)
    for folder in older:
        if folder != target:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; half-written ones still bear a temporary name."""
    return sorted(p for p in run_dir.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit())


def load_checkpoint(run_dir: Path, optimizer: Optimizer) -> Progress:
    """Restore the newest checkpoint into `optimizer` and its model."""
    found = checkpoints(run_dir)
    if not found:
        raise ValueError(f"--resume: no checkpoint in {run_dir}; start without --resume")
    weights = load_file(found[-1] / "model.safetensors")
    shapes = {name: parameter.shape for name, parameter in optimizer.master.items()}
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise ValueError(f"{found[-1]} holds a model of another shape than the config's")
    with torch.no_grad():
        for name, parameter in optimizer.master.items():
            parameter.copy_(weights[name])
    states = torch.load(found[-1] / "optimizer.pt", weights_only=True)
    if len(states) != len(optimizer.parts):
        raise ValueError(f"{found[-1]} was written with threads={len(states) - 1}; resume with the same number")
    for part, state in zip(optimizer.parts, states, strict=True):
        part.load_state_dict(state)
    optimizer.publish()
    raw = json.loads((found[-1] / "progress.json").read_text())
    return Progress(**{**raw, "position": DataPosition(**raw["position"])})


class MetricsLog:
    """metrics.jsonl and TensorBoard; a resumed run first drops the lines after its checkpoint."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = run_dir / "metrics.jsonl"
        kept = [row for row in self.read() if row["step"] <= step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)

    def read(self) -> list[dict[str, float]]:
        """All rows so far; a line cut by a kill is ignored."""
        rows = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    def add(self, step: int, **values: float) -> None:
        """Append one row."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)


def run_info(config: TargetConfig, arguments: list[str]) -> dict[str, Any]:
    """What is needed to run it again: config, arguments, commit, versions."""
    try:
        here = Path(__file__).resolve().parent
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        commit = git.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    return {"config": config.model_dump(mode="json"), "arguments": arguments, "commit": commit, "versions": versions}


# ---------------------------------------------------------------------------------------------- export


def export(folder: Path, optimizer: Optimizer, tokenizer: PreTrainedTokenizerFast, config: TargetConfig) -> None:
    """Write the model in bf16, its config, generation config and tokenizer as a Hugging Face folder."""
    model = build_model(config, tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(optimizer.master[name])
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    replace_folder(folder, write)


def sample_continuations(folder: Path, prompts: list[str], new_tokens: int = 120) -> list[tuple[str, str]]:
    """Greedy answers of the exported model, loaded as a user would."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    samples = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
        samples.append((prompt, tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)))
    return samples


def write_card(folder: Path, config: TargetConfig, info: dict[str, Any], progress: Progress, facts: dict) -> None:
    """The model card, from the numbers of this very run."""
    shape, rows = config.model, [row for row in facts["rows"] if "heldout_loss" in row]
    every = max(1, len(rows) // 20)
    shown = [row for i, row in enumerate(rows) if i % every == 0 or i == len(rows) - 1]
    curve = "\n".join(f"| {row['step']:,} | {row['tokens']:,} | {row['heldout_loss']:.4f} |" for row in shown)
    samples = "\n".join(f"**{prompt}**\n\n~~~text\n{answer}\n~~~\n" for prompt, answer in facts["samples"])
    loss, data = rows[-1]["heldout_loss"], facts["data"]
    folder.joinpath("README.md").write_text(f"""---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, llama, code]
---
# {config.name}

A very small Llama trained from scratch on dialogues made from the Python standard library's source files
(docstrings and code). It exists so that speculative decoding can be tried and tested offline on a CPU. It is not a
useful assistant: it writes plausible Python and docstrings, and it invents facts.

| | |
| --- | --- |
| parameters | {facts["parameters"]:,} ({2 * facts["parameters"]:,} bytes in bf16) |
| shape | {shape.layers} layers, hidden {shape.hidden_size}, {shape.heads} heads ({shape.kv_heads} kv), \
intermediate {shape.intermediate_size}, vocabulary {shape.vocab_size}, tied embeddings |
| data | {data["dialogues"]:,} dialogues, {data["tokens"]:,} tokens, from Python {data["python"]}'s standard library |
| trained on | {progress.tokens:,} tokens in {progress.step:,} steps ({progress.position.epoch + 1} epochs begun), \
sequences of {config.seq_len} |
| training time | {progress.seconds / 60:.1f} minutes, {config.threads} CPU threads, {platform.machine()} |
| held-out loss | {loss:.4f} nats per token (perplexity {math.exp(loss):.2f}), {data["heldout_tokens"]:,} tokens |
| optimiser | Muon (lr {config.muon_lr}) and AdamW (lr {config.embed_lr}), warm-up, constant, linear decay |
| versions | Python {info["versions"]["python"]}, torch {info["versions"]["torch"]}, \
transformers {info["versions"]["transformers"]} |
| code commit | {info["commit"]} |

The held-out dialogues are about classes and functions that training never saw. Chat format:
`<|user|>question<|assistant|>answer<|end|>`; the tokenizer's chat template writes it. Sequences longer than
{config.seq_len} tokens were never seen in training.

## Held-out loss
| step | training tokens | nats per token |
| --- | --- | --- |
{curve}

## Greedy answers to held-out questions
As the model gave them, cut at {facts["new_tokens"]} tokens.

{samples}""")


# ---------------------------------------------------------------------------------------------- the run


class TargetRun:
    """One training run: its data, model, optimiser and files."""

    def __init__(self, config: TargetConfig, resume: bool, arguments: list[str]) -> None:
        # A core for each worker, instead of all cores for each operation: no barrier inside operations, where a
        # busy machine loses most of its time.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(config.threads, initializer=torch.set_num_threads, initargs=(1,))
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if not resume and checkpoints(config.run_dir):
            raise ValueError(f"{config.run_dir} already holds a run: pass --resume or another run_dir=")
        self.config, self.info, self.stop_asked = config, run_info(config, arguments), False
        self.tokenizer = get_tokenizer(config)
        self.heldout = read_dialogues(config.corpus / "heldout.jsonl")
        self.documents = encode(self.tokenizer, read_dialogues(config.corpus / "train.jsonl"))
        rows = pack_rows(encode(self.tokenizer, self.heldout), config.seq_len + 1, random.Random(0))
        self.heldout_rows = torch.tensor(rows[: max(1, config.eval_tokens // config.seq_len)])
        self.model = build_model(config, self.tokenizer)
        self.model.to(torch.bfloat16 if config.precision == "bf16" else torch.float32)
        self.model.set_attn_implementation("blocked_causal")
        self.optimizer = Optimizer(self.model, config, self.pool)
        self.progress = load_checkpoint(config.run_dir, self.optimizer) if resume else Progress()
        self.log = MetricsLog(config.run_dir, self.progress.step)
        text = json.dumps({**self.info, "resumed_at": self.progress.step}, indent=2)
        config.run_dir.joinpath("run.json").write_text(text + "\n")
        with config.run_dir.joinpath("launches.jsonl").open("a") as file:
            file.write(json.dumps({**self.info, "resumed_at": self.progress.step}) + "\n")

    def evaluate(self) -> float:
        """Held-out loss, logged."""
        parts = self.heldout_rows.split(self.config.micro_rows)
        value = sum(self.pool.map(self.part_loss, parts)) / len(self.heldout_rows)
        step = self.progress.step
        self.log.add(step, heldout_loss=value, tokens=self.progress.tokens, seconds=round(self.progress.seconds, 1))
        tqdm.write(f"step {step}: held-out loss {value:.4f} after {self.progress.tokens:,} tokens")
        return value

    @torch.no_grad()
    def part_loss(self, rows: Tensor) -> float:
        """Summed loss of some rows, without gradients (which are switched off thread by thread)."""
        return float(next_token_loss(self.model, rows, self.config.precision)) * len(rows)

    def part_gradients(self, rows: Tensor) -> tuple[float, list[Tensor]]:
        """A worker's share of a batch: its loss and gradients, both weighted by its share of the rows."""
        share = len(rows) / self.config.batch_rows
        loss = next_token_loss(self.model, rows, self.config.precision) * share
        gradients = torch.autograd.grad(loss, list(self.optimizer.working.values()))
        return float(loss.detach()), [gradient.float() for gradient in gradients]

    def train_step(self, batch: Tensor) -> tuple[float, float]:
        """One optimiser step; returns the batch's loss and gradient norm. Sums run in a fixed order."""
        total, gradients = 0.0, None
        for loss, part in self.pool.map(self.part_gradients, batch.split(self.config.micro_rows)):
            total += loss
            gradients = part if gradients is None else [a.add_(b) for a, b in zip(gradients, part, strict=True)]
        assert gradients is not None
        return total, self.optimizer.step(gradients, lr_scale(self.progress.step, self.config))

    def ask_to_stop(self, *_: Any) -> None:
        """Save and leave after the current step: what SIGTERM does, where kill -9 costs the last minutes."""
        self.stop_asked = True

    def train(self) -> None:
        """From the current step to the last one, with evaluation, checkpoints and exports on the way."""
        config, progress = self.config, self.progress
        if progress.step > config.steps:
            raise ValueError(f"the run is already at step {progress.step}, past steps={config.steps}")
        saved = exported = time.monotonic()
        source = batches(self.documents, config, progress.position)
        for _ in tqdm(range(progress.step, config.steps), initial=progress.step, total=config.steps, mininterval=5):
            began = time.monotonic()
            batch, progress.position = next(source)
            loss, norm = self.train_step(batch)
            seconds, tokens = time.monotonic() - began, batch[:, 1:].numel()
            progress.step, progress.tokens = progress.step + 1, progress.tokens + tokens
            progress.seconds += seconds
            rate = round(tokens / seconds, 1)
            scale = lr_scale(progress.step - 1, config)
            self.log.add(progress.step, loss=loss, grad_norm=norm, lr_scale=scale, tokens_per_second=rate)
            if progress.step % config.eval_every == 0 and progress.step < config.steps:
                self.evaluate()
            if self.stop_asked:
                save_checkpoint(config.run_dir, self.optimizer, progress)
                raise SystemExit(f"stopped at step {progress.step}; continue with --resume")
            if time.monotonic() - saved >= 60 * config.save_minutes:
                save_checkpoint(config.run_dir, self.optimizer, progress)
                saved = time.monotonic()
            if time.monotonic() - exported >= 60 * config.export_minutes:
                export(config.run_dir / "export", self.optimizer, self.tokenizer, config)
                exported = time.monotonic()
        self.evaluate()
        save_checkpoint(config.run_dir, self.optimizer, progress)

    def finish(self, new_tokens: int = 120) -> None:
        """The final export, with its model card."""
        config = self.config
        for folder in (config.run_dir / "export", config.final_dir):
            export(folder, self.optimizer, self.tokenizer, config)
        prompts = [dialogue[0]["content"] for dialogue in self.heldout[:5]]
        manifest = config.corpus / "manifest.json"
        data = {
            "dialogues": len(self.documents),
            "tokens": sum(map(len, self.documents)),
            "heldout_tokens": self.heldout_rows[:, 1:].numel(),
            "python": json.loads(manifest.read_text())["python"] if manifest.exists() else "(unknown)",
        }
        facts = {
            "rows": self.log.read(),
            "samples": sample_continuations(config.final_dir, prompts, new_tokens),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "data": data,
            "new_tokens": new_tokens,
        }
        write_card(config.final_dir, config, self.info, self.progress, facts)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        run = TargetRun(config, args.resume, sys.argv[1:] if argv is None else argv)
        signal.signal(signal.SIGTERM, run.ask_to_stop)
        run.train()
        run.finish()
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
