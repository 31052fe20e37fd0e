"""Shape of an MTP layer. Imports no torch."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from drafters.config import DraftSize, Size
from drafters.heads.shape import HeadShape

Kind = Literal["qwen", "mimo", "deepseek"]
# What the programs of each family do, beside the names of its tensors.
KINDS: dict[str, dict[str, Any]] = {
    "qwen": {},
    "mimo": {"embedding_first": False, "masks_first": True},
    "deepseek": {"feeds_back_normed": False, "masks_first": True},
}


class MTPShape(HeadShape):
    """Keys of an MTP layer. ``kind`` sets the others, unless they are given.

    ``kind``: the family whose tensors' names it has: qwen (Qwen3-Next, Qwen3.5), mimo (MiMo), deepseek (DeepSeek-V3,
    GLM-4.5 and later).
    """

    stated: ClassVar[tuple[str, ...]] = ("kind", "embedding_first", "feeds_back_normed", "masks_first")
    mistakes: ClassVar[dict[str, str]] = {
        "embedding_first": "embedding and hidden state swapped",
        "feeds_back_normed": "feedback on the wrong side of the norm",
    }

    reads_last: ClassVar[bool] = True

    kind: Kind = Field(default="qwen", description="names of its tensors in the target's files: docs/mtp.md")
    layers: DraftSize = Field(default=1, ge=1, description="MTP layers; step k of a draft runs layer k mod this number")
    embedding_first: bool = Field(default=True, description="order of what fc reads: embedding, then hidden state")
    feeds_back_normed: bool = Field(default=True, description="the next step reads the output after the norm")
    masks_first: bool = Field(default=False, description="the embedding at position 0 of a text is zero")
    state: Size | None = Field(
        default=None, ge=1, description="the target's state that it reads; null: the feature, after the final norm"
    )

    @property
    def shares(self) -> bool:
        """Return True if all layers share the parts around them: norms and ``fc``."""
        return self.kind == "qwen" or self.layers == 1

    @property
    def reads(self) -> tuple[int, ...]:
        return () if self.state is None else (self.state,)

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, data: Any) -> Any:
        return KINDS.get(str(data.get("kind")), {}) | data if isinstance(data, dict) else data
