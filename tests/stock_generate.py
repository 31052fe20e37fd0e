"""Is generate(custom_generate=drafter.for_transformers()) stock generate, token for token in float32, and in law?

    python tests/stock_generate.py --out stock.json
    python tests/stock_generate.py --out stock.json --real runs/real/target checkpoints/smollm2-eagle question.jsonl

Greedy, with and without a repetition penalty: tiny random models of four architectures, the target that ships here with
its EAGLE head, and a real one if named. Sampled, with top-p and a repetition penalty, by chi-square (distribution.py):
as it is, and with every node judged by its parent's text, which has to be seen.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import rigged
import tiny
import torch
from conformance import prompt
from test_for_transformers import sampled_deviation
from transformers import AutoTokenizer, PreTrainedModel

from drafters import Drafter, TargetModel, load_drafter, make_drafter
from drafters.common.machine import machine
from drafters.loop import acceptance
from eval.prompts.prompt_files import detect_format, read_prompts
from eval.prompts.prompts import render

PENALTY, NEW, SHIPPED = 1.2, 64, "checkpoints/stdlib-target"


def compare(drafter: Drafter, prompts: list[list[int]], penalty: float) -> dict[str, Any]:
    """How many texts are equal, and tau; where one parts, by what margin."""
    model, equal, margins, steps, committed = drafter.target.model, 0, [], 0, 0
    for ids in prompts:
        given = torch.tensor([ids])
        asked: dict[str, Any] = {"attention_mask": torch.ones_like(given), "do_sample": False}
        asked |= {"max_new_tokens": NEW, "repetition_penalty": penalty}
        stock = model.generate(given, **asked)[0].tolist()
        decode = drafter.for_transformers()
        ours = model.generate(given, custom_generate=decode, **asked)[0].tolist()
        equal += ours == stock
        if ours != stock:
            at = next(n for n, (a, b) in enumerate(zip([*ours, -1], [*stock, -1], strict=False)) if a != b)
            margins.append(margin(model, stock[:at]))
        steps += len(decode.traces[0].steps)
        committed += decode.traces[0].decoded_tokens
    return {"prompts": len(prompts), "equal": equal, "margins": margins, "tau": committed / max(steps, 1)}


def margin(model: PreTrainedModel, text: list[int]) -> float:
    """Between the two likeliest tokens after ``text``, in logits."""
    with torch.inference_mode():
        first, second = model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    return first - second


def broken_deviation() -> float | str:
    """With every node judged by its parent's text: it has to be large, or impossible tokens come."""

    def one_early(state: Any, row: int, drafted: list[int], logits: Any, true: Any = acceptance.scores_after) -> Any:
        return true(state, row, drafted[:-1], logits)

    with mock.patch.object(acceptance, "scores_after", one_early):
        try:
            return sampled_deviation(6)
        except AssertionError as error:
            return str(error).splitlines()[0]


Case = tuple[Drafter, list[list[int]]]


def random_models(count: int) -> Iterator[tuple[str, Case]]:
    """Of four architectures, with drafts from a copy with noise: many are accepted, and many are not."""
    for family in ("llama", "qwen3", "mistral-sliding", "mixtral"):
        target = TargetModel(tiny.build(family, eos_token_id=None), name=family)
        drafter = make_drafter("speculative", target, draft_model=rigged.perturbed(target, 0.05), gamma=4)
        yield f"{family}, speculative", (drafter, [prompt(5 + n % 40, n) for n in range(count)])


def trained_models(path: str, head: str, questions: Path, count: int) -> Iterator[tuple[str, Case]]:
    """Of a target with a trained head, and with prompt lookup."""
    model = TargetModel.from_pretrained(path, dtype="float32", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(path)
    records = list(read_prompts(questions, detect_format(questions), Counter()))[:count]
    prompts = [render(tokenizer, record.messages)[:400] for record in records]
    yield f"{Path(head).name}, EAGLE", (load_drafter(head, model), prompts)
    yield f"{Path(head).name}, prompt lookup", (make_drafter("prompt_lookup", model), prompts)


def main() -> None:
    """Compare what is not in the JSON yet, and write each figure there as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="goes on where it stopped")
    parser.add_argument("--questions", type=Path, default=Path("runs/stdlib/heldout.jsonl"), help="for the shipped one")
    parser.add_argument("--real", nargs=3, metavar=("TARGET", "HEAD", "QUESTIONS"), help="another one, with its head")
    given = parser.parse_args()
    found: dict[str, Any] = {"new_tokens": NEW, "greedy": {}, "sampled": {}, "environment": None}
    if given.out.is_file():
        found = json.loads(given.out.read_text())

    def keep(part: str, name: str, measure: Callable[[], Any]) -> None:
        if name not in found[part]:
            found[part][name] = measure()
            found["environment"] = machine(torch.device("cpu"))
            given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found[part][name]}", flush=True)

    keep("sampled", "deviation", lambda: sampled_deviation(6))
    keep("sampled", "deviation, judged by the parent's text", broken_deviation)
    cases = [random_models(50), trained_models(SHIPPED, "checkpoints/stdlib-eagle", given.questions, 50)]
    if given.real:
        cases.append(trained_models(given.real[0], given.real[1], Path(given.real[2]), 10))
    for name, (drafter, prompts) in chain(*cases):
        for penalty in (1.0, PENALTY):
            keep("greedy", f"{name}, penalty {penalty:g}", partial(compare, drafter, prompts, penalty))


if __name__ == "__main__":
    main()
