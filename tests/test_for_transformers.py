"""Drafters inside transformers' generate: its tokens, distribution, processors, criteria, streamers, and refusals."""

import copy
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import rigged
import tiny
import torch
from chat_formats import CHATML_SPECIALS, byte_level
from conformance import plain_greedy, prompt, target_of
from distribution import LIMIT, NEW, PROMPT, VOCAB, places_of, statistic, toy
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import MaxLengthCriteria, StoppingCriteria

from drafters import Drafter, TargetModel, generate, load_drafter, make_drafter
from drafters.loop.hf_generate import FromTransformers, sampling_of
from drafters.policy.costs import Curve
from drafters.policy.shape import Costs, ShapePolicy

ROOT = Path(__file__).parents[1]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 6,
    "bad_words_ids": [[7], [9, 4]],
    "exponential_decay_length_penalty": (4, 1.1),
}


@lru_cache(maxsize=8)
def speculative(family: str = "llama") -> Drafter:
    """Many of whose drafts are accepted, and many are not."""
    target = target_of(family)
    return make_drafter("speculative", target, draft_model=rigged.perturbed(target, 0.05), gamma=4)


def padded(lengths: tuple[int, ...] = (9, 5, 7)) -> dict[str, Tensor]:
    ids = torch.full((len(lengths), max(lengths)), 2)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = torch.tensor(prompt(length, row)), 1
    return {"input_ids": ids, "attention_mask": mask}


