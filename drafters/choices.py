"""What a config may choose between, apart from the code that does it, which imports torch."""

from typing import Literal

Engine = Literal["graphs", "fused", "eager"]
Quantization = Literal["int8", "int4"]
Dtype = Literal["bfloat16", "float16", "float32"]
