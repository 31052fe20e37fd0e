"""Run configurations: one complete YAML file per run, checked by a pydantic schema.

An unknown key is an error that suggests the nearest known key. ``key=value`` overrides use dots for nested keys.
"""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from drafters.common.wording import first_line, read_text, shortened

ConfigT = TypeVar("ConfigT", bound="Config")

# Bounded whole numbers for schemas. The bounds are above every real use, so that a mistyped value is refused before it
# fills the memory or runs for ever. A field adds its own bounds.
DraftSize = Annotated[int, Field(le=1_024)]  # tokens, nodes, beams or candidates of one draft
Layers = Annotated[int, Field(le=4_096)]  # layers of a model, or the number of one
Size = Annotated[int, Field(le=65_536)]  # sequences or requests side by side; repetitions
Threads = Annotated[int, Field(ge=1, le=1_024)]  # of one process; ten thousands end in a crash of OpenMP
Width = Annotated[int, Field(le=1_048_576)]  # dimensions of a model
Vocabulary = Annotated[int, Field(le=4_194_304)]  # tokens of a vocabulary
Length = Annotated[int, Field(le=16_777_216)]  # tokens of one text
Amount = Annotated[int, Field(le=100_000_000)]  # tokens, texts or steps of a run
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]  # libraries and servers take these; 64 bits overflow in derived seeds


def _engine(name: object) -> object:
    if name == "eager":
        raise ValueError("this engine is now called stock; set engine: stock")
    return name


Engine = Annotated[Literal["compiled", "graphs", "fused", "stock"], BeforeValidator(_engine)]
Quantization = Literal["int8", "int4"]
StoredDtype = Literal["bfloat16", "float16", "float32"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]  # auto: what the device multiplies fast (precision.py)
# What an EAGLE head reads at index i: feature_i and token_{i+1}; feature_i and token_i; token_{i+1}; feature_i.
HeadInputs = Literal["feature+shifted_token", "feature+unshifted_token", "token", "feature"]
SHIFTED: Final = "feature+shifted_token"
UNSHIFTED: Final = "feature+unshifted_token"
# The kind of an EAGLE head's decoder layer: the target's own, or Llama's with the target's width, heads and RoPE.
HeadLayer = Literal["target", "llama"]
DraftLayer = Literal["llama", "qwen3"]  # the kind of the decoder layers of other heads, of the target's width


class Config(BaseModel):
    """Base of every schema: unknown keys, infinity and NaN fail, values are checked on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)


class LayerShape(Config):
    """Values of a head's decoder layers, by the names of transformers' configurations; null: the target's."""

    intermediate_size: Width | None = Field(default=None, ge=1)
    num_attention_heads: Width | None = Field(default=None, ge=1)
    num_key_value_heads: Width | None = Field(default=None, ge=1)
    head_dim: Width | None = Field(default=None, ge=1)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = None


def load_config(schema: type[ConfigT], path: str | Path, overrides: list[str] | None = None) -> ConfigT:
    """Read ``path`` (YAML), apply ``key.sub=value`` overrides, and validate.

    Raises:
        ValueError: the file is missing or not a YAML mapping, a key occurs twice, or a key or value is wrong; the
            message names the file, the key, the value found and, for an unknown key, the nearest known one.
    """
    file = Path(path)
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else ""
        raise ValueError(f"no config file at {file}{hint}")
    text = read_text(file)
    try:
        data = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a mapping of keys to values, found {type(data).__name__}")
    _apply_overrides(schema, data, overrides or [])
    return validate(schema, data, source=str(file))


def from_overrides(schema: type[ConfigT], overrides: list[str]) -> ConfigT:
    """A configuration from ``key=value`` arguments and the schema's defaults.

    Raises:
        ValueError: a key or value is wrong.
    """
    data: dict[str, Any] = {}
    _apply_overrides(schema, data, overrides)
    return validate(schema, data, source="the command line")


