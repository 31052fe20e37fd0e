"""Schemas of the YAML files of this package's programs. Importing this module must not import torch."""

import difflib
import re
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from data_prep.common.disk import check_own
from data_prep.dialogues.reader import check_source
from drafters.common.files import check_file, check_folder
from drafters.common.paths import check_model
from drafters.config import Amount, Config, Dtype, Layers, Length, Seed, Size, Vocabulary
from drafters.methods import check_method, head_shape, learned_methods

READ_BY_TRAINING = ("train", "heldout")  # names of splits
CONVERSATIONS = 2000  # of a log, the newest ones, for data_prep.traffic and train.adapt
StoreDtype = Literal["bfloat16", "float16", "float32", "int8", "float8"]
NOT_FOR_OPTIONS = {  # keywords of vllm.LLM that vllm.options may not set, and what to do instead
    "model": "give target", "revision": "give revision", "dtype": "give dtype", "max_model_len": "give max_length",
    "max_num_batched_tokens": "give batch_tokens", "quantization": "features must be the target's own",
    "enable_lora": "features must be the target's own: merge the adapter into it first",
    "speculative_config": "the extraction sets it", "kv_transfer_config": "the extraction sets it",
    "kv_cache_dtype": "features must be the target's own", "seed": "nothing is sampled",
}  # fmt: skip


class TargetKeys(Config):
    """How the target and its tokenizer are loaded."""

    revision: str | None = None  # of the target on the Hub
    dtype: Dtype = "auto"  # in which the target runs; auto: bf16 if the device has instructions for it
    device: str | None = None  # default: cuda if available (under a launcher the process's own GPU), else cpu
    device_map: str | dict[str, int | str] | None = None  # instead of device: layers over several GPUs, e.g. auto
    chat_template: str | None = None  # file with a Jinja template, used instead of the tokenizer's own


class FeatureKeys(TargetKeys):
    """The target, the dialogues and the hidden states of a feature store or of ``features: online``."""

    target: str = Field(min_length=1)  # folder or Hub repository
    splits: dict[str, str] = Field(min_length=1)  # {train: ShareGPT file or Hub dataset, heldout: ...}
    # The hidden states to store beside the features: the union of what these methods read by default
    # (``usual_taps`` of its head's shape) and of `exit_layers`, the states after this many decoder layers.
    methods: list[str] = Field([], alias="for")
    exit_layers: list[Layers] = []
    max_length: Length = Field(2048, ge=2)  # tokens of a dialogue; the rest is cut off
    limit: Amount | None = Field(None, ge=1)  # dialogues of each split, the first ones; default: all

    @field_validator("splits")
    @classmethod
    def _names_are_folders(cls, splits: dict[str, str]) -> dict[str, str]:
        if bad := [name for name in splits if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)]:
            raise ValueError(f"a split's name becomes a folder: letters, digits, '_', '.' and '-', found {bad}")
        for name in splits:
            near = difflib.get_close_matches(name.lower(), READ_BY_TRAINING, n=1, cutoff=0.75)
            if near and name != near[0] and not name.startswith(near[0]):
                raise ValueError(
                    f"training reads splits named {' and '.join(READ_BY_TRAINING)}, found {name}; rename it"
                )
        return splits

    @field_validator("methods")
    @classmethod
    def _known_methods(cls, methods: list[str]) -> list[str]:
        known = [*learned_methods(), "draft_model"]  # which reads features only
        if unknown := [name for name in methods if name not in known]:
            raise ValueError(f"unknown method {unknown[0]}; known: {', '.join(known)}")
        return methods

    @field_validator("exit_layers")
    @classmethod
    def _layers_once(cls, layers: list[int]) -> list[int]:
        if len(set(layers)) != len(layers):
            raise ValueError("each layer at most once")
        return sorted(layers)

    @model_validator(mode="after")
    def _names_the_exit(self) -> Self:
        if not self.exit_layers and (open_ := [name for name in self.methods if head_shape(name).names_layer]):
            raise ValueError(f"for: {open_[0]} has no default layer; name its exit layer, for example exit_layers=[2]")
        return self


