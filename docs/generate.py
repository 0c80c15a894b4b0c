"""Write the documentation that follows from the code: ``python docs/generate.py [--check]``.

``--check`` writes nothing and fails if a file differs from what it would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.auth import Access
from sglang.srt.entrypoints.http_app import ROUTES
from sglang.srt.entrypoints.openapi import BODIES, SAMPLING
from sglang.srt.entrypoints.unsupported_routes import UNSUPPORTED_ROUTES
from sglang.srt.environ import envs
from sglang.srt.flag_spec import FieldSpec
from sglang.srt.layers.quantization.fp4_backends.flashinfer import AUTO_TABLE
from sglang.srt.layers.quantization.fp4_utils import (
    Target,
    backends,
    resolve_fp4_gemm_backend,
    unsupported_reasons,
)
from sglang.srt.server_args import field_specs
from sglang.srt.upstream_flags import (
    REFUSED_VALUES,
    REPLACED_FLAGS,
    UPSTREAM_FAMILIES,
    UPSTREAM_FIELDS,
    UPSTREAM_FLAGS,
)

FOLDER = Path(__file__).parent
_HEADER = "<!-- Made by docs/generate.py; edit that, or the code it reads. -->\n\n"

_GPUS = {
    (7, 5): "T4, RTX 20",
    (8, 0): "A100",
    (8, 6): "A10, RTX 30",
    (8, 9): "L4, L40S, RTX 40",
    (9, 0): "H100, H200",
    (10, 0): "B200",
    (10, 3): "B300",
    (10, 7): "VR200",
    (11, 0): "Jetson Thor",
    (12, 0): "RTX 50, RTX PRO 6000",
    (12, 1): "DGX Spark",
}
_ACCESS = {Access.FREE: "none", Access.NORMAL: "`--api-key`", Access.ADMIN: "`--admin-api-key`, else `--api-key`"}
FIELD_TABLES = {
    "/generate": BODIES["/generate"],
    "sampling_params": SAMPLING,
    "/v1/chat/completions": BODIES["/v1/chat/completions"],
    "/v1/completions": BODIES["/v1/completions"],
}
_COMPLETE = Target(
    device="cuda",
    cuda="13.0",
    nvcc="13.0",
    flashinfer="0.7.4",
    cudnn="9.23.1",
    cudnn_frontend="1.32.0",
    cutlass_dsl="4.8.0",
    nvrtc="13.5",
)
# What may be missing on a machine that is complete otherwise.
_GAPS: tuple[dict[str, Any], ...] = (
    {"flashinfer": None},
    {"flashinfer": "0.6.12"},
    {"cuda": "12.6"},
    {"nvcc": None, "prebuilt": False},
    {"nvcc": "12.6", "prebuilt": False},
    {"cudnn": None},
    {"cudnn_frontend": None},
    {"cutlass_dsl": None},
    {"nvrtc": None},
    {"nvrtc": "11.8"},
)


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


TARGETS: dict[str, Target] = {
    **{_version(capability): replace(_COMPLETE, capability=capability) for capability in _GPUS},
    "CPU": Target(device="cpu", flashinfer="0.7.4"),
}


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _values(spec: FieldSpec) -> str:
    if spec.choices:
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    if spec.type is bool:
        return "none"
    flag = spec.flag
    bounds = [f"more than {flag.above}"] if flag.above is not None else []
    bounds += [f"{flag.minimum} or more"] if flag.minimum is not None else []
    bounds += [f"at most {flag.maximum}"] if flag.maximum is not None else []
    kind = {int: "integer", float: "number", str: "text"}[spec.type]
    return ("one or several: " if spec.several else "") + ", ".join([kind, *bounds])


def _default(spec: FieldSpec) -> str:
    if spec.required:
        return "required"
    if spec.type is bool:
        return "off"
    return "see text" if spec.default in (None, "") else f"`{spec.default}`"


def server_arguments() -> str:
    """Every flag of the server, and what is refused by name."""
    rows = []
    for spec in field_specs():
        flags = "<br>".join(f"`{name}`" for name in spec.names)
        rows.append([flags, f"`{spec.name}`", _values(spec), _default(spec), spec.flag.help])
    refused = [[f"`{name}`", f"`{other}`"] for name, other in REPLACED_FLAGS.items()]
    specs = {spec.name: spec for spec in field_specs()}
    values = []
    for name, reasons in REFUSED_VALUES.items():
        for reason in dict.fromkeys(reasons.values()):
            refused_values = ", ".join(f"`{value}`" for value, other in reasons.items() if other == reason)
            values.append([f"`{specs[name].names[0]}`", refused_values, reason])
    return (
        _HEADER
        + "# Server arguments\n\n"
        + "`python -m sglang.launch_server --model-path MODEL ...`; `sglang.Engine(...)` takes the same as keywords "
        + "(second column). A bad value ends the start with one line and exit status 2.\n\n"
        + _table(["Flag", "Keyword", "Value", "Default", "Meaning"], rows)
        + "\n## Refused by name\n\nNothing is accepted and ignored. These have another name here:\n\n"
        + _table(["Flag", "Use"], refused)
        + "\nThese values exist in SGLang:\n\n"
        + _table(["Flag", "Value", "Answer"], values)
        + "\nSGLang's other flags are in [compatibility.md](compatibility.md).\n"
    )


def environment_variables() -> str:
    """Every environment variable that the package reads."""
    rows = [[f"`{variable.name}`", variable.default_text, variable.help] for variable in envs.all()]
    return (
        _HEADER
        + "# Environment variables\n\nAn empty value is the same as none. A value that can't be used ends the start "
        + "with one line that names the variable, and exit status 2.\n\n"
        + _table(["Variable", "Default", "Meaning"], rows)
    )


def supported_hardware() -> str:
    """Which FP4 backend runs where, as the registry itself answers."""
    notes: dict[str, int] = {}

    def cell(name: str, target: Target) -> str:
        answers = []
        for weight_only in (False, True):
            reason = unsupported_reasons(replace(target, weight_only=weight_only))[name]
            # The device's own properties, behind the semicolon, are in the row already.
            note = None if reason is None else reason.partition("; this ")[0]
            answers.append("yes" if note is None else f"no [{notes.setdefault(note, len(notes) + 1)}]")
        return answers[0] if answers[0] == answers[1] else " / ".join(answers)

    def chosen(target: Target, weight_only: bool) -> str:
        return f"`{resolve_fp4_gemm_backend('auto', None, replace(target, weight_only=weight_only)).name}`"

    names = list(backends())
    keeping = ", ".join(f"`{name}`" for name, backend in backends().items() if backend.keeps_activations)
    rows = []
    for device, target in TARGETS.items():
        example = _GPUS[target.capability] if target.capability else "any"
        cells = [cell(name, target) for name in names]
        rows.append([device, example, *cells, chosen(target, False), chosen(target, True)])
    header = ["Compute capability", "For example", *(f"`{name}`" for name in names)]
    order = [
        [
            _version(row.capability),
            row.condition or "any",
            ", ".join(f"`{n}`" for n in row.order),
            row.reason,
            row.source,
        ]
        for row in AUTO_TABLE
    ]
    return (
        _HEADER
        + "# Supported hardware\n\nWhich `--fp4-gemm-backend` multiplies NVFP4 weights on which device, and which one "
        + f"`auto` takes there. Assumed: FlashInfer {_COMPLETE.flashinfer}, CUDA {_COMPLETE.cuda}, cuDNN "
        + f"{_COMPLETE.cudnn}, nvidia-cudnn-frontend {_COMPLETE.cudnn_frontend}, nvidia-cutlass-dsl "
        + f"{_COMPLETE.cutlass_dsl}, NVRTC {_COMPLETE.nvrtc}, bfloat16 activations, for `cpu` Linux "
        + "and a C++ compiler. Where W4A4 and weight-only layers "
        + f"differ, a cell says W4A4 / weight-only. {keeping} multiplies W4A4 layers with their activations kept in 16 "
        + "bits ([nvfp4.md](nvfp4.md)). `python -m sglang.check_env` says the same for the machine it runs on, and "
        + "`python -m sglang.verify_fp4` whether what runs computes the right thing ([verifying.md](verifying.md)).\n\n"
        + _table([*header, "`auto`, W4A4", "`auto`, weight-only"], rows)
        + "\n"
        + "".join(f"{number}. {reason}\n" for reason, number in notes.items())
        + "\n## The order of `auto` on Blackwell\n\nThe first row whose versions (these or newer) fit counts; a "
        + "backend that can't run is passed over.\n\n"
        + _table(["Compute capability", "Versions", "Order", "Why", "Source"], order)
        + "\n## What is missing, and the command for it\n\nWhat a backend answers on a device that it supports where "
        + "one thing is missing or old. `check_env` prints the command that fits the machine.\n\n"
        + _table(["Backend", "Answer", "Command"], _fixes())
    )


def _fixes() -> list[list[str]]:
    """Answer and command of every backend to every gap, on the first device that it runs on."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, backend in backends().items():
        running = (t for t in TARGETS.values() if t.capability and backend.unsupported_reason(t) is None)
        complete = next(running, None)
        for gap in _GAPS if complete is not None else ():
            target = replace(complete, **gap)
            reason = backend.unsupported_reason(target)
            if reason is not None:
                command = backend.fix(target)
                found.setdefault((reason, f"`{command}`" if command else "none"), []).append(f"`{name}`")
    return [[", ".join(names), reason, command] for (reason, command), names in found.items()]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def _values_taken(values: tuple[Any, ...]) -> str:
    texts = {json.dumps(value) for value in values} - {"null"}
    return ", ".join(f"`{text}`" for text in ["null", *sorted(texts)])


