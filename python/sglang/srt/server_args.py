"""The arguments of the server: one table of fields from which the parser, the checks and the documentation derive.

Importing this module imports no torch, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import random
import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sglang.srt.errors import ArgumentError
from sglang.srt.upstream_flags import REFUSED_VALUES, REPLACED_FLAGS, is_upstream_flag
from sglang.srt.utils.cli import ArgumentParser


@dataclass(frozen=True)
class Flag:
    """What the command line says about one field.

    ``names`` are its spellings, the first one is used in messages; empty means ``--`` and the field's name. Bounds
    are inclusive, except ``above`` (exclusive). ``bare`` is the value of a flag that is given without one.
    """

    help: str
    names: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    above: int | None = None
    bare: str | None = None


@dataclass(frozen=True)
class FieldSpec:
    """A field of :class:`ServerArgs` with everything its annotation says."""

    name: str
    flag: Flag
    type: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any  # None where it is computed

    @property
    def names(self) -> tuple[str, ...]:
        return self.flag.names or ("--" + self.name.replace("_", "-"),)

    def check(self, value: Any) -> None:
        """Raise :class:`ArgumentError` unless ``value`` is of the field's type, a choice of it and in its range."""
        name = self.names[0]
        if value is None and self.optional:
            return
        accepted = (int, float) if self.type is float else (self.type,)
        right_type = isinstance(value, accepted) and (self.type is bool or not isinstance(value, bool))
        if not right_type:
            kind = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}[self.type]
            raise ArgumentError(f"{name} must be {kind}, not {value!r}")
        if self.choices and value not in self.choices:
            refused = REFUSED_VALUES.get(self.name, {}).get(value)
            valid = ", ".join(self.choices)
            if refused:
                raise ArgumentError(f"{name} {value} {refused}; valid: {valid}")
            raise ArgumentError(
                f"{name}: unknown value {value!r}{suggestion(str(value), self.choices)}; valid: {valid}"
            )
        if self.type is str and not value.strip():
            raise ArgumentError(f"{name} must not be empty")
        if self.type in (int, float):
            self._check_range(name, value)

    def _check_range(self, name: str, value: float) -> None:
        low, high, above = self.flag.minimum, self.flag.maximum, self.flag.above
        # Written so that NaN fails every comparison.
        if low is not None and not value >= low:
            raise ArgumentError(f"{name} must be {low} or more, not {value}")
        if above is not None and not value > above:
            raise ArgumentError(f"{name} must be more than {above}, not {value}")
        if high is not None and not value <= high:
            raise ArgumentError(f"{name} must be {high} or less, not {value}")


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What the user asked for. Every field is validated when the object is made.

    Raises:
        ArgumentError: a value is of the wrong type, unknown, out of range or not supported by this version.
    """

    # Model and tokenizer
    model_path: Annotated[
        str,
        Flag("Folder of the model, or its id on the Hugging Face hub.", names=("--model-path", "--model")),
    ]
    tokenizer_path: Annotated[
        str, Flag("Folder or hub id of the tokenizer. Default: the one that comes with the model.")
    ] = ""
    trust_remote_code: Annotated[bool, Flag("Run Python code that comes with the model's configuration.")] = False
    revision: Annotated[
        str | None, Flag("Branch, tag or commit of a hub model. Default: the repository's main branch.")
    ] = None
    context_length: Annotated[
        int | None, Flag("Longest prompt plus output, in tokens. Default: the model's own limit.", minimum=1)
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Flag("How weights are read. auto and safetensors read *.safetensors; dummy makes random weights."),
    ] = "auto"

    # HTTP server
    host: Annotated[str, Flag("Address to listen on; 0.0.0.0 means every interface.")] = "127.0.0.1"
    port: Annotated[int, Flag("Port to listen on.", minimum=1, maximum=65535)] = 30000
    served_model_name: Annotated[
        str, Flag("Model name in /v1/models and in responses. Default: the value of --model-path.")
    ] = ""
    skip_server_warmup: Annotated[bool, Flag("Answer requests without a warm-up request before.")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], Flag("Least level that is logged.")
    ] = "info"

    # Arithmetic
    device: Annotated[
        Literal["cpu", "cuda"] | None, Flag("Where the model runs. Default: cuda if there is a usable GPU, else cpu.")
    ] = None
    dtype: Annotated[
        Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
        Flag(
            "Type of activations and unquantised weights. auto: the checkpoint's, float16 for a float32 checkpoint; on "
            "a CPU float32 for a quantised one."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["modelopt", "modelopt_fp4", "compressed-tensors", "nvfp4", "w4a16_nvfp4"] | None,
        Flag(
            "Default: what the checkpoint says. modelopt, modelopt_fp4 and compressed-tensors expect a checkpoint of "
            "that kind; nvfp4 and w4a16_nvfp4 quantise the weights of a bf16 or fp16 checkpoint while they are loaded."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "bf16", "bfloat16"],
        Flag("Type of cached keys and values. auto: what the checkpoint asks for, else the model's dtype."),
    ] = "auto"
    fp4_gemm_runner_backend: Annotated[
        str,
        Flag(
            "Kernel of NVFP4 linear layers: cudnn, cutlass, cutedsl, trtllm, b12x, w4a16, cpu, torch, or auto, which "
            "takes the best one that runs here. `python -m sglang.check_env` gives for each the reason why it can't "
            "run.",
            names=("--fp4-gemm-backend",),
        ),
    ] = "auto"
    fp4_gemm_autotune: Annotated[
        Literal["on", "cached", "off"],
        Flag(
            "Choose the kernel of NVFP4 linear layers by measurement, per layer shape and number of rows. on (also "
            "without a value): measure what is not measured yet, which makes the start longer, and keep it on disk; "
            "cached: use what an earlier start has measured on the same machine with the same versions; off: neither. "
            "With a named --fp4-gemm-backend only its own variants compete.",
            bare="on",
        ),
    ] = "cached"
    attention_backend: Annotated[Literal["torch_native"], Flag("Kernel of the attention.")] = "torch_native"
    # Drawn when the object is made, so that every process gets the same one.
    random_seed: Annotated[
        int, Flag("Seed of sampling and of dummy weights. Default: a random one.", minimum=0, maximum=2**32 - 1)
    ] = field(default_factory=lambda: random.SystemRandom().randrange(1 << 30))

    # Memory and scheduling
    mem_fraction_static: Annotated[
        float | None,
        Flag(
            "Part of the device's memory for weights and the KV cache together. Default: depends on the device.",
            above=0,
            maximum=1,
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None, Flag("Tokens that the KV cache holds. Default: what fits into --mem-fraction-static.", minimum=1)
    ] = None
    max_running_requests: Annotated[
        int | None, Flag("Requests that run at the same time. Default: depends on the KV cache's size.", minimum=1)
    ] = None
    chunked_prefill_size: Annotated[
        int, Flag("Prompt tokens computed in one step, a longer prompt takes several. -1: no limit.", minimum=-1)
    ] = 2048
    page_size: Annotated[int, Flag("Tokens in a page of the KV cache.", minimum=1)] = 1
    cuda_graph_backend_prefill: Annotated[
        Literal["disabled"], Flag("CUDA graphs of prefill steps: this version has none.")
    ] = "disabled"
    disable_radix_cache: Annotated[bool, Flag("Don't keep the KV cache of finished requests for reuse.")] = False
    tp_size: Annotated[
        int,
        Flag(
            "GPUs that share the model (tensor parallelism); on a CPU, processes that share its cores.",
            names=("--tp-size", "--tp", "--tensor-parallel-size"),
            minimum=1,
        ),
    ] = 1

    def __post_init__(self) -> None:
        for name in ("tokenizer_path", "served_model_name"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.model_path)
        for spec in field_specs():
            spec.check(getattr(self, spec.name))
        self._check_combinations()

    def _check_combinations(self) -> None:
        chunk = self.chunked_prefill_size
        if chunk != -1 and (chunk < self.page_size or chunk % self.page_size):
            raise ArgumentError(
                f"--chunked-prefill-size {chunk} must be -1 (no limit) or a multiple of --page-size {self.page_size}"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ArgumentError(
                f"--max-total-tokens {self.max_total_tokens} is less than one page (--page-size {self.page_size})"
            )
        if self.device == "cuda" or self.tp_size > 1:
            from sglang.srt.platforms import gpu_count, resolve_device

            if resolve_device(self.device).type == "cuda" and self.tp_size > gpu_count():
                raise ArgumentError(
                    f"--tp-size {self.tp_size}: this machine has {gpu_count()} GPU(s); use at most that many, or "
                    "--device cpu"
                )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Arguments as keywords (``Engine(model_path=..., ...)``), by the fields' names; None asks for the default.

        Raises:
            ArgumentError: as the constructor, and for an unknown or a missing keyword.
        """
        known = {spec.name: spec for spec in field_specs()}
        for name in kwargs:
            if name not in known:
                raise ArgumentError(_unknown("--" + name.replace("_", "-"), name, known))
        given = {name: value for name, value in kwargs.items() if value is not None}
        for spec in known.values():
            if spec.required and spec.name not in given:
                raise ArgumentError(f"{spec.name} is required")
        return cls(**given)

    def url(self) -> str:
        """The address under which this machine reaches the server, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@lru_cache(maxsize=1)
def field_specs() -> tuple[FieldSpec, ...]:
    """The fields of :class:`ServerArgs` in the order of their declaration."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    specs = []
    for item in fields(ServerArgs):
        inner, flag = get_args(hints[item.name])
        members = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
        kinds = [member for member in members if member is not type(None)]
        choices = tuple(get_args(kinds[0])) if get_origin(kinds[0]) is Literal else ()
        kind = str if choices else kinds[0]
        missing = item.default is MISSING
        specs.append(
            FieldSpec(
                name=item.name,
                flag=flag,
                type=kind,
                choices=choices,
                optional=len(kinds) < len(members),
                required=missing and item.default_factory is MISSING,
                default=None if missing else item.default,
            )
        )
    return tuple(specs)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest of ``known``; empty where none is near."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _unknown(flag: str, written: str, known: Iterable[str]) -> str:
    if flag in REPLACED_FLAGS:
        return f"{written} is not an argument of this server; use {REPLACED_FLAGS[flag]}"
    if is_upstream_flag(flag):
        return f"{written} is known from SGLang but not supported by this version"
    return f"unknown argument {written}{suggestion(written, known)}"


