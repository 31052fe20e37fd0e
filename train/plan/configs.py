"""The config of every step of train.start as YAML, each key with its reason, from docs/smollm2-training.md."""

import json
from collections.abc import Mapping
from typing import Any

from drafters.hub.declared import Recipe
from train.configs import schema_of
from train.plan.facts import Machine, Model

ASKED = 192  # most tokens of a question
FORWARD = 4096  # tokens of one forward of the target that features are taken from
SMALL = 1024  # hidden size up to which the learning rates measured here hold; the papers' targets begin at 4,096
LOSS_VOCAB, DRAFT_VOCAB, FREQUENT = 8192, 16_384, 2048  # tokens, of SmolLM2's 49,152: docs/smollm2-training.md
SHORT = 30  # minutes of training below which small steps over the most frequent tokens learnt more

Reasons = Mapping[str, str]
Page = tuple[dict[str, Any], Reasons]


def page(title: str, command: str, values: Mapping[str, Any], reasons: Reasons) -> str:
    """A config file: ``title`` and ``command`` above, a reason beside the keys that have one."""
    lines = [f"# {title}", f"#   {command}"]
    for key, value in values.items():
        line = f"{key}: {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{line:<32}# {reasons[key]}" if reasons.get(key) else line)
    return "\n".join(lines) + "\n"