def validate(schema: type[ConfigT], data: dict[str, Any], source: str, most: int | None = None) -> ConfigT:
    """Build ``schema`` from ``data``; one ValueError names ``source`` and all problems, or the first ``most``."""
    try:
        return schema(**data)
    except ValidationError as error:
        lines = [_describe(schema, item) for item in error.errors()]
        if most is not None and len(lines) > most:
            lines[most:] = [f"and {len(lines) - most} more"]
        raise ValueError(f"{source}: " + "; ".join(lines)) from None


def head_keys(schema: type[BaseModel]) -> set[str]:
    """Return the keys of the schema under ``head:``, which may also stand beside it."""
    head: Any = getattr(schema.model_fields.get("head"), "annotation", None)
    return set(getattr(head, "model_fields", ())) - set(schema.model_fields)


def _apply_overrides(schema: type[BaseModel], data: dict[str, Any], overrides: list[str]) -> None:
    """Set every ``key=value``; raises ValueError if one would undo another, by the same key or a group around it."""
    of_head = head_keys(schema) - data.keys()
    earlier: dict[str, str] = {}
    for override in overrides:
        (key, equals, text), group, shown = override.partition("="), data, shortened(override)
        if not equals or not key:
            raise ValueError(f"override {shown} is not of the form key=value (say learning_rate=1e-4)")
        if key.partition(".")[0] in of_head:
            key = f"head.{key}"
        *parents, leaf = key.split(".")
        for parent in parents:
            group = group.setdefault(parent, {})
            if not isinstance(group, dict):
                raise ValueError(f"override {shown}: {parent!r} holds a value, not a group of keys")
        try:
            group[leaf] = _parse_scalar(text)
        except yaml.YAMLError as error:
            reason = first_line(error)
            raise ValueError(f"override {shown}: the value is no valid YAML or JSON ({reason}); quote it") from None
        if undone := [before for other, before in earlier.items() if f"{other}.".startswith(f"{key}.")]:
            raise ValueError(f"overrides {undone[0]} and {override}: the second would undo the first; give one")
        earlier[key] = override


def _parse_scalar(text: str) -> Any:
    try:
        return json.loads(text)  # YAML 1.1 would read 1e-4 as a string
    except json.JSONDecodeError:
        return _Loader(text).get_single_data()


class _Loader(yaml.SafeLoader):
    """``yaml.SafeLoader`` silently takes the last of several equal keys; here they are an error."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (before := first.setdefault((key.tag, key.value), key)) is not key:
                lines = f"{before.start_mark.line + 1} and {key.start_mark.line + 1}"
                raise yaml.YAMLError(f"the key {key.value!r} occurs twice, on lines {lines}; keep one of them")
        return node


def _describe(schema: type[BaseModel], item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location) or "(whole file)"
    if item["type"] == "extra_forbidden":
        known = _fields_at(schema, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {key!r}; {hint}"
    if item["type"] == "missing":
        return f"missing key {key!r}"
    reason = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type":
        reason = "Input should be an object of keys and values"
    if isinstance(item["input"], dict | BaseModel) and item["type"] == "value_error":  # of several keys together
        return f"{key}: {reason}" if location else reason
    return f"{key}: {reason} (found {shortened(item['input'])})"


def _fields_at(schema: Any, location: list[str]) -> list[str]:
    """The field names of the nested schema at ``location``."""
    for part in location:
        fields = getattr(schema, "model_fields", {})
        if part not in fields:
            continue  # a list index, a dict key or a union tag
        annotation = fields[part].annotation
        nested = [annotation, *getattr(annotation, "__args__", ())]
        schema = next((a for a in nested if hasattr(a, "model_fields")), schema)
    fields = getattr(schema, "model_fields", {})
    names = [field.alias or name for name, field in fields.items()]
    return [*names, *(sorted(head_keys(schema)) if fields else ())]