class VLLMKeys(Config):
    """Settings of ``engine: vllm``."""

    python: Path = Path(".venv-vllm/bin/python")  # of vLLM's environment; default: the one of make engines
    options: dict[str, Any] = {}  # keywords of vllm.LLM: tensor_parallel_size, pipeline_parallel_size, ...

    @field_validator("options")
    @classmethod
    def _not_set_here(cls, options: dict[str, Any]) -> dict[str, Any]:
        if wrong := sorted(NOT_FOR_OPTIONS.keys() & options):
            reasons = "; ".join(f"{key}: {NOT_FOR_OPTIONS[key]}" for key in wrong)
            raise ValueError(f"these are not for options ({reasons})")
        return options


class FeaturesConfig(FeatureKeys):
    """Schema of ``configs/features/*.yaml``."""

    out: str = Field(min_length=1)  # the store of each split is <out>/<split>
    # own: this process runs the target. vllm: vLLM's own process, for targets that one process or machine cannot hold.
    engine: Literal["own", "vllm"] = "own"
    vllm: VLLMKeys = VLLMKeys()
    store_dtype: StoreDtype | None = None  # of features and taps on disk; int8 and float8: with a scale per token
    batch_tokens: Amount = Field(8192, ge=1)  # tokens of one forward, padding included
    shard_tokens: Amount = Field(65_536, ge=1)  # tokens of a shard: lost by a kill at most, and held in memory
    # own: the answers of the split `heldout` are replaced by the target's own greedy answers, so that held-out figures
    # are those of decoding. A file that data_prep.regenerate wrote with this target is used as it is.
    heldout_answers: Literal["own", "given"] = "own"
    heldout_dialogues: Amount = Field(100, ge=1)  # the target answers this many, the first ones
    heldout_new_tokens: Length = Field(256, ge=1)  # of one such answer; at most half the target's context

    @model_validator(mode="after")
    def _vllm_has_its_own_devices(self) -> Self:
        for key in ("device", "device_map"):
            if self.engine == "vllm" and getattr(self, key) is not None:
                raise ValueError(
                    f"{key} is {getattr(self, key)!r}, but vLLM uses all visible GPUs: leave {key} out, and set "
                    "vllm.options.tensor_parallel_size or pipeline_parallel_size"
                )
        return self

    def check(self) -> None:
        """Raise ValueError if a file or folder that the config names is missing or cannot be written."""
        for source in self.splits.values():
            check_source(source)
        check_folder(Path(self.out))
        check_model(self.target, "target", self.revision)
        if self.engine == "vllm" and not self.vllm.python.exists():
            raise ValueError(
                f"vllm.python: vLLM is not installed, no file {self.vllm.python}; run make .venv-vllm/.installed, or "
                "set vllm.python to the Python of an environment with vLLM"
            )
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template: no file {self.chat_template}")


class Writing(Config):
    """How answers are written, by a target here or by an endpoint (which ignores ``max_context``)."""

    max_new_tokens: Length = Field(1024, ge=1)  # of one answer
    max_context: Length | None = Field(None, ge=2)  # tokens of prompt and answer; default: the target's context
    truncated: Literal["keep", "drop"] = "keep"  # answers cut at max_new_tokens; drop: the dialogue ends before them
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)  # 0: greedy
    top_k: Vocabulary = Field(0, ge=0)  # 0: off
    top_p: float = Field(1.0, gt=0, le=1)  # 1: off
    seed: Seed = 0


class EndpointConfig(Config):
    """An OpenAI-compatible server."""

    url: str  # up to and including /v1
    model: str  # the server's name of it
    concurrency: Size = Field(16, ge=1)  # requests at the same time
    api_key_env: str | None = "OPENAI_API_KEY"  # environment variable with the key; if it is empty, no key is sent
    timeout: float = Field(600.0, gt=0)  # seconds without a byte from the server
    retries: Size = Field(5, ge=0)  # further attempts after the first
    # More keys of the request: {chat_template_kwargs: {enable_thinking: false}}; null removes a key.
    extra: dict[str, Any] = {}

    @property
    def base(self) -> str:
        """The address without a final ``/chat/completions``."""
        return self.url.rstrip("/").removesuffix("/chat/completions")

    def check(self) -> None:
        """Raise ValueError if the address is invalid or holds a secret (a validator's message would print it)."""
        check_address(self.url, "endpoint.url", "endpoint.api_key_env")