def compatibility() -> str:
    """Every flag, route and request field of SGLang: taken, refused, or absent."""
    specs = {name: spec for spec in field_specs() for name in spec.names}
    flags = []
    for name in sorted(UPSTREAM_FLAGS & specs.keys()):
        flags.append([f"`{name}`", _values(specs[name]), _names(REFUSED_VALUES.get(specs[name].name, ()))])
    routes = [
        [", ".join(f"`{path}`" for path in paths.split()), methods.replace(" ", ", "), _ACCESS[access]]
        for paths, methods, _, access in ROUTES
    ]
    by_words: dict[str, list[str]] = {}
    for path, words in UNSUPPORTED_ROUTES.items():
        by_words.setdefault(words, []).append(path)
    fields = []
    for where, body in FIELD_TABLES.items():
        upstream, own = UPSTREAM_FIELDS[where], set(body.struct.__struct_fields__)
        neutral = body.neutral.keys() - own
        by_values: dict[str, list[str]] = {}
        for name in neutral:
            by_values.setdefault(_values_taken(body.neutral[name]), []).append(name)
        fields += [
            [f"`{where}`", "taken", _names(own)],
            *([[f"`{where}`", "taken, has no effect", _names(body.labels)]] if body.labels else []),
            *([f"`{where}`", f"only {values}", _names(names)] for values, names in sorted(by_values.items())),
            [f"`{where}`", "only `null`, else refused by name", _names(upstream - own - neutral - body.labels)],
        ]
    return (
        _HEADER
        + "# Compatibility with SGLang\n\nCompared with SGLang 0.5.23. Nothing is accepted and ignored: what is not "
        + "taken is refused with a message that names it.\n\n## Server flags\n\nThese are taken "
        + "([server_arguments.md](server_arguments.md)):\n\n"
        + _table(["Flag", "Takes", "Refuses of SGLang's"], flags)
        + "\nThese have another name here: "
        + ", ".join(f"`{name}` (`{other}`)" for name, other in REPLACED_FLAGS.items())
        + '.\n\nThese are refused at the start, exit status 2 ("is known from SGLang but not supported by this '
        + 'version"): '
        + _names([*(f"{name}*" for name in UPSTREAM_FAMILIES), *(UPSTREAM_FLAGS - specs.keys())])
        + ".\n\n## Routes\n\n"
        + _table(["Path", "Methods", "Key that it asks for, where there is one"], routes)
        + "\nThese are answered with HTTP 501 and the reason:\n\n"
        + _table(["Path", "Answer"], [[", ".join(f"`{path}`" for path in p), words] for words, p in by_words.items()])
        + "\n## Request fields\n\n"
        + _table(["Request", "Field is", "Fields"], fields)
        + '\nAny other field is refused with HTTP 400 ("Unrecognized request argument supplied").\n'
    )


PAGES = {
    "compatibility.md": compatibility,
    "server_arguments.md": server_arguments,
    "environment_variables.md": environment_variables,
    "supported_hardware.md": supported_hardware,
}


def main(arguments: list[str] | None = None, folder: Path = FOLDER) -> int:
    """Write the pages, or with ``--check`` compare them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; status 1 if a file is stale")
    check = parser.parse_args(arguments).check
    stale = []
    for name, render in PAGES.items():
        file, text = folder / name, render()
        if check and (not file.is_file() or file.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not check:
            file.write_text(text, encoding="utf-8")
    if stale:
        print(f"stale: {', '.join(stale)}; run: python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
