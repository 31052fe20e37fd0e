"""What eval.gpu measures: PARTS, the commands in order of their value, and GOALS, the figures and their bounds."""

import sys
from collections.abc import Callable
from typing import Any

from eval.report.goals import Goal, Section
from eval.report.tables import tail

PYTHON = sys.executable
CORPUS = "runs/stdlib"  # the configs read it there
HEADS = "runs/gpu"  # features, heads and targets, which no page needs

_ROOFLINE = "python -m eval.roofline --shape llama-7b out={out}"
_CORPUS = f"python -m data_prep.stdlib_corpus --out {CORPUS}"
_THROUGHPUT = "python -m train.tools.throughput --out {out}/throughput.json"
_LLAMA = f"{_THROUGHPUT} --rounds 7 --steps 8 --shape hidden=4096"
_QWEN = f"{_THROUGHPUT} --rounds 3 --steps 4 --tokens 8192 --shape " + (
    "hidden=4096,vocab=151936,heads=32,kv_heads=8,intermediate=12288"
)
_QWEN_TARGET = f"{HEADS}/qwen3-8b"
_SPLITS = f'splits={{"train":"{CORPUS}/train.jsonl","heldout":"{CORPUS}/heldout.jsonl"}}'
_QWEN_FEATURES = (
    f"target={_QWEN_TARGET} {_SPLITS} out={_QWEN_TARGET}-features for=[dspark] exit_layers=[] limit=200 "
    "heldout_dialogues=16"  # the target answers these first, and random weights end no answer
)
_QWEN_TRAINING = (
    f"target={_QWEN_TARGET} features={_QWEN_TARGET}-features data=null out={_QWEN_TARGET}-dspark epochs=null minutes=1 "
    "batch_tokens=8192 gradient_accumulation=1 warmup_steps=10 tau_every=null trackers=[]"
)
_SMOLLM = "runs/real/target"  # with runs/real/answers and data/spec_bench: make gpu-data
_ANSWERS = (f"{_SMOLLM}/config.json", "runs/real/answers/train.jsonl", "data/spec_bench/question.jsonl")
_STEPS = "minutes=1.67 batch_tokens=8192 eval_every=500 export_every=500 save_every=100000 trackers=[]"
ENDED = "ended"  # a file in the folder of a training that ended; exports and a summary are there after a kill, too
LEARNED = ("eagle", "eagle31", "dflash", "dspark")  # the best known first, at equal seconds
BLOCKS = {"dspark": "block_size=7", "dflash": "block_size=16", "eagle3": ""}  # as configs/<method>/qwen3-8b.yaml


def _lines(*commands: str) -> list[list[str]]:
    return [[PYTHON if word == "python" else word for word in command.split()] for command in commands]


def _learned(name: str, method: str, more: str = "") -> Section:
    """Return a training of 100 s from the store of the part learned-features."""
    run = f"{HEADS}/learned/{name}"
    train = f"python train/{method}.py --config configs/learned/{method}.yaml features={HEADS}/learned/features"
    lines = _lines(
        f"{train} out={run} {_STEPS} {more}", f"touch {run}/{ENDED}", f"cp {run}/summary.json {{out}}/summary.json"
    )
    return Section(f"learned-{name}", f"{name} for 100 s on SmolLM2's own answers", lines, "summary.json", 200,
                   needs=("deepspeed",), files=(f"{HEADS}/learned/features/train",), remakes=(run,))  # fmt: skip


def _blocks(method: str) -> Section:
    return Section(f"blocks-{method}", f"training {method} at Qwen3-8B's shape, 8,192 tokens a step",
                   _lines(f"{_QWEN} --method {method} {BLOCKS[method]}"), "throughput.json", 120)  # fmt: skip


