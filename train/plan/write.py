"""Write the configs and the script of train.start: ``templates/`` filled with what there is time and room for."""

import json
import math
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data_prep.store.manifest import token_bytes
from drafters.common.files import replace_json, replace_text
from drafters.common.wording import size_text
from drafters.config import validate
from drafters.methods import drafter_class
from train.configs import START_SCRIPT, ScriptConfig, StartConfig, schema_of, templates
from train.core.config import TrainConfig
from train.plan.facts import FORWARD, QUESTION, Facts, mask_token, measure
from train.preflight.estimate import meta_task, target_parameters
from train.preflight.memory import check_memory, rank_memory
from train.run.files import check_run_disk

# Largest shares of the minutes. Training gets the rest, so that it reads the dialogues about five times
# (docs/smollm2-training.md: the fifth pass still helped, and new dialogues helped most).
SHARES = {"ask": 0.05, "answers": 0.15, "features": 0.1, "speed": 0.08, "lossless": 0.12}
FIXED = 0.4  # largest share of the programs' starts with the smallest report and lossless test
PROMPTS, TEXTS, HELDOUT = (4, 20), (64, 512), (8, 200)  # of the report, of the lossless test, of the answers
REPORTED, NEW = 5, 96  # rows of the report, and most tokens of an answer in it
GREEDY, SAMPLED, BATCH = 64, 32, 16  # most tokens of the lossless test's texts, and texts in a batch
# Speed of the lossless test, as a share of plain decoding in such batches: float32 has twice the bytes, half of the
# batches are small, and every text is judged.
EXACT = 0.25
USABLE = 0.5  # share of its own questions that the target can use
ENOUGH = 1000  # dialogues; fewer give a warning
SMALL = 1024  # hidden size up to which the learning rates measured here hold; the papers' targets begin at 4,096
LARGE = 32_768  # tokens of a vocabulary above which only the frequent ones are drafted: docs/smollm2-training.md
FREQUENT = 2048  # tokens of these that are drafted by default: docs/smollm2-training.md
SHORT = 60  # minutes below which a CPU learns more from small steps over the most frequent tokens
SPARE_DISK = 0.8  # share of the free disk to use: other processes write, too


def write(start: StartConfig, command: list[str], run: bool) -> None:
    """Inspect and measure, then write the configs, the script and the settings that they depend on.

    Args:
        command: the command line of train.start. run: the script runs afterwards.

    Raises:
        ValueError: an error that would otherwise end a step hours later; then nothing is written.
    """
    texts, seconds = plan(start, measure(start), command)
    script = write_files(start, texts)
    for step, each in {**seconds, "all": sum(seconds.values())}.items():
        print(f"{step:>10}  about {each / 60:.1f} minutes")
    what = "it starts now" if run else f"run it: bash {shlex.quote(str(script))}"
    print(f"{script} and {len(texts) - 1} configs are written; {what}")


def plan(start: StartConfig, facts: Facts, command: list[str]) -> tuple[dict[str, str], dict[str, float]]:
    """Return the texts of all files by name, and the estimated seconds by step; print warnings.

    Raises:
        ValueError: too few minutes, too little memory or disk, or no such head for this model.
    """
    numbers, seconds = share_out(start, facts)
    schema, cpu, large = schema_of(start.method), facts.device.type == "cpu", facts.config.vocab_size > LARGE
    answers = start.out / ("split" if facts.own else "answers")
    values = vars(facts) | vars(start) | numbers | {
        "out": str(start.out), "name": start.out.name, "asked": start.asked, "seconds": seconds, "forward": FORWARD,
        "train_file": f"{answers}/train.jsonl", "heldout_file": f"{answers}/heldout.jsonl", "here": str(Path.cwd()),
        "command": shlex.join(command), "bin": str(Path(sys.executable).parent), "online": False,
        "script": os.path.relpath(Path(__file__).parents[1] / f"{start.method}.py"),
        "cpu": cpu, "large": large, "short": cpu and start.minutes < SHORT, "small": facts.config.hidden_size <= SMALL,
        "layers": int(facts.config.num_hidden_layers), "vocab_size": f"{facts.config.vocab_size:,}",
        "frequent": FREQUENT if large and not schema.sizes_lm_head else None, "mask_token": lambda: mask_token(facts),
        "int8_head": cpu and facts.dtype == "bfloat16",
        "has_tree": "tree" in drafter_class(start.method).options.model_fields,
    }  # fmt: skip
    config = validate(schema, yaml.safe_load(fill(f"{start.method}.yaml", values)), f"{start.method}.yaml")
    config = config.settled(lambda: values["layers"])
    check_training(config, facts)
    size = numbers["train"] * facts.length * token_bytes(facts.config.hidden_size, len(config.taps), "bfloat16")
    values |= {"taps": list(config.taps), "online": size > SPARE_DISK * facts.disk}
    if values["online"]:
        del seconds["features"]
        print(f"features would take {size_text(size)}, and {size_text(facts.disk)} are free: training computes them")
    if start.data is None:
        print(f"no --data: the target asks itself; read some of {start.asked} before you trust the drafter")
    if numbers["train"] < ENOUGH and not (numbers["whole"] or facts.own):
        print(f"only about {numbers['train']:,} dialogues will be answered, too few to learn much: give more --minutes")
    if "lossless" not in seconds:
        print("no lossless test: the target in float32 does not fit into memory")
    if start.hub and not get_token():
        print(f"no Hub token: run `hf auth login` before the push to {start.hub}, the last step")
    names = [{"train": start.method}.get(step, step) for step in seconds if step not in ("split", "push", "card")]
    texts = {f"configs/{name}.yaml": fill(f"{name}.yaml", values) for name in names}
    return {**texts, START_SCRIPT: fill("run.sh", values)}, seconds


