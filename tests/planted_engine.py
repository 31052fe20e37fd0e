"""A worker for eval.parity that needs no engine: our own loop, with the mistake that PLANTED names.

HEAD: folder of our checkpoint; an engine would load the exported one. DRAFTS: tokens of a draft, if not the given ones.
"""

import os
from pathlib import Path
from typing import Any

from eval.engine_workers.protocol import serve


class Planted:
    def __init__(self, job: dict[str, Any]) -> None:
        from drafters import TargetModel, load_drafter
        from eval.measure.block_mistakes import BLOCK_MISTAKES
        from eval.measure.mistakes import MISTAKES

        assert Path(job["drafter"]).is_dir() and job["drafter"] != os.environ["HEAD"]
        self._target = TargetModel.from_pretrained(job["target"], job["dtype"], "cpu")
        depth = int(os.environ.get("DRAFTS", job["gamma"]))
        drafter: Any = load_drafter(os.environ["HEAD"], self._target, tree="chain", depth=depth)
        mistakes = BLOCK_MISTAKES if job["method"] == "dflash" else MISTAKES
        planted = [mistake.plant(drafter) for mistake in mistakes if mistake.name == os.environ["PLANTED"]]
        (self._drafter,) = planted or [drafter]
        self._eos = job["eos"]
        self.facts = {"engine": "Planted", "version": "1", "device": "cpu"}

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        from drafters import generate

        assert temperature == 0
        made = generate(self._target, self._drafter, [ids], max_new_tokens=max_new_tokens, eos_token_id=self._eos)
        steps = made.trace.steps
        drafts = [step for step in steps if step.depth]
        return {
            "tokens": made.tokens[0].tolist(),
            "prefill_seconds": made.trace.prefill_seconds,
            "decode_seconds": made.trace.decode_seconds,
            "commits": [1, *(step.committed for step in steps)],
            "drafted": [step.depth for step in drafts],
            "accepted": [step.accepted for step in drafts],
        }


if __name__ == "__main__":
    serve(Planted)