PARTS = [
    Section("exact", "every method's tokens on captured forwards are the CPU's; memory does not grow",
            _lines("python tests/gpu_exact.py --out {out}/exact.json"), "exact.json", 180, needs=("pytest",)),
    Section("learned-features", "SmolLM2's states over its own answers, captured once",
            _lines("python -m data_prep.features --config configs/learned/features.yaml device=cuda "
                   f"out={HEADS}/learned/features", f"cp {HEADS}/learned/features/train/manifest.json {{out}}/"),
            "manifest.json", 180, files=_ANSWERS),
    _learned("eagle", "eagle"),
    _learned("eagle31", "eagle3", "fc_norm=true norm_output=true"),
    _learned("dflash", "dflash", "layers=2"),
    _learned("dspark", "dspark", "layers=2"),
    Section("learned-tau", "tau of the four heads on 42 questions of Spec-Bench, 49 turns",
            _lines("python -m eval.speed --config configs/gpu/learned.yaml out={out}",
                   f"python -m train.tools.curve {' '.join(f'{HEADS}/learned/{name}' for name in LEARNED)} "
                   "--out {out}/curve.json"), "report.json", 240,
            files=tuple(f"{HEADS}/learned/{name}/{ENDED}" for name in LEARNED)),
    Section("learned-lossless", "DSpark's certificate",
            _lines(f"python -m eval.lossless --target {_SMOLLM} --drafter {HEADS}/learned/dspark out={{out}}"),
            "lossless.json", 200, files=(f"{HEADS}/learned/dspark/{ENDED}",)),
    *(_blocks(method) for method in BLOCKS),
    Section("roofline", "decoding against the memory bandwidth: 6.7B Llama shape, bf16, 1k context",
            _lines(f"{_ROOFLINE} compiled=false"), "roofline-llama-7b.json", 200),
    Section("elementwise", "the same decoding with compiled elementwise operations",
            _lines(f"{_ROOFLINE} engine=compiled stock=false"), "roofline-llama-7b.json", 200),
    Section("rehearsal", "the recipe of Qwen3-8B from features to export, with random weights of that shape",
            _lines(_CORPUS,
                   f"python tests/gpu_target.py --shape configs/shapes/qwen3-8b.json --out {_QWEN_TARGET}",
                   f"python -m data_prep.features --config configs/features/qwen3-8b-sharegpt.yaml {_QWEN_FEATURES}",
                   f"python train/dspark.py --config configs/dspark/qwen3-8b.yaml {_QWEN_TRAINING}",
                   f"python -m drafters.export {_QWEN_TARGET}-dspark --to vllm --out {_QWEN_TARGET}-vllm",
                   f"python -m drafters.export --check {_QWEN_TARGET}-vllm --target {_QWEN_TARGET}",
                   f"cp {_QWEN_TARGET}-dspark/summary.json {{out}}/summary.json"),
            "summary.json", 240, needs=("deepspeed",),
            remakes=(f"{_QWEN_TARGET}-dspark", f"{_QWEN_TARGET}-vllm")),
    Section("quantised", "targets in FP8 and W4A16: loaded, captured, and their speed beside bf16",
            _lines(f"python tests/gpu_quantised.py --out {{out}}/quantised.json --folder {HEADS}/quantised"),
            "quantised.json", 180, needs=("pytest", "compressed_tensors")),
    Section("speed", "the shipped models, every method, greedy and sampled",
            _lines(_CORPUS, "python -m eval.speed --config configs/speed/stdlib.yaml target.device=cuda "
                            "prompts.count=8 out={out}"), "report.json", 240),
    Section("train-7b", "training beside the plain formulation: the head of a 7B target",
            _lines(f"{_LLAMA},vocab=32000,heads=32,kv_heads=32,intermediate=11008"), "throughput.json", 200),
    Section("train-128k", "training beside the plain formulation: a vocabulary of 128k",
            _lines(f"{_LLAMA},vocab=128256,heads=32,kv_heads=8,intermediate=14336"), "throughput.json", 240),
    Section("fused", "the same decoding without graphs",
            _lines(f"{_ROOFLINE} engine=fused stock=false"), "roofline-llama-7b.json", 130),
    Section("int8", "weights in int8", _lines(f"{_ROOFLINE} quantize=int8"), "roofline-llama-7b-int8.json", 130),
    Section("int4", "weights in int4", _lines(f"{_ROOFLINE} quantize=int4"), "roofline-llama-7b-int4.json", 130),
    Section("compiled", "stock generate on a compiled static cache",
            _lines(f"{_ROOFLINE} compiled=true rows=[1] batches=[1] rounds=1"), "roofline-llama-7b.json", 180),
]  # fmt: skip