def both(drafter: Drafter, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """What stock generate makes of the prompts, and what it makes of them with the drafter."""
    asked = {"max_new_tokens": 24, "do_sample": False} | options
    stock, ours = (
        drafter.target.model.generate(**given, **copy.deepcopy(asked), **how)
        for how in ({}, {"custom_generate": drafter.for_transformers()})
    )
    return stock, ours


@pytest.mark.parametrize("options", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_is_stock_generates(family: str, options: dict[str, Any]) -> None:
    """Catches processors that see another row's text, none, or of a wrong length; padding taken for text; and a
    forced EOS at another length."""
    stock, ours = both(speculative(family), padded(), **options, forced_eos_token_id=1)
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("mask", [True, False])
def test_a_text_may_begin_with_the_padding_token(mask: bool) -> None:
    """Catches a text refused as padded though attention_mask says, or transformers decides, that all of it is text."""
    drafter = speculative()
    pad = drafter.target.config.pad_token_id
    ids = torch.tensor([[pad, pad, 9, 5, 7], [8, 6, 9, 5, 7]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if mask else {"input_ids": ids}
    stock, ours = both(drafter, given, pad_token_id=pad if mask else drafter.target.config.eos_token_id)
    assert torch.equal(stock, ours)


def test_trees_and_rows_one_at_a_time() -> None:
    """Catches the path to a node taken in a tree from its neighbour, and a batch that is decoded row by row
    and judged by the first row's text: here by the padding, and by what each may say."""
    target = target_of("llama")
    allowed = [list(range(first, tiny.VOCAB_SIZE, 2)) for first in (0, 1, 0)]
    options = PENALTIES | {"prefix_allowed_tokens_fn": lambda row, text: allowed[row]}
    tree = rigged.eagle(target, 0.3, "static")
    lookahead = make_drafter("lookahead", target)
    assert lookahead.max_batch == 1
    for drafter in (tree, lookahead):
        stock, ours = both(drafter, padded(), **options)
        torch.testing.assert_close(ours, stock)


class Recorder(LogitsProcessor):
    """Keeps what it was shown, and changes scores by how often it was called: such a state is stock generate's, too."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shown.append(input_ids[0].tolist())
        return scores.roll(len(self.shown) % 3, dims=1)


class Ends(StoppingCriteria):
    """Ends a row at a length or a token; keeps what it was shown."""

    def __init__(self, token: int = -1, length: int = 99) -> None:
        self.token, self.length = token, length
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.shown.append(input_ids[0].tolist())
        return (input_ids[:, -1] == self.token) | (input_ids.shape[1] >= self.length)


def test_processors_and_criteria_are_asked_as_by_stock_generate() -> None:
    """Catches a processor called for drafts that are not accepted, out of order or twice: one with a state would judge
    by it."""
    seen = []
    for how in ({}, {"custom_generate": speculative().for_transformers()}):
        processor, criterion = Recorder(), Ends(length=30)
        given = torch.tensor([prompt(9)])
        text = speculative().target.model.generate(
            given, max_new_tokens=40, eos_token_id=None, pad_token_id=2,
            logits_processor=LogitsProcessorList([processor]), stopping_criteria=[criterion], **how,
        )  # fmt: skip
        assert text.shape[1] == 30
        seen.append((text.tolist(), processor.shown[:21], criterion.shown))
    assert seen[0] == seen[1]


def test_rows_end_where_stock_generate_ends_them() -> None:
    """Catches tokens behind a stopping criterion's, or behind an EOS in the middle of a draft, and rows that end early
    filled with something else."""
    drafter, given = speculative(), padded()
    stock, _ = both(drafter, given, eos_token_id=[])
    for place in range(5):
        eos, stop = stock[0, 9 + place].item(), stock[1, 12 + place].item()
        for options in ({"eos_token_id": eos}, {"eos_token_id": eos, "stopping_criteria": [Ends(stop)]}):
            expected, ours = both(drafter, given, pad_token_id=3, **options)
            torch.testing.assert_close(ours, expected)
    stock, ours = both(drafter, given, max_time=0.0)
    assert ours.shape == stock.shape == (3, 10)


def sampled_deviation(batches: int) -> float:
    """Of sampling with top-p, a repetition penalty and others: see ``distribution.deviation``."""
    target, model = toy(), toy().model
    drafter = rigged.eagle(target, 0.3, "static")
    config = GenerationConfig(do_sample=True, temperature=1.2, top_p=0.9, top_k=4, repetition_penalty=1.6, min_p=0.02)
    config._eos_token_tensor = None
    processors = model._get_logits_processor(config, len(PROMPT), torch.tensor([PROMPT]), device="cpu", model_kwargs={})
    sampling, others = sampling_of(processors)
    assert others and (sampling.temperature, sampling.top_k, sampling.top_p) == (1.2, 4, 0.9)

    def warp(text: Tensor, logits: Tensor) -> Tensor:
        lengths = range(len(PROMPT), text.shape[1] + 1)
        rows = [processors(text[:, :length], logits[:, at]) for at, length in enumerate(lengths)]
        return torch.stack(rows, 1).softmax(-1)

    tokens, places, deep = [], [], 0
    for seed in range(batches):
        batch = torch.tensor([PROMPT] * 60)
        control = FromTransformers(batch, processors, [MaxLengthCriteria(len(PROMPT) + NEW)])
        result = generate(
            target, drafter, batch, max_new_tokens=NEW, eos_token_id=[], seed=seed, control=control,
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        )  # fmt: skip
        deep += sum(step.accepted >= 2 for step in result.trace.steps)
        tokens.append(result.tokens)
        places.append(places_of(result))
    assert deep > 30 * batches and target.vocab_size == VOCAB
    return statistic(target, warp, torch.cat(tokens), torch.cat(places))


def test_sampled_by_the_text_is_distributed_as_the_models_own() -> None:
    """Catches a row left without its processors, judged by the text of the node before it or beside it, or drafts that
    are verified against a distribution other than the processed one."""
    assert sampled_deviation(2) < LIMIT


class Fixed:
    """Scores of its own, which say all of the distribution: by the row and the number of new tokens."""

    alters = True
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0], [0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.9, 0.1]])

    def scores(self, row: int, new: list[int], logits: Tensor) -> Tensor:
        return self.p[(row + len(new)) % 3].log()

    def ends(self, row: int, new: list[int]) -> bool:
        return False


def test_scores_are_not_warped_again() -> None:
    """Catches temperature, top-k or top-p applied to scores that the processors have warped: with the first token, or
    behind drafts."""
    drafter, rows = rigged.eagle(toy(), 0.3, "static"), 300
    how: dict[str, Any] = {"temperature": 0.4, "top_k": 2, "top_p": 0.5, "seed": 0}
    found = generate(
        toy(), drafter, [PROMPT] * rows, max_new_tokens=6, eos_token_id=[], control=Fixed(), **how
    ).tokens.T.reshape(6, rows // 3, 3)
    for place, tokens in enumerate(found):
        for row in range(3):
            seen = tokens[:, row].bincount(minlength=VOCAB) / len(tokens)
            assert float((seen - Fixed.p[(row + place) % 3]).abs().sum()) / 2 < 0.2


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an example in docs/transformers.md that no longer runs, and a head that changes the target's text."""
    monkeypatch.chdir(ROOT)
    costs = Costs(Curve((1, 64), (1.0, 1.5)), first=0.1, level=0.1, row=0.01)  # drafts are profitable
    monkeypatch.setattr(ShapePolicy, "_measured", lambda *given: costs)
    page = (ROOT / "docs" / "transformers.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0]
    made: dict[str, Any] = {}
    exec(code, made)
    model, tau = made["model"], made["decode"].traces[0].tau
    stock = model.generate(**made["inputs"], max_new_tokens=32, repetition_penalty=1.2)
    assert torch.equal(made["output"], stock) and tau > 1.2


def test_seeds() -> None:
    """Catches random numbers that torch.manual_seed does not rule, or that rule themselves: each text the same."""
    drafter, given = speculative(), {"input_ids": torch.tensor([prompt(9)])}
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "custom_generate": drafter.for_transformers()}

    def sample(seed: int, **more: Any) -> Tensor:
        torch.manual_seed(seed)
        return drafter.target.model.generate(**given, **options | more)

    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    several = sample(1, num_return_sequences=3)
    assert len({tuple(row) for row in several.tolist()}) == 3
    options["custom_generate"] = drafter.for_transformers(seed=5)
    assert torch.equal(sample(1), sample(2))
    result = sample(1, return_dict_in_generate=True)
    result.sequences[0, 0] = 0  # an inference tensor would refuse
    assert result.sequences.shape == (1, 21)


def test_the_model_must_be_the_target() -> None:
    """Catches text of the drafter's target given for that of another model, or of the same one with an adapter in it,
    and a copy of the target refused."""
    drafter, given = speculative(), {"input_ids": torch.tensor([prompt(9)])}

    def generates(model: PreTrainedModel) -> Tensor:
        return model.generate(**given, max_new_tokens=5, do_sample=False, custom_generate=drafter.for_transformers())

    model = copy.deepcopy(drafter.target.model)
    assert generates(model)[0, 9:].tolist() == plain_greedy(drafter.target, prompt(9), 5)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    for wrong in (model, model.to(torch.bfloat16), tiny.build("qwen3")):
        with pytest.raises(ValueError, match=re.escape("which are others; build the drafter on it: load_drafter(")):
            generates(wrong)
    model = tiny.build("llama")
    changed = make_drafter("prompt_lookup", TargetModel(model))
    model.model.layers[0].mlp.up_proj.lora = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="which are others"):
        model.generate(**given, custom_generate=changed.for_transformers())
    with pytest.raises(ValueError, match=r"wrap the loaded model: TargetModel\(model\)"):
        make_drafter("prompt_lookup", model)


def test_what_cannot_be_done_is_refused() -> None:
    """Catches beams, guidance and scores left out in silence, and padding on the right read as text."""
    drafter, row = speculative(), {"input_ids": torch.tensor([prompt(9)])}
    batch = {name: value.flip(1) for name, value in padded().items()}
    lossy = make_drafter("bild", drafter.target, draft_model=drafter.target)
    cases: list[tuple[dict[str, Any], str]] = [
        (row | {"num_beams": 2}, "found num_beams=2; .*drop num_beams"),
        (row | {"guidance_scale": 1.5}, "found guidance_scale=1.5"),
        (row | {"past_key_values": None, "position_ids": torch.arange(9)[None] + 1}, "position_ids other than"),
        (batch, "tokenizer.padding_side='left'"),
        (padded() | {"eos_token_id": None, "stopping_criteria": [Ends(3)], "pad_token_id": 2}, "give eos_token_id"),
        (row | {"temperature": 1e-30, "do_sample": True, "repetition_penalty": 1.3}, "must be at least 1e-20; give do"),
        (
            padded()
            | {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2]), "do_sample": True},
            "give one prompt at a time",
        ),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            drafter.target.model.generate(**{"max_new_tokens": 3, "do_sample": False} | options,
                                          custom_generate=drafter.for_transformers())  # fmt: skip
    with pytest.raises(ValueError, match="drafter 'bild' is lossy"):
        lossy.for_transformers()


def test_the_repository_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder whose generate.py loads another drafter, or one afresh for every call, and stop strings, which
    transformers forgets on the way to a callable."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tiny.build("llama", vocab_size=300, eos_token_id=1)
    drafter = rigged.eagle(TargetModel(model), None, "static")
    drafter.save_pretrained(tmp_path / "mine")
    given = {"input_ids": torch.tensor([prompt(9)])}
    form: dict[str, Any] = {"custom_generate": str(tmp_path / "mine"), "trust_remote_code": True}
    tokenizer = byte_level(None, CHATML_SPECIALS, None, "<|im_end|>")
    plain = model.generate(**given, max_new_tokens=20, do_sample=False)
    ending = tokenizer.decode(plain[0, 15:16])
    loads: list[str] = []
    monkeypatch.setattr(
        "drafters.for_transformers.load_drafter", lambda where, *more: loads.append(where) or load_drafter(where, *more)
    )
    for options in ({}, {"repetition_penalty": 1.5}, {"stop_strings": [ending], "tokenizer": tokenizer}):
        asked: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False} | options
        torch.testing.assert_close(model.generate(**given, **asked, **form), model.generate(**given, **asked))
    assert loads == [str(tmp_path / "mine")]
    with pytest.raises(ValueError, match="drop assistant_model"):
        model.generate(**given, assistant_model=model, **form)
