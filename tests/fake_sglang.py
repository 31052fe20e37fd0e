"""A fake of the package ``sglang``: our own loop, whose steps become chunks as in version 0.5.23.

A chunk has all tokens up to here; only the last one has the histogram of the verifications, which SGLang counts before
EOS or the limit cuts them. HEAD: folder of our checkpoint. JOINED: tries of each prompt whose second and third chunk
come as one, as they do where the reading process is late.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drafters import TargetModel, generate, load_drafter, make_drafter

__version__ = "0.0.1"


class Engine:
    def __init__(self, **given: Any) -> None:
        dtype = getattr(torch, given["dtype"])
        self._target = TargetModel.from_pretrained(given["model_path"], dtype, "cpu")
        self._draft_tokens, self._tries = 0, Counter[tuple[int, ...]]()
        if given.get("speculative_algorithm") is None:
            self._drafter: Any = make_drafter("autoregressive", self._target)
            return
        head = json.loads((Path(given["speculative_draft_model_path"]) / "config.json").read_text())
        assert head["architectures"][0] in ("LlamaForCausalLMEagle3", "Qwen3DSparkModel")  # SGLang's names
        tokens = given.get("speculative_num_draft_tokens", 0) - 1
        self._draft_tokens = given.get("speculative_dspark_block_size", tokens)
        assert given.get("speculative_num_steps", self._draft_tokens) == self._draft_tokens
        self._drafter = load_drafter(os.environ["HEAD"], self._target, tree="chain", depth=self._draft_tokens)

    def generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> Iterator[dict[str, Any]]:
        assert stream and sampling_params["temperature"] == 0
        most = sampling_params["max_new_tokens"]
        beyond = most + self._draft_tokens  # SGLang's drafts have one length up to the end
        made = generate(self._target, self._drafter, [input_ids], max_new_tokens=beyond, eos_token_id=[])
        tokens: list[int] = made.tokens[0].tolist()
        eos = [] if sampling_params["ignore_eos"] else sampling_params["stop_token_ids"]
        end = min([most, *(place + 1 for place, token in enumerate(tokens) if token in eos)])
        self._tries[tuple(input_ids)] += 1
        joined = self._tries[tuple(input_ids)] <= int(os.environ.get("JOINED", "0"))
        length, histogram = 1, [0] * (self._draft_tokens + 1)
        for number, step in enumerate(made.trace.steps):
            if length >= end:
                break
            if not (joined and number == 1):
                yield {"output_ids": tokens[:length], "meta_info": {"finish_reason": None}}
            length += step.accepted + 1
            histogram[step.accepted] += 1
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": end}}
        if self._draft_tokens and sum(histogram):
            meta |= {"spec_verify_ct": sum(histogram), "spec_correct_drafts_histogram": histogram}
        yield {"output_ids": tokens[:end], "meta_info": meta}
