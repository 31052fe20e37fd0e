"""Program that a dump runs with vLLM's Python. It reads lines of JSON (the settings, then folders of jobs) from stdin.

Every dialogue is a prompt with one token to generate. The connector writes the shards; this program gives the dialogues
to the engine and reports finished tokens on stdout.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.common.other_python import Say, answering, questions
from data_prep.extraction.shards import FAILED, Job
from data_prep.store.manifest import shard_file

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process; workers of several GPUs have their own
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
QUEUED = 2  # waiting tokens in units of steps, so that every step is full


class Engine:
    """vLLM with the target, keeping the hidden states of the store; ``step_tokens``: most tokens of a step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        import vllm

        self._vllm = vllm
        self.step_tokens = settings["max_num_batched_tokens"]
        layers = {"eagle_aux_hidden_state_layer_ids": settings.pop("layers")}
        states = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        self._engine = vllm.LLM(
            seed=0,
            speculative_config={**states, "draft_model_config": {"hf_config": layers}},
            kv_transfer_config={
                "kv_connector": "StoreConnector",
                "kv_role": "kv_producer",
                "kv_connector_module_path": "data_prep.extraction.connector",
            },
            **settings,
        ).llm_engine

    def add(self, name: str, tokens: list[int], place: dict[str, Any]) -> None:
        """Add a dialogue; the connector gets its ``place``."""
        asked = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}
        settings = self._vllm.SamplingParams(**asked, extra_args={"kv_transfer_params": place})
        self._engine.add_request(name, {"prompt_token_ids": tokens}, settings)

    def step(self) -> list[str]:
        """Run one step and return the names of the requests that ended."""
        return [output.request_id for output in self._engine.step() if output.finished]


def run(engine: Engine, folder: str, say: Say) -> None:
    """Process a job; raises ValueError if a shard could not be written."""
    job, parent = Job.read(folder), os.getppid()
    waiting: dict[str, int] = {}  # tokens of each request that has not ended

    def step() -> None:
        if os.getppid() != parent:
            sys.exit("the dump has ended")  # and with it the store's lock
        if ended := engine.step():
            say({"tokens": sum(waiting.pop(name) for name in ended)})

    for number, shard in job.shards.items():
        for row, tokens in enumerate(shard.input_ids.split(shard.lengths)):
            name = f"{number}-{row}"
            waiting[name] = len(tokens)
            engine.add(name, tokens.tolist(), {"job": folder, "number": number, "row": row})
            while sum(waiting.values()) > QUEUED * engine.step_tokens:
                step()
    while waiting:
        step()
    # The connector gets the last requests in another step, and a thread writes the last shards.
    left = {job.store / Path(shard_file(number)).with_suffix(".json") for number in job.shards}
    while left := {record for record in left if not record.exists()}:
        if (job.folder / FAILED).exists():
            raise ValueError((job.folder / FAILED).read_text())
        step()
        time.sleep(0.01)


def main(load: Callable[[dict[str, Any]], Engine] = Engine) -> None:
    """Answer until stdin ends."""
    with answering() as say:
        asked = questions()
        engine = load(next(asked))
        say({"loaded": True})
        for folder in asked:
            run(engine, folder, say)
            say({"done": True})


if __name__ == "__main__":
    main()
