"""The configs of train.start as YAML, each key with its reason; the longest of them, that of the training."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from data_prep.dialogues.messages import Message
from drafters.hub.declared import Recipe
from train.configs import schema_of
from train.plan.facts import Data, Machine, Model

ASKED = 192  # most tokens of a question
FORWARD = 4096  # tokens of one forward of the target that features are taken from
SMALL = 1024  # hidden size up to which the learning rates measured here hold; the papers' targets begin at 4,096
LOSS_VOCAB, DRAFT_VOCAB = 8192, 16_384  # tokens, of SmolLM2's 49,152: docs/smollm2-training.md
OWN_VOCAB = 32_000  # tokens of a head's own LM head, as in EAGLE-3's released heads
SHORT = 30  # minutes of training below which small steps over the most frequent tokens learnt more


class Noted(NamedTuple):
    """A value in a config, and the reason beside it."""

    value: Any
    reason: str


Page = Mapping[str, Any]  # a config: values, some of them ``Noted``


def page_text(title: str, command: str, page: Page) -> str:
    """A config file: ``title`` and ``command`` above, a reason beside the keys that have one."""
    lines = [f"# {title}", f"#   {command}"]
    for key, value in values_of(page).items():
        line = f"{key}: {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{line:<32}# {' '.join(page[key].reason.split())}" if isinstance(page[key], Noted) else line)
    return "\n".join(lines) + "\n"


def values_of(page: Page) -> dict[str, Any]:
    """The values of a config by key."""
    return {key: value.value if isinstance(value, Noted) else value for key, value in page.items()}


def magpie(model: Model, rows: int, out: str, count: int) -> Page:
    """data_prep.magpie's, without a limit of time."""
    return {
        "target": model.name,
        "out": out,
        "count": Noted(count, "as many as there is time for"),
        "batch": rows,
        "max_new_tokens": Noted(max(2, min(ASKED, model.longest // 4)), "a longer question is dropped"),
        "temperature": Noted(0.9, "higher: more kinds of questions, and more without sense"),
        "top_k": 100,
        "seed": 0,
    }


def small_vocabulary(model: Model) -> bool:
    """Whether loss and drafts use the whole vocabulary, because the most frequent tokens would be most of it."""
    return bool(model.config.vocab_size <= 2 * DRAFT_VOCAB)


def training(
    method: str, recipe: Recipe, model: Model, data: Data, machine: Machine, out: str, source: Page, minutes: float
) -> Page:
    """train/<method>.py's; ``source``: the keys of its features."""
    small, cpu, schema = model.config.hidden_size <= SMALL, machine.device.type == "cpu", schema_of(method)
    page = {"target": model.name, **source, "out": f"{out}/{method}"}
    if "mask_token_id" in schema.model_fields:
        page["mask_token_id"] = Noted(*mask_token(model, data))
    if "exit_layer" in schema.model_fields:
        layer = max(1, min(3, int(model.config.num_hidden_layers) // 10))
        page["exit_layer"] = Noted(layer, "a tenth of the layers, at most three: docs/smollm2-training.md")
    page |= {
        "minutes": Noted(round(minutes, 2), "the learning rate falls to 0 by then; more: minutes=..., with --resume"),
        "batch_tokens": Noted((2048 if minutes >= SHORT else 1024), "in a short run many small steps learn more")
        if cpu
        else Noted(8192, "as the papers' recipes in configs/"),
        "learning_rate": Noted(2.0e-3, "docs/smollm2-training.md")
        if small
        else Noted(recipe.learning_rate, "the paper's; nothing larger was tried here"),
        "warmup_steps": 50 if small else 200,
        "schedule": Noted("cosine", "acceptance rises when the learning rate falls"),
        **recipe.keys,
        **({key: Noted(value, "for a target of this size") for key, value in recipe.small.items()} if small else {}),
    }
    if not small_vocabulary(model):
        if schema.sizes_lm_head:
            page["draft_vocab"] = Noted(DRAFT_VOCAB if cpu else OWN_VOCAB, "the most frequent tokens: its own LM head")
        else:
            why = "three times the steps with a large LM head: docs/smollm2-training.md"
            page["loss_vocab"] = Noted(LOSS_VOCAB, why)
            page["draft_vocab"] = Noted(DRAFT_VOCAB, "the most frequent tokens; decoding may use fewer")
        if cpu and minutes < SHORT:
            page |= {key: Noted(value, "for a short run") for key, value in recipe.short.items()}
    return {**page, "seed": 0, "log_every": 10, "eval_every": 1000, "heldout_tokens": 8192}


def mask_token(model: Model, data: Data) -> tuple[int, str]:
    """A token that texts lack, and why they do; raises ValueError if there is none.

    It is the first embedding behind the tokenizer's tokens, else a special token that the sample of dialogues lacks.
    """
    tokenizer = model.chat.tokenizer
    if len(tokenizer) < model.config.vocab_size:
        return len(tokenizer), "an embedding without a token, so no text has it"
    turns: list[Message] = [{"role": role, "content": "Hello."} for role in ("user", "assistant")]
    printed = model.chat.tokenize([model.chat.render(turns)])  # the template's own tokens, if nothing was sampled
    found = {int(token) for one in [*printed, *data.some] for token in np.unique(one.input_ids)}
    named = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    special = tokenizer.convert_tokens_to_ids(sorted(model.chat.special_tokens))
    for token in [*named, *special]:
        if token is not None and token not in found and token != tokenizer.eos_token_id:
            text = tokenizer.convert_ids_to_tokens(token)
            return token, f"{text}, a special token that the sampled dialogues lack"
    raise ValueError(
        f"block drafters need a token that texts lack, and the sampled dialogues have all special tokens of "
        f"{model.name}; give --method eagle3"
    )
