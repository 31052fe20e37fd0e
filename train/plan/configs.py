"""The config of every step as YAML, each setting with its reason, most of them from docs/smollm2-training.md."""

import json
from collections.abc import Mapping
from typing import Any

from drafters.hub.declared import Recipe
from drafters.methods import drafter_class
from train.plan.facts import Data, Machine, Model

ASKED = 192  # most tokens of a question
FORWARD = 4096  # tokens of one forward that features are taken from
SMALL = 1024  # hidden states up to which the learning rates measured here hold; the papers' begin at 4,096
LOSS_VOCAB, DRAFT_VOCAB, FREQUENT = 8192, 16_384, 2048  # of SmolLM2's 49,152: docs/smollm2-training.md
SHORT = 30  # minutes of training, below which small steps over the most frequent tokens were seen to learn more

Reasons = Mapping[str, str]


def page(title: str, command: str, values: Mapping[str, Any], reasons: Reasons) -> str:
    """A config file: ``title`` and ``command`` above, a reason beside the keys that have one."""
    lines = [f"# {title}", f"#   {command}"]
    for key, value in values.items():
        line = f"{key}: {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{line:<32}# {reasons[key]}" if key in reasons else line)
    return "\n".join(lines) + "\n"


def magpie(
    model: Model, machine: Machine, rows: int, out: str, count: int, minutes: float | None
) -> tuple[dict[str, Any], Reasons]:
    """data_prep.magpie's."""
    values = {
        "target": model.name,
        "out": out,
        "count": count,
        "batch": rows,
        "max_new_tokens": max(2, min(ASKED, model.longest // 4)),
        "temperature": 0.9,
        "top_k": 100,
        "seed": 0,
    }
    reasons = {
        "count": "as many as there is time for",
        "max_new_tokens": "a question that has not ended by then is dropped",
        "temperature": "higher: questions of more kinds, and more that make no sense",
    }
    return values | ({} if minutes is None else {"minutes": max(round(minutes, 2), 0.1)}), reasons


def regenerate(model: Model, machine: Machine, rows: int, out: str, minutes: float) -> tuple[dict[str, Any], Reasons]:
    """data_prep.regenerate's."""
    values = {
        "source": f"{out}/split/train.jsonl",
        "out": f"{out}/answers/train.jsonl",
        "target": model.name,
        "batch": rows,
        "minutes": round(minutes, 2),
        "max_new_tokens": model.answer,
        "max_context": model.longest,
        "temperature": 0.0,
        "seed": 0,
    }
    reasons = {
        "out": "the target's own answers: acceptance is 28% higher at the first token, docs/smollm2-training.md",
        "batch": "as many keys and values as a quarter of the free memory holds, at most 64 dialogues",
        "minutes": "what is not answered by then is left out",
        "max_new_tokens": "longer answers would be fewer ones, and new dialogues help most",
    }
    return values, reasons


def features(model: Model, machine: Machine, out: str, splits: dict[str, str], int8: bool, taps: list[int]) -> Any:
    """data_prep.features'."""
    values: dict[str, Any] = {"target": model.name, "splits": splits}
    values |= {"out": f"{out}/features", "store_dtype": "int8"} if int8 else {"out": f"{out}/features"}
    if taps:
        values["exit_layers"] = taps
    values |= {"max_length": model.longest, "batch_tokens": FORWARD}
    reasons = {"store_dtype": "half the disk, which bf16 would fill", "exit_layers": "where Kangaroo's adapter begins"}
    return values, reasons


def small_vocabulary(model: Model) -> bool:
    """Whether the loss and the drafts take the whole vocabulary: where few tokens are most of it."""
    return bool(model.config.vocab_size <= 2 * DRAFT_VOCAB)


def training(
    method: str, model: Model, machine: Machine, out: str, splits: dict[str, str], online: bool, minutes: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """train/<method>.py's."""
    small, cpu = model.config.hidden_size <= SMALL, machine.device.type == "cpu"
    values: dict[str, Any] = {"target": model.name, "features": "online" if online else f"{out}/features"}
    if online:
        data = {**splits, "max_length": model.longest, "target_batch_tokens": FORWARD}
        values["data"] = data
    values |= {"out": f"{out}/{method}"}
    kind: Any = drafter_class(method)
    recipe: Recipe = kind.recipe
    if "exit_layer" in kind.options.model_fields:
        values["exit_layer"] = exit_layer(model)
    values |= {
        "minutes": round(minutes, 2),
        "batch_tokens": (2048 if minutes >= SHORT else 1024) if cpu else 8192,
        "learning_rate": 2.0e-3 if small else recipe.learning_rate,
        "warmup_steps": 50 if small else 200,
        "schedule": "cosine",
    }
    reasons = {
        "features": "computed while it trains: the disk is too small for them" if online else "",
        "exit_layer": "a tenth of the layers, three at most: what the paper and docs/smollm2-training.md have",
        "minutes": "the learning rate falls to 0 by then; more: minutes=..., with --resume",
        "batch_tokens": "in a short run many small steps learn more" if cpu else "the papers' recipes in configs/",
        "learning_rate": "docs/smollm2-training.md" if small else "the paper's; nothing larger was tried here",
        "schedule": "acceptance rises each time that the learning rate falls",
    }
    if small:
        values |= recipe.small
        reasons["start"] = "the weights of fc start from a linear regression: docs/training.md"
    if not small_vocabulary(model):
        values |= {"loss_vocab": LOSS_VOCAB, "draft_vocab": DRAFT_VOCAB}
        if cpu and minutes < SHORT:
            values |= recipe.short
        reasons["loss_vocab"] = "three times the steps where the LM head is most of the work: docs/smollm2-training.md"
        reasons["draft_vocab"] = "the most frequent tokens, of which decoding takes as many as it likes"
    values |= {"seed": 0, "log_every": 10, "eval_every": 1000, "heldout_tokens": 8192}
    return values, {key: reason for key, reason in reasons.items() if reason}


def exit_layer(model: Model) -> int:
    """After which layer Kangaroo's adapter begins."""
    return max(1, min(3, int(model.config.num_hidden_layers) // 10))


def drafting(method: str, model: Model, machine: Machine, out: str) -> dict[str, Any]:
    """How what was trained decodes, as an entry of eval's configs."""
    found: dict[str, Any] = {"drafter": method, "checkpoint": f"{out}/{method}"}
    if not small_vocabulary(model):
        found["draft_vocab"] = FREQUENT
    if machine.device.type == "cpu" and machine.dtype == "bfloat16":
        found["draft_dtype"] = "int8"  # half the LM head's bytes
    return found


def speed(model: Model, machine: Machine, out: str, prompts: str, count: int, rows: list[dict[str, Any]]) -> Any:
    """eval.speed's."""
    values = {
        "target": {"path": model.name},
        "prompts": {"file": prompts, "count": count, "seed": 0, "max_prompt_tokens": model.longest - model.answer},
        "max_new_tokens": min(96, model.answer),
        "temperatures": [0.0],
        "rounds": 1,
        "warmup": 1,
        "stock_generate": False,
        "out": f"{out}/speed",
        "drafters": rows,
    }
    reasons = {
        "prompts": "held out: nothing was trained on them",
        "stock_generate": "its speed is no ground of any other figure; true shows it, too",
    }
    return values, reasons


def methods(method: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's rows: methods that need no training, and the trained drafter with the options of its recipe."""
    kind: Any = drafter_class(method)
    recipe: Recipe = kind.recipe
    rows: list[dict[str, Any]] = [{"drafter": "autoregressive"}, {"drafter": "prompt_lookup"}]
    rows += [{"label": label, **entry, **options} for label, options in recipe.rows.items()]
    if kind.follows:
        label, options = next(iter(recipe.rows.items()))
        head = {**entry, **options}
        rows.append({"label": f"hybrid of lookup and {label.split(',')[0]}", "drafter": "hybrid", "head": head})
    return rows


def tune(model: Model, machine: Machine, out: str, prompts: str, entry: dict[str, Any], count: int) -> Any:
    """eval.tune's, for a method whose recipe has ``knobs``."""
    kind: Any = drafter_class(entry["drafter"])
    recipe: Recipe = kind.recipe
    values, _ = speed(model, machine, out, prompts, count, [{"label": next(iter(recipe.rows)), **entry}])
    del values["stock_generate"]
    values |= {"out": f"{out}/tune", "knobs": dict(recipe.knobs), "start": dict(recipe.start)}
    return values, {"prompts": "not those that the report measures"}


def lossless(
    model: Model, out: str, prompts: str, entry: dict[str, Any], begun: int, texts: int
) -> tuple[dict[str, Any], Reasons]:
    """eval.lossless'."""
    kind: Any = drafter_class(entry["drafter"])
    new = min(32, model.answer)
    values = {
        "target": {"path": model.name},
        "drafter": {key: value for key, value in entry.items() if key != "draft_dtype"} | dict(kind.recipe.certified),
        "prompts": {"file": prompts, "count": begun, "seed": 0, "max_prompt_tokens": model.longest - model.answer},
        "greedy_tokens": min(64, model.answer),
        "texts": texts,
        "new_tokens": new,
        "out": f"{out}/lossless",
    }
    reasons = {
        "drafter": "a chain: always drafted, so that there is something to test",
        "texts": "sampled; more see more",
    }
    return values, reasons


def own_files(data: Data, out: str) -> dict[str, str]:
    """The dialogues that are trained on and held out, by split."""
    folder = f"{out}/split" if data.own else f"{out}/answers"
    return {split: f"{folder}/{split}.jsonl" for split in ("train", "heldout")}
