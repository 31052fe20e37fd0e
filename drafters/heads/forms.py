"""The stored forms of a head: how its authors' code and engines write and load it. One protocol for all heads.

A form is ``config.json`` and one file of tensors. Programs that load it report few mistakes: a missing tensor is left
random, and a wrong key only lowers acceptance. So everything is checked here.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.fingerprints import same_weights
from drafters.common.paths import readable
from drafters.common.wording import dtype_name, shortened
from drafters.config import Config
from drafters.heads.keys import CONFIG_FILE, READERS, Keys, made_from, older_rope, rope
from drafters.heads.shape import HeadShape
from drafters.model.draft_head import D2T
from drafters.model.ends import load_frozen_ends
from drafters.model.layers import ROPES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMBEDDING = "embed_tokens.weight"
T2D = "t2d"  # bool [V]: which of the target's tokens are draft tokens
CERTAIN = 1 << 20  # of ``HeadForms.match``: no other head has such a file
_ROPE_DEFAULTS = ("beta_fast", "beta_slow")  # keys of ROPES with the same default in all readers
STEPS = 5  # tokens of a draft in speculators' config.json and in the commands shown


class Stored(NamedTuple):
    """A folder in some form: ``config.json`` without nulls, and tensors. ``source``: its name in errors.

    ``pickled``: its tensors are in a pickled file.
    """

    folder: Path
    source: str
    config: Mapping[str, Any]
    weights: dict[str, Tensor]
    pickled: bool = False


class Stated(NamedTuple):
    """What the user says of a head where its folder does not; ``target``: the name of its target."""

    target: str = "the target"
    exit_layer: int | None = None
    layout: str | None = None
    taps: list[int] | None = None


class Reading(NamedTuple):
    """What a folder is: the keys of the shape, and the tensors of the module.

    ``notes``: for the user. ``doubts``: what may lower acceptance; an import tells them, a check refuses them.
    """

    options: dict[str, Any]
    weights: dict[str, Tensor]
    notes: list[str]
    doubts: list[str]


class Trained(NamedTuple):
    """A checkpoint: ``source`` is its name in errors, ``drafting`` its drafting options."""

    source: str
    shape: Any
    drafting: Any
    weights: dict[str, Tensor]


class Written(NamedTuple):
    """A head in the form of a program. ``readers``: all programs that load it. ``notices``: what a user has to know.

    ``hot``: the draft vocabulary of SGLang's file; None if there is none.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    readers: tuple[str, ...]
    notices: list[str]
    hot: Tensor | None = None


