"""The arguments of the server: one table of fields from which the parser, the checks and the documentation derive.

Importing this module imports no torch, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

from sglang.srt.errors import ArgumentError
from sglang.srt.flag_combinations import check_combinations
from sglang.srt.flag_spec import HIDDEN, FieldSpec, Flag, specs_of, suggestion
from sglang.srt.upstream_flags import REPLACED_FLAGS, is_upstream_flag
from sglang.srt.utils.cli import ArgumentParser


@dataclass(frozen=True, kw_only=True, repr=False)
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
    api_key: Annotated[
        str | None,
        Flag(
            "Key that requests must bring (`Authorization: Bearer KEY`). Free without one are /health, "
            "/health_generate, /ready and /metrics.",
            secret=True,
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        Flag(
            "Key that administrative requests must bring instead of --api-key: /flush_cache, /abort_request, "
            "/update_weights_from_disk.",
            secret=True,
        ),
    ] = None
    fastapi_root_path: Annotated[
        str | None, Flag("Path, such as /llm, under which a reverse proxy shows the server and which it takes off.")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Flag("PEM file of the private key: with --ssl-certfile the server speaks TLS.")
    ] = None
    ssl_certfile: Annotated[str | None, Flag("PEM file of the certificate, with its chain.")] = None
    ssl_ca_certs: Annotated[
        str | None, Flag("PEM file of authorities: clients must show a certificate that one of them has signed.")
    ] = None
    ssl_keyfile_password: Annotated[str | None, Flag("Password of --ssl-keyfile.", secret=True)] = None
    enable_metrics: Annotated[bool, Flag("Serve Prometheus metrics at /metrics.")] = False

    # OpenAI endpoints
    chat_template: Annotated[
        str | None,
        Flag("Chat template: a file (.jinja, or .json with chat_template) or the text itself. Default: the model's."),
    ] = None
    tool_call_parser: Annotated[
        Literal["hermes", "llama3", "mistral", "qwen", "qwen25"] | None,
        Flag(
            "Format in which the model calls tools. Default: the one that the chat template teaches, if that is one of "
            "these."
        ),
    ] = None
    reasoning_parser: Annotated[
        Literal["deepseek-r1", "mistral", "qwen3", "qwen3-thinking"] | None,
        Flag(
            "Format of the model's thoughts, which then come as reasoning_content. Default: they stay in the content."
        ),
    ] = None
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Flag(
            "Sampling parameters that a request leaves out. model: what generation_config.json recommends; openai: "
            "temperature 1, top_p 1 and so on."
        ),
    ] = "model"

    # Logging
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], Flag("Least level that is logged.")
    ] = "info"
    log_level_http: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None,
        Flag("The same for the log of HTTP accesses, whose lines have level info. Default: --log-level."),
    ] = None
    log_requests: Annotated[bool, Flag("Log every request when it comes and when it has finished.")] = False
    log_requests_level: Annotated[
        int,
        Flag(
            "What --log-requests tells. 0: neither prompts, outputs nor sampling parameters; 1: sampling parameters "
            "too; 2: prompts and outputs too, their first 2048 characters; 3: all of them.",
            minimum=0,
            maximum=3,
        ),
    ] = 2

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
    attention_backend: Annotated[
        Literal["auto", "cpu", "flashinfer", "torch_native"],
        Flag("Kernel of the attention; auto takes the best one that runs here."),
    ] = "auto"
    grammar_backend: Annotated[
        Literal["xgrammar", "none"],
        Flag("What follows json_schema, regex, ebnf and structural_tag; with none such requests are refused."),
    ] = "xgrammar"
    constrained_json_disable_any_whitespace: Annotated[
        bool, Flag("JSON of a json_schema has one space behind commas and colons, and no other white space.")
    ] = False
    constrained_json_max_whitespace_cnt: Annotated[
        int | None,
        Flag("Most white space at one place in JSON of a json_schema. Default: no limit.", minimum=1),
    ] = None
    # Drawn when the object is made, so that every process gets the same one.
    random_seed: Annotated[
        int, Flag("Seed of sampling and of dummy weights. Default: a random one.", minimum=0, maximum=2**32 - 1)
    ] = field(default_factory=lambda: random.SystemRandom().randrange(1 << 30))

    # Memory and scheduling
    mem_fraction_static: Annotated[
        float | None,
        Flag(
            "Part of the device's memory for weights and KV cache. Default: on a GPU all but what steps need.",
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
    max_queued_requests: Annotated[
        int | None,
        Flag("Requests that wait to run; a further one is answered with HTTP 503. Default: no limit.", minimum=1),
    ] = None
    chunked_prefill_size: Annotated[
        int, Flag("Prompt tokens computed in one step, a longer prompt takes several. -1: no limit.", minimum=-1)
    ] = 2048
    page_size: Annotated[int, Flag("Tokens in a page of the KV cache.", minimum=1)] = 1
    disable_cuda_graph: Annotated[bool, Flag("Don't record steps and replay them, on a GPU or a CPU.")] = False
    cuda_graph_max_bs: Annotated[
        int | None,
        Flag(
            "Requests of the largest decode step that is recorded, a CUDA graph on a GPU. Default: "
            "--max-running-requests, at most 256.",
            minimum=1,
        ),
    ] = None
    cuda_graph_bs: Annotated[
        tuple[int, ...] | None,
        Flag(
            "Requests of the decode steps that are recorded; on a GPU others are padded to the next of them. Default: "
            "1, 2, 4, 8, 12, 16, 24 and so on in steps of 8 up to --cuda-graph-max-bs.",
            minimum=1,
        ),
    ] = None
    cuda_graph_backend_prefill: Annotated[
        Literal["breakable", "disabled"] | None,
        Flag(
            "CUDA graphs of prompts, which are broken at the attention. Default: breakable on a GPU, disabled on a CPU."
        ),
    ] = None
    cuda_graph_max_bs_prefill: Annotated[
        int | None,
        Flag(
            "Tokens of the largest step with prompts that is recorded. Default: --chunked-prefill-size, at most 1024.",
            minimum=1,
        ),
    ] = None
    cuda_graph_bs_prefill: Annotated[
        tuple[int, ...] | None,
        Flag(
            "Tokens of the steps with prompts that are recorded; others are padded to the next of them. Default: 16, "
            "32, 48, 64, 96 and so on in growing steps up to --cuda-graph-max-bs-prefill.",
            minimum=1,
        ),
    ] = None
    disable_overlap_schedule: Annotated[
        bool, Flag("On a GPU, launch a step only when the tokens of the one before are known, as a CPU does anyway.")
    ] = False
    disable_radix_cache: Annotated[bool, Flag("Don't keep the KV cache of finished requests for reuse.")] = False
    tp_size: Annotated[
        int,
        Flag(
            "GPUs that share the model (tensor parallelism); on a CPU, processes that share its cores.",
            names=("--tp-size", "--tp", "--tensor-parallel-size"),
            minimum=1,
        ),
    ] = 1
    nnodes: Annotated[
        int,
        Flag(
            "Machines that share the model: each runs the same command with its own --node-rank and holds --tp-size "
            "divided by --nnodes ranks.",
            minimum=1,
        ),
    ] = 1
    node_rank: Annotated[
        int, Flag("Number of this machine; the one with number 0 serves HTTP, the others only /health.", minimum=0)
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        Flag(
            "host:port of machine 0, at which the machines meet. Their ranks talk over the network interface that "
            "leads there.",
            names=("--dist-init-addr", "--nccl-init-addr"),
        ),
    ] = None
    dist_timeout: Annotated[int, Flag("Seconds that machines wait for each other at the start.", minimum=1)] = 600

    def __post_init__(self) -> None:
        for name in ("tokenizer_path", "served_model_name"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.model_path)
        for spec in field_specs():
            if spec.several and isinstance(given := getattr(self, spec.name), list):
                object.__setattr__(self, spec.name, tuple(given))
            spec.check(getattr(self, spec.name))
        check_combinations(self)

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

    @property
    def ranks_per_node(self) -> int:
        """Tensor-parallel ranks on this machine, and on each other one."""
        return self.tp_size // self.nnodes

    def shown(self) -> dict[str, Any]:
        """Every argument by its field's name, secrets hidden."""
        values = {spec.name: getattr(self, spec.name) for spec in field_specs()}
        secret = {spec.name for spec in field_specs() if spec.flag.secret}
        return {name: HIDDEN if name in secret and value is not None else value for name, value in values.items()}

    def __repr__(self) -> str:
        return f"ServerArgs({', '.join(f'{name}={value!r}' for name, value in self.shown().items())})"

    def url(self) -> str:
        """The address under which this machine reaches the server, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"


@lru_cache(maxsize=1)
def field_specs() -> tuple[FieldSpec, ...]:
    """The fields of :class:`ServerArgs` in the order of their declaration."""
    return specs_of(ServerArgs)


def _unknown(flag: str, written: str, known: Iterable[str]) -> str:
    if flag in REPLACED_FLAGS:
        return f"{written} is not an argument of this server; use {REPLACED_FLAGS[flag]}"
    ours = {name for spec in field_specs() for name in spec.names}
    if is_upstream_flag(flag) and flag not in ours:
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
            if spec.several:
                options["nargs"] = "+"
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