Figure = Callable[[dict[str, Any]], float | None]


def _row(method: str, key: str, column: str = "method") -> Figure:
    return lambda report: next((row.get(key) for row in report["rows"] if row[column] == method), None)


def _rows(count: int) -> Figure:
    return lambda report: next((row["seconds"] for row in report["verification_seconds"] if row["rows"] == count), None)


def _ratio(above: Figure, below: Figure) -> Figure:
    def figure(report: dict[str, Any]) -> float | None:
        one, other = above(report), below(report)
        return one / other if one and other else None

    return figure


def _unexplained(report: dict[str, Any]) -> float:
    rows = [row for row in report["rows"] if row["lossless"] and row.get("divergences")]
    return float(sum(r["divergences"]["unexplained"] for r in rows if tail(r["divergences"], r["prompts"]) is None))


def _fastest(report: dict[str, Any]) -> float:
    return max(row["speedup"] for row in report["rows"] if row["lossless"] and row["temperature"] == 0)


def _ours(key: str) -> Figure:
    return lambda report: report["ours"][key]


def _kind(kind: str, key: str) -> Figure:
    """A figure of a quantised target; its tokens/s are over bf16's."""

    def figure(report: dict[str, Any]) -> float:
        row, plain = report["kinds"][kind], report["kinds"]["bf16"]
        if "error" in row:
            raise ValueError(row["error"])
        return row[key] / plain[key] if key == "tokens_per_second" else row[key]

    return figure