class HeadForms:
    """All stored forms of one head; a head derives its own. By default only this toolkit loads it.

    Attributes:
        noun: the head in words, with its article.
        readers: the names in ``READERS`` of the programs that load it in some form.
        keys: types of the keys of ``config.json``.
        code: how the official code loads it; {target}, {out} and {exit_layer} are filled in. note: its limits.
        pickled: the official code reads pytorch_model.bin only.
        has_lm_head_copy: a trainer of such heads stores a copy of the target's LM head beside that of its embedding.
        drafts_blocks: engines count the anchor among the tokens of a draft.
        targets: by program, the families (model_type) that it runs beside such a head; absent: all.
        served_as: the method's name in engines, where it is not ours. vllm_options: more of vLLM's speculative config.
    """

    noun = ""
    readers: tuple[str, ...] = ()
    shape: type[HeadShape] = HeadShape
    keys: ClassVar[type[Keys]] = Keys
    code = ""
    note = ""
    pickled = False
    has_lm_head_copy = False
    drafts_blocks = False
    targets: ClassVar[Mapping[str, Collection[str]]] = {}
    served_as = ""
    vllm_options: ClassVar[Mapping[str, Any]] = {}

    def match(self, config: Mapping[str, Any], names: set[str]) -> int:
        """The number of tensors that make a file with these ``names`` such a head; 0: it is none."""
        return 0

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names of the module; raises ValueError for two of one name."""
        return dict(weights)

    def read(self, stored: Stored, target: PretrainedConfig, stated: Stated) -> Reading:
        """Read what a folder is; ``stored.weights`` are ``renamed``, without the target's embedding.

        Raises:
            ValueError: keys that contradict each other, the tensors, the target or the user, or have two readings.
        """
        raise NotImplementedError

    def why_not(self, to: str, shape: Any, target: PretrainedConfig) -> str | None:
        """Why the program ``to`` cannot serve a head of this shape; None if it can."""
        raise NotImplementedError

    def no_target(self, to: str, family: str) -> str | None:
        """Why ``to`` cannot run targets of this family (a model_type) beside such a head; None if it can."""
        if family in self.targets.get(to, (family,)):
            return None
        return f"it runs no targets of the family {family!r} beside {self.noun}"

    def tidied(self, head: Trained) -> Trained:
        """The head without parts that change nothing."""
        return head

    def write(self, to: str, head: Trained, target: PretrainedConfig, origin: dict[str, Any]) -> Written:
        """The head in the form of ``to``, which can serve it (``why_not``).

        Args:
            origin: what ``made_from`` is to say of the checkpoint and its target.

        Raises:
            ValueError: the weights do not fit the shape.
        """
        raise NotImplementedError

    def check(self, stored: Stored, to: str | None, target: str | None) -> str:
        """Check a folder in such a form; what it is, in words.

        Args:
            to: the program that must be able to serve it; None: any.
            target: a folder or Hub repository of the target that it must be for.

        Raises:
            ValueError: everything that is wrong with it.
        """
        raise NotImplementedError

    def temperatures(self, shape: Any, drafting: Config) -> list[float] | None:
        """The temperatures of a calibrated confidence head, one for each position; None for other heads."""
        return None


def load_pickled(path: Path, source: str) -> Any:
    """Load a file of torch that holds only tensors and plain values; raises ValueError for any other."""
    try:
        return torch.load(readable(path), map_location="cpu", weights_only=True)
    except Exception as error:  # a stranger's file can fail in any way
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        raise ValueError(
            f"{source}: {path.name} holds more than tensors, or is cut off ({reason}); ask its author for safetensors"
        ) from None


def tensor_problems(
    weights: Mapping[str, Tensor], wanted: Mapping[str, list[int]], others: Sequence[str], said: object
) -> list[str]:
    """What is wrong with the names, shapes, values and dtypes of a head's tensors, in words.

    Args:
        wanted: shapes by name. others: names that may be there, too. said: the dtype in config.json, or None.
    """
    problems = []
    if missing := sorted(wanted.keys() - weights.keys()):
        problems.append(f"missing tensors: {', '.join(missing)} (they would be left random)")
    if unknown := sorted(weights.keys() - {*wanted, *others}):
        problems.append(f"unknown tensors: {', '.join(unknown)}")
    for name in sorted(wanted.keys() & weights.keys()):
        if list(weights[name].shape) != wanted[name]:
            problems.append(f"{name} is {list(weights[name].shape)}, and {CONFIG_FILE} says {wanted[name]}")
        elif weights[name].dtype in DTYPES and not torch.isfinite(weights[name]).all():
            problems.append(f"{name} holds NaN or infinite values")
    dtypes = {value.dtype for name, value in weights.items() if name not in (D2T, T2D)}
    names = ", ".join(sorted(map(dtype_name, dtypes)))
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        problems.append(f"the tensors are {names}; all must be one of {', '.join(map(dtype_name, DTYPES))}")
    elif said is not None and dtypes and dtype_name(said) != names:
        problems.append(f"the tensors are {names}, and {CONFIG_FILE} says dtype {said!r}")
    return problems


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the RoPE of a ``config.json``, in words: a missing number, or two readings.

    Raises:
        ValueError: values of other types.
    """
    turning, older = rope(config), older_rope(config)
    found, wanted = [], [key for key in ROPES.get(turning["rope_type"], ()) if key not in _ROPE_DEFAULTS]
    if absent := [key for key in wanted if turning.get(key) is None]:
        found.append(f"RoPE of type {turning['rope_type']} has no {', '.join(absent)}")
    for key in sorted(turning.keys() | older.keys()):
        if turning.get(key) != older.get(key):
            one, other = (f"{x:g}" if isinstance(x, float) else x for x in (turning.get(key), older.get(key)))
            found.append(
                f"{key} is {one} in rope_parameters and {other} for readers older than transformers 5, which look at "
                "the top for rope_theta and rope_scaling"
            )
    return found


def another_target(config: Mapping[str, Any], name: str, fingerprint: str | None = None) -> str | None:
    """Why an export of ours is not for the target ``name``; None if it is, or does not say. ``fingerprint``: of it."""
    made = made_from(config)
    if (known := made.get("target_fingerprint")) is None:
        return None
    fingerprint = fingerprint or load_frozen_ends(name, device="meta").fingerprint
    if same_weights(str(known), fingerprint, f"a head made for {made.get('target')}"):
        return None
    return (
        f"it was trained for {shortened(made.get('target'))} (target_fingerprint {shortened(known)}), and {name} is "
        f"another model (fingerprint {fingerprint}); give the one it was trained for: --target MODEL"
    )


def served_by(folder: Path, what: str, refused: Mapping[str, str | None], form: Sequence[str], to: str | None) -> str:
    """What a checked folder is, and for which programs, in words.

    Args:
        refused: for each program, why it does not serve the head as it was trained. form: those that load this form.

    Raises:
        ValueError: ``to`` does not serve it, or none does.
    """
    if to is not None and refused[to] is not None:
        raise ValueError(f"{folder} is not for {READERS[to]}: {refused[to]}")
    if not (able := [READERS[one] for one, reason in refused.items() if reason is None]):
        reasons = "; ".join(f"not for {READERS[one]}: {refused[one]}" for one in form)
        raise ValueError(f"{folder} is a head that none of its readers can serve: {reasons}")
    return f"{folder} is {what} for {' and '.join(able)}"


def another_form(to: str) -> str:
    """Why ``to`` does not load a folder in another form."""
    return f"another form; export it once more: --to {to}"


def no_target_notes(to: str, reason: str | None) -> list[str]:
    """The note that ``to`` cannot run the target of an export, for this ``reason``; empty without one."""
    return [] if reason is None else [f"{READERS[to]} cannot serve this today: {reason}; the folder has its layout"]


def in_one_dtype(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All in one dtype: a merged LoRA has matrices in float32 and norms in 16 bits, which become float32."""
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {name: value.to(wide) if value.is_floating_point() else value for name, value in weights.items()}


def weights_text(weights: Mapping[str, Tensor]) -> str:
    """Number and dtype of the weights, in words."""
    floats = [value for value in weights.values() if value.is_floating_point()]
    return f"{sum(value.numel() for value in floats):,} weights in {dtype_name(floats[0].dtype)}"