def make_parser() -> ArgumentParser:
    """The command line of ``python -m sglang.launch_server``; its ``error`` raises :class:`ArgumentError`."""
    parser = ArgumentParser("python -m sglang.launch_server", "Serve a model over HTTP.")
    for spec in field_specs():
        # argparse.SUPPRESS: an absent flag leaves the dataclass's own default in force.
        options: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": describe(spec)}
        if spec.type is bool:
            options["action"] = "store_true"
        else:
            options["type"] = spec.type
            options["required"] = spec.required
            options["metavar"] = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.type.__name__.upper()
            if spec.flag.bare is not None:
                options |= {"nargs": "?", "const": spec.flag.bare}
        parser.add_argument(*spec.names, **options)
    return parser


def describe(spec: FieldSpec) -> str:
    """Help text of a field, with its default where the text doesn't say it already."""
    text = spec.flag.help.replace("%", "%%")
    if spec.required or spec.type is bool or spec.default in (None, ""):
        return text
    return f"{text} Default: {spec.default}."


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """Parse a command line without the program's name.

    Raises:
        ArgumentError: an unknown or unsupported flag, or a value that the constructor refuses.
        SystemExit: ``--help``, after printing it.
    """
    parser = make_parser()
    known = ["--help", *(name for spec in field_specs() for name in spec.names)]
    for word in argv:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            raise ArgumentError(_unknown(flag.replace("_", "-"), flag, known))
    return ServerArgs(**vars(parser.parse_args(argv)))
