"""What a config may choose between, apart from the code that does it, which imports torch."""

from typing import Final, Literal

Engine = Literal["graphs", "fused", "eager"]
Quantization = Literal["int8", "int4"]
StoredDtype = Literal["bfloat16", "float16", "float32"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]  # auto: what the device multiplies fast (precision.py)
# What an EAGLE head reads at index i: feature_i and token_{i+1}; feature_i and token_i; token_{i+1}; feature_i.
HeadInputs = Literal["feature+shifted_token", "feature+unshifted_token", "token", "feature"]
SHIFTED: Final = "feature+shifted_token"
UNSHIFTED: Final = "feature+unshifted_token"
# The kind of an EAGLE head's decoder layer: the target's own, or Llama's with the target's width, heads and RoPE.
HeadLayer = Literal["target", "llama"]
