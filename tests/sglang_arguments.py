"""A program for SGLang's Python: the arguments of our worker as SGLang itself reads them, as on a GPU.

    python sglang_arguments.py JOBS.json

A line of JSON on stdout for each job: the speculation that SGLang resolves its ``ServerArgs`` to.
"""

import inspect
import json
import sys
from pathlib import Path

from sglang_class import leave_out_kernels

from eval.engine_workers.sglang_worker import arguments, sampling

RESOLVED = ("algorithm", "draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens", "token_map")

if __name__ == "__main__":
    leave_out_kernels()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

    inspect.signature(Engine.generate).bind(None, input_ids=[1], sampling_params={}, stream=True)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        given = ServerArgs(device="cuda", **arguments(job))
        given.resolve_once()
        given.check_server_args()
        found = given.resolved_dict()
        assert found["stream_interval"] == 1 and not found["incremental_streaming_output"]
        for temperature in (0.0, 1.0):
            settings = SamplingParams(**sampling(job, temperature, 8))
            settings.normalize(None)
            settings.verify(1000)
        print(json.dumps({name: found[f"speculative_{name}"] for name in RESOLVED}), flush=True)