_SPEED = _row("plain decoding", "tokens_per_second")
_TREE, _KANGAROO = "EAGLE static tree, replay", "Kangaroo, exit 2, replay"
_STOCK = _row("stock generate", "tokens_per_second")
_COMPILED = _row("stock generate, compiled static cache", "tokens_per_second")
_SHARE, _WHOLE, _MANY = "{:.1%}", "{:.0f}", "{:,.0f}"
GOALS = [
    Goal("exact", "runs whose tokens are not the CPU's", lambda f: sum(not row["same"] for row in f["rows"]), 0, False,
         _WHOLE),
    Goal("exact", "forwards captured for an EAGLE tree", lambda f: f["steady"]["captured"], 1, form=_WHOLE),
    Goal("exact", "device memory segments more after a prompt in the steady state",
         lambda f: f["steady"]["segments_after"] - f["steady"]["segments_before"], 0, False, _WHOLE),
    Goal("exact", "DFlash's flex_attention from matrix products, of the largest gradient",
         lambda f: max(f["blocks"]["apart"]), 0.02, False, "{:.4f}"),
    Goal("exact", "time of DFlash's attention by matrix products over flex_attention",
         lambda f: f["blocks"]["products"]["seconds"] / f["blocks"]["flex"]["seconds"], 2.0),
    Goal("exact", "families not captured with their own forward, or with other tokens",
         lambda f: len(f["own"]["wrong"]), 0, False, _WHOLE),
    Goal("exact", "plain decoding with GLM-4-9B's own layers, captured over uncaptured",
         lambda f: f["own"]["tokens_per_second"]["graphs"] / f["own"]["tokens_per_second"]["stock"], 2.5),
    Goal("learned-features", "tokens of SmolLM2's answers in the store", lambda f: f["tokens"], form=_MANY),
    *(Goal(f"learned-{name}", f"{name}'s positions in 100 s", lambda f: f["tokens"], form=_MANY)
      for name in LEARNED),
    *(Goal("learned-tau", f"{one}'s chain tau over {other}'s",
           _ratio(_row(f"{one}; chain", "tau", "drafter"), _row(f"{other}; chain", "tau", "drafter")), 1.0)
      for one, other in (("EAGLE-3.1", "EAGLE"), ("DFlash", "EAGLE-3.1"), ("DSpark", "EAGLE-3.1"))),
    Goal("learned-lossless", "DSpark keeps the target's output", lambda f: float(f["verdict"] == "lossless"), 1,
         form=_WHOLE),
    Goal("blocks-dspark", "tokens/s of training; speculators on an H100: 16,800", _ours("tokens_per_second"), 16_800,
         form=_MANY),
    *(Goal(f"blocks-{method}", "tokens/s of training", _ours("tokens_per_second"), form=_MANY)
      for method in ("dflash", "eagle3")),
    *(Goal(f"blocks-{method}", "MFU", _ours("mfu"), 0.40, form=_SHARE) for method in BLOCKS),
    *(Goal(f"blocks-{method}", "peak memory, GB", lambda f: f["ours"]["peak_bytes"] / 1e9) for method in BLOCKS),
    Goal("roofline", "plain decoding, of the measured bandwidth", _row("plain decoding", "roofline_share"), 0.80,
         form=_SHARE),
    Goal("roofline", "plain decoding over stock eager generate", _ratio(_SPEED, _STOCK), 4.0),
    Goal("roofline", "26 rows against one row", _ratio(_rows(26), _rows(1)), 1.15, False),
    Goal("roofline", "60 rows against one row", _ratio(_rows(60), _rows(1)), 1.30, False),
    Goal("roofline", "EAGLE static tree over plain decoding", _row(_TREE, "speedup"), 2.6),
    Goal("roofline", "EAGLE static tree, of its formula's limit", _row(_TREE, "limit_share"), 0.92, form=_SHARE),
    Goal("roofline", "EAGLE static tree, host time of a step", _row(_TREE, "overhead"), 0.03, False, _SHARE),
    Goal("roofline", "Kangaroo, of its formula's limit", _row(_KANGAROO, "limit_share"), 0.92, form=_SHARE),
    Goal("roofline", "EAGLE in batches of four over plain decoding", _row(f"{_TREE}, batch 4", "speedup"), 2.0),
    Goal("elementwise", "plain decoding, of the measured bandwidth", _row("plain decoding", "roofline_share"), 0.65,
         form=_SHARE),
    Goal("elementwise", "plain decoding, tokens/s; SGLang on an H100: 156", _SPEED, 200, form="{:.1f}"),
    Goal("train-7b", "MFU for the head of a 7B target", lambda f: f[f["sides"][0]]["mfu"], 0.45, form=_SHARE),
    Goal("train-7b", "tokens/s over the plain formulation", lambda f: f["ratio"]),
    Goal("train-128k", "tokens/s over the plain formulation at a vocabulary of 128k", lambda f: f["ratio"], 1.5),
    Goal("train-128k", "peak memory, of the plain formulation's", lambda f: f.get("peak_ratio"), 1 / 3, False),
    Goal("speed", "divergences of lossless methods that no tie explains", _unexplained, 0, False, _WHOLE),
    Goal("speed", "the fastest lossless method over plain decoding, greedy", _fastest),
    Goal("fused", "plain decoding without graphs, tokens/s", _SPEED, form="{:.1f}"),
    Goal("int8", "plain decoding in int8, tokens/s", _SPEED, form="{:.1f}"),
    Goal("int4", "plain decoding in int4, tokens/s", _SPEED, form="{:.1f}"),
    Goal("compiled", "plain decoding over compiled stock generate", _ratio(_SPEED, _COMPILED)),
    Goal("rehearsal", "tokens/s of DSpark's training for Qwen3-8B", lambda f: f["speed"]["tokens_per_second"],
         form=_MANY),
    Goal("rehearsal", "peak memory, GB", lambda f: f["speed"]["peak_memory_gb"], 80, False, "{:.1f}"),
    *(Goal("quantised", f"{kind}: {text}", _kind(kind, key), bound, at_least, form)
      for kind in ("fp8", "compressed fp8", "compressed w4a16")
      for text, key, bound, at_least, form in (
          ("logits from transformers' forward, of the largest", "apart", 0.05, False, "{:.4f}"),
          ("tokens/s over bf16's", "tokens_per_second", None, True, "{:.2f}"))),
]  # fmt: skip
