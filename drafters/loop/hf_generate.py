"""A drafter inside transformers: ``model.generate(**inputs, custom_generate=drafter.for_transformers())``.

transformers prepares inputs, logits processors and stopping criteria as for its own decoding; the tokens come from our
loop. In float32 greedy output equals that of stock ``generate``. Sampled output has the same distribution, from other
random numbers: their seed comes from torch's global generator unless one is given.
"""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, generation
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessor, StoppingCriteria

from drafters.loop.generate import GenerateResult, Trace, generate
from drafters.loop.sampling import COLDEST, Sampling
from drafters.loop.state import padded

if TYPE_CHECKING:
    from drafters.base import Drafter

# The warpers of Sampling, in its order.
WARPERS = (generation.TemperatureLogitsWarper, generation.TopKLogitsWarper, generation.TopPLogitsWarper)
# Keys of a generation config for what no draft can serve (other ways of decoding, another drafter, scores of drafted
# tokens, another cache), with their values that mean off.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "guidance_scale"), (None, 1)),
    **dict.fromkeys(("penalty_alpha", "use_mtp"), (None, False)),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), (None,)),
    **dict.fromkeys((f"output_{what}" for what in ("scores", "logits", "attentions", "hidden_states")), (None, False)),
    "cache_implementation": (None, "dynamic", "static"),
}
# Other arguments of generate are refused.
CACHES = ("past_key_values", "cache_params")
UNDERSTOOD = ("attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep", "cache_position")


class ForTransformers:
    """The callable that ``generate`` runs; for its arguments see ``Drafter.for_transformers``.

    A batch larger than the drafter's ``max_batch`` is decoded in parts.

    Attributes:
        traces: the steps of the latest call, one trace for each part of the batch.

    Raises:
        ValueError: the drafter is lossy.
    """

    def __init__(self, drafter: "Drafter", streamer: Any = None, seed: int | None = None) -> None:
        if not drafter.lossless:
            raise ValueError(f"drafter {drafter.name!r} is lossy: take another, or decode with drafters.generate")
        self.drafter, self.streamer, self.seed = drafter, streamer, seed
        self.traces: list[Trace] = []
        self._same: WeakSet[PreTrainedModel] = WeakSet()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The prompts ``[B, T]``, padded on the left, and their continuations, padded on the right.

        Raises:
            ValueError: ``model`` is not the drafter's target, or something is asked for that no draft can serve.
        """
        self._check_model(model)
        check_config(generation_config, len(input_ids), self.streamer)
        prompts = prompts_of(input_ids, model_kwargs)
        control = FromTransformers(input_ids, logits_processor, stopping_criteria)
        if control.criteria and len(prompts) > 1 and not control.eos:
            raise ValueError("rows that a criterion ends are padded with EOS: give eos_token_id, or one prompt")
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        new = self._decode(prompts, control, bool(generation_config.do_sample))
        if self.streamer is not None:
            self.streamer.end()
        pad = generation_config._pad_token_tensor
        added = padded(new, input_ids.device, 0 if pad is None else int(pad)).to(input_ids.dtype)
        sequences = torch.cat([input_ids, added], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _decode(self, prompts: list[list[int]], control: "FromTransformers", sample: bool) -> list[list[int]]:
        """The new tokens of each sequence."""
        sampling = control.sampling if sample else Sampling()
        seed = int(torch.randint(1 << 62, ())) if self.seed is None and sample else self.seed or 0
        at_once, new, self.traces = self.drafter.max_batch or len(prompts), [], []
        for first in range(0, len(prompts), at_once):
            control.first, rows = first, prompts[first : first + at_once]
            result: GenerateResult = generate(
                self.drafter.target,
                self.drafter,
                rows,
                prompt_lengths=list(map(len, rows)),  # without padding, so that a pad token at the beginning is text
                max_new_tokens=control.room,
                **asdict(sampling),
                eos_token_id=control.eos,
                seed=seed + first,
                on_tokens=self._stream if self.streamer is not None else None,
                control=control if control.alters or control.criteria else None,
            )
            self.traces.append(result.trace)
            new += [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]
        return new

    def _stream(self, row: int, tokens: list[int]) -> None:
        for token in tokens:  # one at a time: what a streamer gets from stock generate
            self.streamer.put(torch.tensor([token]))

    def _check_model(self, model: PreTrainedModel) -> None:
        """Raise ValueError unless ``model`` has the weights of the drafter's target, and computes with them alike."""
        target = self.drafter.target
        count = sum(weights.numel() for weights in model.parameters())
        same_count = count == target.parameters and target.quantize is None
        if same_count and (model is target.model or model in self._same):
            return
        ours, theirs = dict(target.model.named_parameters()), dict(model.named_parameters())
        if not (same_count and ours.keys() == theirs.keys() and all(_equal(ours[name], theirs[name]) for name in ours)):
            raise ValueError(
                f"the drafter was built for target {target.name!r} ({target.parameters:,} weights, "
                f"{target.quantize or target.dtype}), and generate is {model.config.name_or_path!r}'s "
                f"({count:,}, {model.dtype}), which are others; build the drafter on it: "
                "load_drafter(..., TargetModel(model))"
            )
        self._same.add(model)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))


