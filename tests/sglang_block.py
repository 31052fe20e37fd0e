"""A program for SGLang's Python: how it reads exported block drafters.

    python sglang_block.py FOLDERS.json

A line of JSON on stdout for each folder: whether a block's rows attend only to those before them, and the temperatures
of the confidence head, if there is a file of them.
"""

import json
import sys
from pathlib import Path

from sglang_class import leave_out_kernels
from transformers import AutoConfig

if __name__ == "__main__":
    leave_out_kernels()
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.models.dflash import _get_dflash_layer_attention_params
    from sglang.srt.speculative.dspark_components.dspark_sts import load_sts_calibration_from_path

    for folder in json.loads(Path(sys.argv[1]).read_text()):
        _, kind = _get_dflash_layer_attention_params(AutoConfig.from_pretrained(folder), 0)
        file = Path(folder) / "confidence.json"
        temperatures = load_sts_calibration_from_path(str(file)).temperatures if file.is_file() else None
        print(json.dumps({"causal": kind == AttentionType.DECODER, "temperatures": temperatures}), flush=True)