def check_address(url: str, key: str, key_of_secret: str) -> None:
    """Raise ValueError if a server's address is invalid or holds a secret; ``key`` names it in the message."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"{key}: give the address without user, password or query, because messages and files repeat it; "
            f"the key is read from the environment variable that {key_of_secret} names"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key} is {url!r}; give an address like http://localhost:8000/v1")


class DrafterOptions(Config):
    """A drafter as in configs/speed: the name of its method, and the method's options."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str


FOR_A_TARGET = {*TargetKeys.model_fields, "drafter", "batch", "max_context"}  # keys that an endpoint does not take


class RegenerateConfig(Writing, TargetKeys):
    """Schema of ``configs/regenerate/*.yaml``. Give ``target`` (with ``TargetKeys``) or ``endpoint``."""

    source: str  # ShareGPT file or Hub dataset
    out: str  # JSONL file in ShareGPT form
    target: str | None = None  # folder or Hub repository
    endpoint: EndpointConfig | None = None
    limit: Amount | None = Field(None, ge=1)  # dialogues, the first ones; default: all
    minutes: float | None = Field(None, gt=0)  # then unanswered dialogues are left out; default: no limit
    # Only for a target:
    drafter: DrafterOptions | None = None  # for example {drafter: eagle, checkpoint: ..., tree: chain}; default: none
    batch: Size = Field(8, ge=1)  # dialogues at once, at most as many as the drafter decodes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.target is None) == (self.endpoint is None):
            raise ValueError("give either target (a model to run here) or endpoint (a server), and not both")
        if self.endpoint and (useless := sorted(FOR_A_TARGET & self.model_fields_set)):
            raise ValueError(f"{', '.join(useless)}: only for a target that runs here, not for an endpoint")
        if self.max_context is not None and self.max_new_tokens >= self.max_context:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and max_context {self.max_context}, which leaves no room for "
                "a prompt; lower max_new_tokens"
            )
        return self

    def check(self) -> None:
        """Raise ValueError if a file is missing or may not be overwritten, or the drafter's method is unknown."""
        check_source(self.source)
        out = Path(self.out)
        check_file(out)
        if out.exists() and out.samefile(self.source):
            raise ValueError(f"out: {out} is the source; give another file")
        check_own(self.out)
        if self.drafter is not None:
            check_method(self.drafter.drafter)
            path = (self.drafter.model_extra or {}).get("checkpoint")
            check_model(path if isinstance(path, str) else None, "drafter.checkpoint")
        if self.endpoint is not None:
            self.endpoint.check()
        check_model(self.target, "target", self.revision)


class MagpieConfig(TargetKeys):
    """Schema of ``configs/*/magpie.yaml``."""

    target: str  # folder or Hub repository of a chat model
    out: str  # JSONL file in ShareGPT form
    count: Amount = Field(ge=1)  # questions; slightly fewer if two processes asked the same one
    minutes: float | None = Field(None, gt=0)  # then the run ends with the questions so far; default: no limit
    system: str | None = None  # a system message; default: the template's own, if it has one
    max_new_tokens: Length = Field(256, ge=2)  # of one question
    temperature: float = Field(0.9, gt=0, allow_inf_nan=False)
    top_k: Vocabulary = Field(100, ge=0)  # 0: off
    top_p: float = Field(1.0, gt=0, le=1)  # 1: off
    batch: Size = Field(64, ge=1)  # questions at once
    seed: Seed = 0

    def check(self, ranks: int = 1) -> None:
        """Raise ValueError if the target is missing, a file may not be overwritten, or ``count`` is below ``ranks``."""
        check_model(self.target, "target", self.revision)
        if self.count < ranks:
            raise ValueError(f"count is {self.count} for {ranks} processes; give at least one question for each")
        check_file(Path(self.out))
        check_own(self.out)
