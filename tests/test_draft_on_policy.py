"""On-policy text of a draft model's training: which model writes it, its masks, and the same text after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from chat_formats import CHAT_VOCAB, dialogue
from safetensors.torch import load_file

from drafters.loop.call import eos_ids
from train.run.loop import TrainRun

EVERY, ANSWER = 2, 6


@pytest.fixture(scope="module")
def settings(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("on-policy")
    tiny.build("llama", seed=1, vocab_size=CHAT_VOCAB, num_hidden_layers=1).save_pretrained(folder / "draft")
    for split, numbers in (("train", range(8)), ("heldout", range(100, 102))):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(dialogue(number)) for number in numbers))
    data = {split: str(folder / f"{split}.jsonl") for split in ("train", "heldout")}
    values = tiny_run.settings(str(target_folder), Path("online"), folder / "unused", schedule="constant", steps=4)
    return values | {
        "draft_model": str(folder / "draft"),
        "data": data | {"max_length": 100, "target_dtype": "float32"},
        "batch_tokens": 200,
        "save_every": EVERY,
        "on_policy": {"share": 1.0, "every": EVERY, "temperature": 0.0, "max_new_tokens": ANSWER, "batch": 3},
    }


def greedy(run: TrainRun, weights: dict[str, torch.Tensor], prompt: list[int]) -> list[int]:
    model, eos = run.task.draft_model(weights, torch.device("cpu"), torch.float32), eos_ids(run.inputs.target, None)
    text = list(prompt)
    while len(text) < len(prompt) + ANSWER and (len(text) == len(prompt) or text[-1] not in eos):
        text.append(int(model.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text


def test_it_is_the_present_weights_own(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text by the weights of the beginning, by the target, or fixed; a mask beside the answer; another prompt."""
    seen: list[tuple[Any, torch.Tensor, dict[str, torch.Tensor]]] = []
    with_rows = TrainRun._with_rows

    def watched(self: TrainRun, given: Any, seed: int) -> Any:
        batch = with_rows(self, given, seed)
        seen.append((batch, batch.rows, {name: value.clone() for name, value in self.task.module.state_dict().items()}))
        return batch

    monkeypatch.setattr(TrainRun, "_with_rows", watched)
    run = tiny_run.train_here("draft_model", settings | {"out": str(tmp_path / "run")})
    assert len(seen) == 4 and any(len(batch.spans) > 1 for batch, _, _ in seen)
    for step, (batch, rows, _) in enumerate(seen):
        weights, trained = seen[step - step % EVERY][2], 0
        for span in batch.spans:
            fixed = run.inputs.train[span.dialogue]
            prompt = fixed.input_ids[: int(fixed.loss_mask.nonzero()[0])].tolist()
            text = batch.input_ids[span.row, span.start : span.start + span.length].tolist()
            assert text == greedy(run, weights, prompt)[: len(fixed.input_ids)]
            assert batch.features[span.row, span.start : span.start + span.length].abs().sum(-1).min() > 0
            trained += len(text) - len(prompt)
        assert len(rows) == trained
    one, other = (seen[step][2]["model.model.embed_tokens.weight"] for step in (0, EVERY))
    assert not torch.equal(one, other)


def test_a_resumed_run_samples_what_the_first_would(settings: dict[str, Any], tmp_path: Path) -> None:
    """Answers, or the choice of dialogues, drawn from what a kill loses; a share that is not kept to."""
    options = settings["on_policy"] | {"temperature": 1.0, "share": 0.5}
    values = settings | {"on_policy": options}
    run = tiny_run.train_here("draft_model", values | {"out": str(tmp_path / "whole"), "steps": 6})
    tiny_run.train_here("draft_model", values | {"out": str(tmp_path / "parts"), "steps": 4})
    tiny_run.train_here("draft_model", values | {"out": str(tmp_path / "parts"), "steps": 6}, resume=True)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rewrite = run.data.rewrite
    assert rewrite is not None
    text = rewrite.__self__  # type: ignore[attr-defined]
    chosen = [text.chosen(epoch, index) for epoch in range(40) for index in range(8)]
    assert 0.4 < sum(chosen) / len(chosen) < 0.6
    assert [text.chosen(0, index) for index in range(8)] != [text.chosen(1, index) for index in range(8)]


def test_what_on_policy_needs(settings: dict[str, Any]) -> None:
    """A run that finds out at its first step that there is no target, or resumes with other answers."""
    with pytest.raises(ValueError, match="on_policy needs features: online"):
        tiny_run.read("draft_model", {**settings, "features": "store", "data": None})
    with pytest.raises(ValueError, match=r"save_every is 3, no multiple of on_policy.every: 2"):
        tiny_run.read("draft_model", settings | {"save_every": 3})
