"""The groups of keys of a draft model's training; read without torch."""

from pydantic import Field

from drafters.config import Amount, Config, DraftSize, Length, Size


class OnPolicy(Config):
    """``on_policy:``: answers that the draft model samples itself, in the place of the dialogues' own."""

    share: float = Field(0.5, gt=0, le=1, description="of the dialogues whose answer is replaced")
    every: Amount = Field(1, ge=1, description="steps whose answers are sampled at once, by the weights at the first")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    max_new_tokens: Length = Field(256, ge=1, description="of an answer, which is no longer than the one it replaces")
    batch: Size = Field(32, ge=1, description="answers sampled side by side")


class Boost(Config):
    """``boost:``: train only where draft models that are trained already miss what the target says (SpecInfer)."""

    after: list[str] = Field(min_length=1, description="folders or Hub names of the draft models before this one")
    length: DraftSize = Field(1, ge=1, description="tokens of a speculation, which all have to be right")
    keep: float = Field(0.0, ge=0, le=1, description="of what is covered already, so much is trained on all the same")