def write_files(config: ScriptConfig, texts: dict[str, str]) -> Path:
    """Write the settings and the files of a start or an adaptation, by name; return its script."""
    (config.out / "configs").mkdir(parents=True, exist_ok=True)
    replace_json(config.out / config.facts, {"settings": config.settings()})
    for name, text in texts.items():  # the script last, which marks the folder as complete
        replace_text(config.out / name, text)
    script = config.out / START_SCRIPT
    script.chmod(0o755)
    return script


def share_out(start: StartConfig, facts: Facts) -> tuple[dict[str, Any], dict[str, float]]:
    """Return numbers for the templates, and seconds by step in the script's order.

    Raises:
        ValueError: the minutes are too few for the smallest report and test.
    """
    total, once, asks = 60 * start.minutes, facts.start, start.data is None
    part = {step: share * total for step, share in SHARES.items()}
    asking = QUESTION / USABLE / facts.many  # seconds of a question
    dialogues = int(part["ask"] / asking) if asks else facts.dialogues
    heldout = max(HELDOUT[0], min(HELDOUT[1], dialogues // 10))
    # Seconds of a prompt in the report, of a sampled text, and of all greedy texts in both precisions.
    prompt = REPORTED * min(NEW, facts.answer) / facts.one
    text, begun = 1 / (EXACT * facts.many * min(1, BATCH / facts.rows)), min(heldout // 2, 8)
    text, greedy = text * min(SAMPLED, facts.answer), text * 2 * begun * min(GREEDY, facts.answer)
    others = 2 * facts.reading + (8 if asks else 7) * once + greedy
    least = others + PROMPTS[0] * prompt + TEXTS[0] * text
    if least > FIXED * total:
        raise ValueError(
            f"--minutes {start.minutes:g}: starting programs and measuring take {least / 60:.1f} of them here, which "
            f"leaves too little for training; give at least {math.ceil(least / FIXED / 60)}"
        )
    prompts = max(PROMPTS[0], min(PROMPTS[1], heldout // 2, int(part["speed"] / prompt)))
    texts = max(TEXTS[0], min(TEXTS[1], int(part["lossless"] / text))) // BATCH * BATCH
    # As many dialogues as there is time for; a tenth more are asked and answered for the held-out ones.
    answering = 0.0 if facts.own else 1.1 * facts.answered / facts.many
    limits = [part["features"] * facts.prefill / facts.length, part["answers"] / answering if answering else math.inf]
    train = max(1, int(min(dialogues, *limits)))
    seconds: dict[str, float | None] = {
        "magpie": once + 1.1 * train * asking if asks else None,
        "split": 2 * facts.reading,
        "regenerate": None if facts.own else 2 * once + train * answering,
        "features": once + train * facts.length / facts.prefill,
        "train": None,
        "speed": once + prompts * prompt,
        "lossless": 2 * once + greedy + texts * text if 4 * target_parameters(facts.config)[0] < facts.memory else None,
        "push" if start.hub else "card": once / 2,
    }
    seconds["train"] = total - sum(filter(None, seconds.values()))
    steps = {step: each for step, each in seconds.items() if each is not None}
    numbers = {"heldout": heldout, "prompts": prompts, "begun": begun, "texts": texts, "train": train, "asks": asks}
    numbers |= {"whole": not asks and train == dialogues, "new": NEW, "greedy": GREEDY, "sampled": SAMPLED}
    return numbers | {"ask_minutes": train * asking / 60, "answer_minutes": train * answering / 1.1 / 60}, steps


def check_training(config: TrainConfig, facts: Facts) -> None:
    """Raise ValueError if this target can have no such head, or the training has too little memory or disk."""
    try:
        task = meta_task(config, facts.config)
    except (ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"--method {config.drafter}: no such head for {config.target}: {error}") from error
    lengths = [facts.longest] * -(-config.batch_tokens // (facts.gpus * facts.longest))
    check_memory(sum(rank_memory(config, task, lengths, facts.gpus, facts.device.type == "cuda")[0].values()))
    check_run_disk(config, task.module)


def fill(template: str, values: dict[str, Any]) -> str:
    """Return a file of ``templates/`` with ``values``; the filters ``yaml`` and ``sh`` quote."""
    jinja = Environment(loader=FileSystemLoader(templates()), undefined=StrictUndefined, keep_trailing_newline=True)
    jinja.trim_blocks = jinja.lstrip_blocks = True
    jinja.filters |= {"yaml": partial(json.dumps, ensure_ascii=False), "sh": shlex.quote}
    return jinja.get_template(template).render(values)
