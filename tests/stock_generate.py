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
from drafters.decoding import by_text
from drafters.provenance import machine
from eval.prompt_files import detect_format, read_prompts
from eval.prompts import render

PENALTY, NEW = 1.2, 64


def compare(drafter: Drafter, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """A row without and one with the penalty: how many texts are equal, and tau; where one parts, by what margin."""
    rows, model = [], drafter.target.model
    for penalty in (1.0, PENALTY):
        equal, margins, steps, committed = 0, [], 0, 0
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
        rows.append({"repetition_penalty": penalty, "prompts": len(prompts), "equal": equal, "margins": margins})
        rows[-1] |= {"tau": committed / max(steps, 1)}
    return rows


def margin(model: PreTrainedModel, text: list[int]) -> float:
    """Between the two likeliest tokens after ``text``, in logits."""
    with torch.inference_mode():
        first, second = model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    return first - second


def random_models(count: int) -> dict[str, list[dict[str, Any]]]:
    """Of four architectures, with drafts from a copy with noise: many are accepted, and many are not."""
    found = {}
    for family in ("llama", "qwen3", "mistral-sliding", "mixtral"):
        target = TargetModel(tiny.build(family, eos_token_id=None), name=family)
        drafter = make_drafter("speculative", target, draft_model=rigged.perturbed(target, 0.05), gamma=4)
        found[f"{family}, speculative"] = compare(drafter, [prompt(5 + n % 40, n) for n in range(count)])
    return found


def trained_models(path: str, head: str, questions: Path, count: int) -> dict[str, list[dict[str, Any]]]:
    """Of a target with a trained head, and with prompt lookup."""
    model = TargetModel.from_pretrained(path, dtype="float32", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(path)
    records = list(read_prompts(questions, detect_format(questions), Counter()))[:count]
    prompts = [render(tokenizer, record.messages)[:400] for record in records]
    drafters = {"EAGLE": load_drafter(head, model), "prompt lookup": make_drafter("prompt_lookup", model)}
    return {f"{Path(head).name}, {name}": compare(drafter, prompts) for name, drafter in drafters.items()}


def main() -> None:
    """Compare, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=Path, default=Path("runs/stdlib/heldout.jsonl"), help="for the shipped one")
    parser.add_argument("--real", nargs=3, metavar=("TARGET", "HEAD", "QUESTIONS"), help="another one, with its head")
    given = parser.parse_args()
    rows = random_models(50)
    rows |= trained_models("checkpoints/stdlib-target", "checkpoints/stdlib-eagle", given.questions, 50)
    if given.real:
        target, head, questions = given.real
        rows |= trained_models(target, head, Path(questions), 10)
    sampled = {"deviation": sampled_deviation(6)}
    with mock.patch.object(by_text, "_path", lambda *given, path=by_text._path: path(*given)[:-1]):
        sampled["deviation, judged by the parent's text"] = sampled_deviation(6)
    found = {"new_tokens": NEW, "greedy": rows, "sampled": sampled, "environment": machine(torch.device("cpu"))}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