def magpie(model: Model, rows: int, out: str, count: int, minutes: float | None) -> Page:
    """data_prep.magpie's."""
    limit = {} if minutes is None else {"minutes": max(round(minutes, 2), 0.1)}
    most = max(2, min(ASKED, model.longest // 4))
    values = {"target": model.name, "out": out, "count": count, "batch": rows, "max_new_tokens": most}
    reasons = {
        "count": "as many as there is time for",
        "max_new_tokens": "a longer question is dropped",
        "temperature": "higher: more kinds of questions, and more without sense",
    }
    return values | {"temperature": 0.9, "top_k": 100, "seed": 0} | limit, reasons


def regenerate(model: Model, rows: int, out: str, minutes: float) -> Page:
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
        "batch": "keys and values fill a quarter of the free memory, at most 64 dialogues",
        "minutes": "questions not answered by then are left out",
        "max_new_tokens": "longer answers would be fewer, and new dialogues help most",
    }
    return values, reasons


def features(model: Model, out: str, splits: dict[str, str], int8: bool, taps: list[int]) -> Page:
    """data_prep.features'."""
    values: dict[str, Any] = {"target": model.name, "splits": splits, "out": f"{out}/features"}
    values |= {"store_dtype": "int8"} if int8 else {}
    values |= {"exit_layers": taps} if taps else {}
    reasons = {"store_dtype": "half the disk of bf16, which would be full", "exit_layers": "that the drafter reads"}
    return values | {"max_length": model.longest, "batch_tokens": FORWARD}, reasons


def small_vocabulary(model: Model) -> bool:
    """Whether loss and drafts use the whole vocabulary, because the most frequent tokens would be most of it."""
    return bool(model.config.vocab_size <= 2 * DRAFT_VOCAB)


def training(
    method: str, recipe: Recipe, model: Model, machine: Machine, out: str, splits: dict[str, str], online: bool,
    minutes: float,
) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """train/<method>.py's."""
    small, cpu = model.config.hidden_size <= SMALL, machine.device.type == "cpu"
    values: dict[str, Any] = {"target": model.name, "features": "online" if online else f"{out}/features"}
    if online:
        values["data"] = {**splits, "max_length": model.longest, "target_batch_tokens": FORWARD}
    values |= {"out": f"{out}/{method}"}
    if "exit_layer" in schema_of(method).model_fields:
        values["exit_layer"] = max(1, min(3, int(model.config.num_hidden_layers) // 10))
    values |= {
        "minutes": round(minutes, 2),
        "batch_tokens": (2048 if minutes >= SHORT else 1024) if cpu else 8192,
        "learning_rate": 2.0e-3 if small else recipe.learning_rate,
        "warmup_steps": 50 if small else 200,
        "schedule": "cosine",
    }
    reasons = {
        "features": "computed while it trains: the disk is too small for them" if online else "",
        "exit_layer": "a tenth of the layers, at most three, as in the paper and docs/smollm2-training.md",
        "minutes": "the learning rate falls to 0 by then; more: minutes=..., with --resume",
        "batch_tokens": "in a short run many small steps learn more" if cpu else "as the papers' recipes in configs/",
        "learning_rate": "docs/smollm2-training.md" if small else "the paper's; nothing larger was tried here",
        "schedule": "acceptance rises when the learning rate falls",
        "start": "fc is solved for: docs/training.md",
    }
    values |= recipe.small if small else {}
    if not small_vocabulary(model):
        values |= {"loss_vocab": LOSS_VOCAB, "draft_vocab": DRAFT_VOCAB}
        values |= recipe.short if cpu and minutes < SHORT else {}
        reasons["loss_vocab"] = "three times the steps where the LM head is most of the work: docs/smollm2-training.md"
        reasons["draft_vocab"] = "the most frequent tokens; decoding may use fewer"
    return values | {"seed": 0, "log_every": 10, "eval_every": 1000, "heldout_tokens": 8192}, reasons


def drafting(method: str, model: Model, machine: Machine, out: str) -> dict[str, Any]:
    """The trained drafter, as an entry of eval's configs."""
    found: dict[str, Any] = {"drafter": method, "checkpoint": f"{out}/{method}"}
    if not small_vocabulary(model):
        found["draft_vocab"] = FREQUENT
    if machine.device.type == "cpu" and machine.dtype == "bfloat16":
        found["draft_dtype"] = "int8"  # half the LM head's bytes
    return found


def speed(model: Model, out: str, prompts: str, count: int, rows: list[dict[str, Any]]) -> Page:
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
        "stock_generate": "no other figure depends on its speed; true shows it, too",
    }
    return values, reasons


def methods(recipe: Recipe, entry: dict[str, Any], follows: bool) -> list[dict[str, Any]]:
    """The report's rows: methods without training, the trained drafter's, and a hybrid if it ``follows``."""
    rows: list[dict[str, Any]] = [{"drafter": "autoregressive"}, {"drafter": "prompt_lookup"}]
    rows += [{"label": label, **entry, **options} for label, options in recipe.rows.items()]
    if follows:
        label, options = next(iter(recipe.rows.items()))
        name = f"hybrid of lookup and {label.split(',')[0]}"
        rows.append({"label": name, "drafter": "hybrid", "head": {**entry, **options}})
    return rows


def tune(recipe: Recipe, model: Model, out: str, prompts: str, entry: dict[str, Any], count: int) -> Page:
    """eval.tune's, for a method whose drafts have options that depend on the target."""
    label = next(iter(recipe.rows))
    values, _ = speed(model, out, prompts, count, [{"label": label, **entry}])
    del values["stock_generate"]
    values |= {"out": f"{out}/tune", "knobs": dict(recipe.knobs), "start": dict(recipe.start)}
    return values, {"prompts": "not those of the report"}


def lossless(
    recipe: Recipe, model: Model, out: str, prompts: str, entry: dict[str, Any], begun: int, texts: int
) -> Page:
    """eval.lossless'."""
    values = {
        "target": {"path": model.name},
        "drafter": {key: value for key, value in entry.items() if key != "draft_dtype"} | dict(recipe.certified),
        "prompts": {"file": prompts, "count": begun, "seed": 0, "max_prompt_tokens": model.longest - model.answer},
        "greedy_tokens": min(64, model.answer),
        "texts": texts,
        "new_tokens": min(32, model.answer),
        "out": f"{out}/lossless",
    }
    reasons = {
        "drafter": "always drafts, so that every step is a test",
        "texts": "sampled; more texts reveal smaller differences",
    }
    return values, reasons