class FromTransformers:
    """Logits processors and stopping criteria of one ``generate`` call: a ``control`` of the decoding loop.

    Attributes:
        sampling: the part of the processors that ``Sampling`` does; drafts are drawn with it.
        alters: True if there are other processors, or these in another order.
        criteria: those other than the limit and EOS, which the loop checks itself.
        eos: token ids that end a sequence. room: most new tokens.
        first: index in the batch of the loop's first sequence.
    """

    def __init__(self, input_ids: Tensor, processors: list[LogitsProcessor], criteria: list[StoppingCriteria]) -> None:
        self.texts, self.first = input_ids, 0
        for each in processors:
            if isinstance(each, generation.UnbatchedClassifierFreeGuidanceLogitsProcessor):
                raise ValueError("custom_generate with a drafter: guidance runs the model once more a token; drop it")
            if isinstance(each, generation.SynthIDTextWatermarkLogitsProcessor) and len(input_ids) > 1:
                raise ValueError(f"{type(each).__name__} keeps a state for the whole batch: give one prompt at a time")
        self.processors = list(processors)
        self.sampling, self.alters = sampling_of(self.processors)
        if self.alters and self.sampling.temperature < COLDEST:  # transformers' warper divides by it, and may overflow
            raise ValueError(f"temperature must be at least {COLDEST:g}; give do_sample=False instead")
        known = (generation.EosTokenCriteria, generation.MaxLengthCriteria)
        self.criteria = [each for each in criteria if type(each) not in known]
        ends = [each.eos_token_id.tolist() for each in criteria if isinstance(each, generation.EosTokenCriteria)]
        self.eos = sorted({token for tokens in ends for token in tokens})
        longest = min(each.max_length for each in criteria if isinstance(each, generation.MaxLengthCriteria))
        self.room = longest - input_ids.shape[1]

    def scores(self, row: int, new: list[int], logits: Tensor) -> Tensor:
        row, text = self._text(row, new)
        scores = logits.to(text.device)[None]
        for each in self.processors:
            scores = each(text, scores.repeat(len(text), 1))[row : row + 1]
        return scores[0].to(logits.device)

    def ends(self, row: int, new: list[int]) -> bool:
        row, text = self._text(row, new)
        for each in self.criteria:
            done = each(text, None)
            if bool(done[row] if isinstance(done, Tensor) and done.dim() else done):
                return True
        return False

    def _text(self, row: int, new: list[int]) -> tuple[int, Tensor]:
        """The sequence's index in the whole batch, and its text, repeated for every sequence: ``[B, T + n]``.

        Processors may store something for each sequence, such as its padding: they get the number that they expect.
        """
        row += self.first
        added = torch.tensor(new, dtype=self.texts.dtype, device=self.texts.device)
        return row, torch.cat([self.texts[row], added]).expand(len(self.texts), -1)


def sampling_of(processors: list[LogitsProcessor]) -> tuple[Sampling, bool]:
    """The ``Sampling`` of the ``processors``, and True if they do anything else."""
    kinds = [type(each) for each in processors]
    usual = {"filter_value": -math.inf, "min_tokens_to_keep": 1}
    warpers = [
        each
        for each in processors
        if type(each) in WARPERS and all(getattr(each, name, value) == value for name, value in usual.items())
    ]
    others = kinds != [kind for kind in WARPERS if kind in kinds] or len(warpers) < len(processors)
    options: dict[str, Any] = {"temperature": 1.0}
    for each in warpers:
        for name in ("temperature", "top_k", "top_p"):
            options |= {name: value} if (value := getattr(each, name, None)) is not None else {}
    return Sampling(**options), others


def check_config(config: GenerationConfig, batch: int, streamer: Any) -> None:
    """Raise ValueError for settings that a drafter cannot follow; the message says what to drop."""
    for name, off in REFUSED.items():
        if (value := getattr(config, name, None)) not in off:
            raise ValueError(f"a drafter cannot do this, found {name}={value!r}; drop {name}")
    if streamer is not None and batch > 1:
        raise ValueError(f"a streamer shows one text, found {batch} prompts: drop the streamer, or give one prompt")


def prompts_of(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The ids of each prompt without its padding.

    Raises:
        ValueError: a mask that is no padding on the left, positions of another kind, or other inputs.
    """
    others = [name for name, value in model_kwargs.items() if value is not None and name not in UNDERSTOOD]
    if others or not input_ids.shape[1]:
        raise ValueError(
            f"a drafter continues input_ids alone, found {', '.join(others) or 'none of them'}; drop these"
        )
    for name in CACHES:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise ValueError(f"the cache is our own, found {name}: drop it, and give the whole text as input_ids")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    present = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids)
    if (present.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask has zeros behind a one, which is no padding on the left: set tokenizer.padding_side='left'"
        )
    if positions is not None and not torch.equal((positions * present), (present.cumsum(1) - 1) * present):
        raise ValueError("position_ids other than 0, 1, ... from each row's first token on: drop them")
    return [row[seen.bool()].tolist() for row, seen in zip(input_ids, present, strict=True)]
