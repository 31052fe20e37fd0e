"""Replaces vLLM for data_prep.extraction: transformers' states in the blocks of a cache; requests end in any order.

It takes three random requests a step. FAKE_DIES: it exits before that request.
"""

import os
import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data_prep.extraction.shards import Ended, Shards
from data_prep.extraction.worker import main
from drafters.model.ends import load_norm

BLOCK, BLOCKS = 16, 64


class Fake:
    def __init__(self, settings: dict[str, Any]) -> None:
        print("an engine prints on stdout")
        dtype = getattr(torch, settings["dtype"])
        self.step_tokens = settings["max_num_batched_tokens"]
        self.longest = settings["max_model_len"]
        self.layers = settings["layers"][:-1]
        self.model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
        self.before_norm: list[torch.Tensor] = []
        self.model.model.norm.register_forward_hook(lambda module, given, out: self.before_norm.append(given[0]))
        shape = BLOCKS, len(settings["layers"]), BLOCK, self.model.config.hidden_size
        self.cache, self.dice = torch.full(shape, float("nan"), dtype=dtype), random.Random(0)
        self.shards = Shards(self.cache, load_norm(settings["model"], dtype))
        self.queue: list[tuple[str, list[int], dict[str, Any]]] = []
        self.ended: list[Ended] = []
        self.left = int(os.environ.get("FAKE_DIES", 10**9))

    def add(self, name: str, tokens: list[int], place: dict[str, Any]) -> None:
        assert len(tokens) < self.longest
        self.queue.append((name, tokens, place))

    @torch.inference_mode()
    def step(self) -> list[str]:
        for ended in self.ended:
            self.shards.take(ended)
        self.cache.fill_(float("nan"))  # those blocks are another request's now
        self.ended, free, names = [], list(range(BLOCKS)), []
        self.dice.shuffle(free)
        for _ in range(min(3, len(self.queue))):
            name, tokens, place = self.queue.pop(self.dice.randrange(len(self.queue)))
            self.left -= 1
            if self.left < 0:
                self.shards._background.__exit__(None, None, None)  # what is whole is written
                os._exit(9)
            self.before_norm.clear()
            output = self.model(torch.tensor([tokens]), output_hidden_states=True)
            states = [*(output.hidden_states[layer] for layer in self.layers), self.before_norm[0]]
            blocks = [free.pop() for _ in range(0, len(tokens), BLOCK)]
            for at in range(len(tokens)):
                for number, state in enumerate(states):
                    self.cache[blocks[at // BLOCK], number, at % BLOCK] = state[0, at]
            self.ended.append(Ended(name, tokens=len(tokens), blocks=blocks, **place))
            names.append(name)
        return names


if __name__ == "__main__":
    main(Fake)
