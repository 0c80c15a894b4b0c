"""The registry of NVFP4 GEMM backends: ``--fp4-gemm-backend``, what runs where, and why not elsewhere.

Selection is a pure function of a :class:`Target` and two strings (:func:`resolve_fp4_gemm_backend`); the only
process-wide state is the resolved choice. Importing this module needs neither CUDA nor FlashInfer.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.layers.backend_registry import BackendRegistry, ranked
from sglang.srt.layers.fusion import Rows, Step, Then
from sglang.srt.layers.quantization.fp4_target import Target as Target  # importers take it from here

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.nvfp4 import NvFp4Weight
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "sglang.fp4_gemm_backends"
FLAG = "--fp4-gemm-backend"


# ------------------------------------------------------------------------------------------------------ backends
@dataclass
class PreparedWeight:
    """A weight in the layout of the backend of that name; another would compute wrong numbers without an error."""

    backend: str

    def check_owner(self, backend: Fp4GemmBackend) -> None:
        """Raise ValueError unless the weight was prepared for ``backend``."""
        if self.backend != backend.name:
            raise ValueError(f"the weight was prepared for backend {self.backend}, not for {backend.name}")

    def shared_with(self, backend: Fp4GemmBackend) -> PreparedWeight | None:
        """The same tensors as a weight of ``backend``; None where that has another layout."""
        other = type(backend)
        own = backends()[self.backend]
        multiples = (own.in_multiple, own.out_multiple) == (other.in_multiple, other.out_multiple)
        return replace(self, backend=other.name) if own.layout == other.layout and multiples else None

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))


class Fp4GemmBackend(ABC):
    """One way to multiply with NVFP4 weights. Subclassing registers; the class is never instantiated by users.

    Attributes:
        name: the value of ``--fp4-gemm-backend``.
        aliases: other accepted spellings.
        in_multiple, out_multiple: K and N are padded with zeros to multiples of these before ``prepare``.
        per_column_scale: whether one call can apply a global scale per output column. Without it, a fused layer
            whose parts have different global scales is multiplied part by part.
        keeps_activations: W4A4 layers are multiplied as weight-only ones, with the activations as they come.
        layout: backends with the same one read the same prepared bytes. Empty: the backend's name.
        variant: which of its kernels an instance uses; empty: its own default. See :meth:`variants`.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    in_multiple: ClassVar[int] = 16
    out_multiple: ClassVar[int] = 1
    per_column_scale: ClassVar[bool] = False
    keeps_activations: ClassVar[bool] = False
    layout: ClassVar[str] = ""
    variant: str = ""

    def __init_subclass__(cls) -> None:
        cls.layout = cls.layout or getattr(cls, "name", "")
        _registry.add(cls)

    @classmethod
    @abstractmethod
    def priority(cls, target: Target) -> int:
        """Rank among the candidates of ``auto`` on this target; higher is tried first, negative never."""

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        """Why this backend can't run there, as a sentence without its subject; None if it can."""

    @classmethod
    def fix(cls, target: Target) -> str | None:
        """The command that would remove what :meth:`unsupported_reason` says; None where no command does."""
        return None

    @classmethod
    def variants(cls, target: Target) -> tuple[Fp4GemmBackend, ...]:
        """Instances worth timing for the layer of ``target``, the default one first. They share prepared weights."""
        return (cls(),)

    @classmethod
    def tuning(cls, cache: Path | None, measure: bool) -> AbstractContextManager[object]:
        """Entered around products during which a library underneath may choose among its own kernels.

        Args:
            cache: file of our own measurements; the library's lie beside it, under another name. None: keep nothing.
            measure: time them where nothing is known. False: take what ``cache`` has; it stays in force afterwards.
        """
        return nullcontext()

    @property
    def label(self) -> str:
        """Name and variant, "w4a16/split4"."""
        return f"{self.name}/{self.variant}" if self.variant else self.name

    @abstractmethod
    def prepare(self, weight: NvFp4Weight) -> PreparedWeight:
        """Bring a padded weight into this backend's layout, on the device it is on."""

    @abstractmethod
    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [M > 0, padded K] of the layer's dtype to [M, padded N]; ``bias`` [padded N] or None."""

    def fuses(self, weight: PreparedWeight, step: Step, rows: int) -> bool:
        """Whether :meth:`apply_fused` takes ``step`` together with a product of ``rows`` rows; alone, or an input that
        is unscaled with one that follows."""
        return False

    def apply_fused(self, x: Rows, weight: PreparedWeight, bias: torch.Tensor | None, then: Then) -> Rows:
        """See ``LinearMethodBase.apply_fused``; nothing is padded."""
        raise NotImplementedError(f"backend {self.name} only multiplies")


_registry: BackendRegistry[Fp4GemmBackend] = BackendRegistry("FP4 GEMM")
_names = _registry.names


@cache
def _load_backends() -> None:
    from sglang.srt.layers.quantization import fp4_backends

    for module in pkgutil.iter_modules(fp4_backends.__path__, fp4_backends.__name__ + "."):
        importlib.import_module(module.name)
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()


def backends() -> dict[str, type[Fp4GemmBackend]]:
    """Every registered backend by name: ours in the order of :class:`Fp4GemmRunnerBackend`, then those of others."""
    _load_backends()
    ours = [member.value for member in Fp4GemmRunnerBackend]
    found = _registry.backends()
    return {name: found[name] for name in sorted(found, key=lambda x: ours.index(x) if x in ours else len(ours))}


def candidates(target: Target) -> list[type[Fp4GemmBackend]]:
    """Backends in the order in which ``auto`` tries them on ``target``, whether they can run or not."""
    return ranked(backends().values(), lambda backend: backend.priority(target))


def unsupported_reasons(target: Target) -> dict[str, str | None]:
    """Every backend's reason against ``target``, None for those that can run."""
    return {name: backend.unsupported_reason(target) for name, backend in backends().items()}


def normalize_backend_name(value: str, source: str = FLAG) -> str:
    """``value`` in its canonical spelling: case, surrounding blanks and aliases resolved, "auto" included.

    Raises:
        ArgumentError: no backend of that name.
    """
    name = value.strip().lower()
    if name == "auto":
        return name
    backends()
    if name in _names:
        return _names[name].name
    bare = name.removeprefix("flashinfer_")
    hint = f" (did you mean {_names[bare].name}?)" if bare in _names else ""
    raise ArgumentError(f"{source} {value!r} is not an FP4 GEMM backend{hint}; valid: auto, {', '.join(backends())}")


# ----------------------------------------------------------------------------------------------------- selection
@dataclass(frozen=True)
class Resolution:
    """What was asked for, where, and what it came to.

    ``source`` is "default", the flag or the variable. ``reasons`` has every backend that can't run on the target.
    ``warnings`` are to be logged once. ``advice``: the command for a backend that ``auto`` would rather have taken.
    """

    requested: str
    source: str
    name: str
    reasons: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        asked = self.requested if self.source == "default" else f"{self.requested}, from {self.source}"
        choice = _registry.choice(self.name, asked, self.reasons)
        return f"{choice}. {self.advice}" if self.advice else choice

    def as_dict(self) -> dict[str, object]:
        reasons = dict(self.reasons)
        return {"requested": self.requested, "source": self.source, "resolved": self.name, "unsupported": reasons}


def resolve_fp4_gemm_backend(requested: str, env_value: str | None, target: Target) -> Resolution:
    """Decide which backend runs on ``target``. Pure: nothing is read from the environment, nothing is logged.

    Args:
        requested: value of ``--fp4-gemm-backend`` ("auto" if it was not given).
        env_value: value of ``SGLANG_FLASHINFER_FP4_GEMM_BACKEND``; None or empty means unset.

    Raises:
        ArgumentError: an unknown name in either, or a named backend that can't run on ``target``; the text then
            lists every backend with its reason.
    """
    variable = envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND.name
    flag = normalize_backend_name(requested)
    from_env = normalize_backend_name(env_value, variable) if env_value and env_value.strip() else None
    warnings: list[str] = []
    name, source = flag, FLAG if flag != "auto" else "default"
    if from_env is not None:
        if flag == "auto":
            name, source = from_env, variable
            warnings.append(f"{variable} is deprecated and will be removed; use {FLAG} {from_env} instead")
        elif from_env not in ("auto", flag):
            warnings.append(f"{variable}={env_value} is ignored: {FLAG} {flag} was given (the variable is deprecated)")

    reasons = {key: reason for key, reason in unsupported_reasons(target).items() if reason is not None}
    if name != "auto":
        if name in reasons:
            raise ArgumentError(_registry.refusal(f"{source} {name}", target, reasons, backends()))
        return Resolution(name, source, name, reasons, tuple(warnings))
    advice = ""
    for backend in candidates(target):
        if backend.name not in reasons:
            return Resolution("auto", source, backend.name, reasons, tuple(warnings), advice)
        fix = None if advice else backend.fix(target)
        advice = f"To have {backend.name}: {fix}" if fix else advice
    raise StartupError(f"no FP4 GEMM backend runs on {target}: {reasons}")


class Fp4GemmRunnerBackend(Enum):
    """The resolved choice, as importers of SGLang's quantisation layers ask for it."""

    AUTO = "auto"
    CUDNN = "cudnn"
    CUTLASS = "cutlass"
    CUTEDSL = "cutedsl"
    TRTLLM = "trtllm"
    B12X = "b12x"
    W4A16 = "w4a16"
    CPU = "cpu"
    TORCH = "torch"
    EXTERNAL = "external"

    def is_auto(self) -> bool:
        return self is Fp4GemmRunnerBackend.AUTO

    def is_cudnn(self) -> bool:
        return self is Fp4GemmRunnerBackend.CUDNN

    def is_cutlass(self) -> bool:
        return self is Fp4GemmRunnerBackend.CUTLASS

    def is_cutedsl(self) -> bool:
        return self is Fp4GemmRunnerBackend.CUTEDSL

    def is_trtllm(self) -> bool:
        return self is Fp4GemmRunnerBackend.TRTLLM

    def is_b12x(self) -> bool:
        return self is Fp4GemmRunnerBackend.B12X

    def is_flashinfer(self) -> bool:
        return self.is_cudnn() or self.is_cutlass() or self.is_cutedsl() or self.is_trtllm() or self.is_b12x()

    # SGLang's later spelling of the same questions.
    is_flashinfer_cudnn = is_cudnn
    is_flashinfer_cutlass = is_cutlass
    is_flashinfer_cutedsl = is_cutedsl
    is_flashinfer_trtllm = is_trtllm


_resolution: Resolution | None = None


def initialize_fp4_gemm_config(
    server_args: ServerArgs, dtype: torch.dtype = torch.bfloat16, quiet: bool = False
) -> None:
    """Resolve ``--fp4-gemm-backend`` for the device of ``server_args`` and keep the result for this process.

    ``dtype`` is the model's, which not every backend can write. The choice and its warnings are logged, unless
    ``quiet``: a server has several processes and says it once.

    Raises:
        ArgumentError: see :func:`resolve_fp4_gemm_backend`.
    """
    from sglang.srt.platforms import resolve_device

    global _resolution
    _resolution = resolve_fp4_gemm_backend(
        server_args.fp4_gemm_runner_backend,
        envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND.get(),
        Target.current(resolve_device(server_args.device), dtype),
    )
    if not quiet:
        for warning in _resolution.warnings:
            logger.warning(warning)
        logger.info(str(_resolution))


def get_fp4_gemm_resolution() -> Resolution | None:
    """What :func:`initialize_fp4_gemm_config` decided; None if it was never called in this process."""
    return _resolution


def get_fp4_gemm_runner_backend() -> Fp4GemmRunnerBackend:
    """The resolved backend; AUTO when never initialised."""
    if _resolution is None:
        return Fp4GemmRunnerBackend.AUTO
    try:
        return Fp4GemmRunnerBackend(_resolution.name)
    except ValueError:  # registered by another package
        return Fp4GemmRunnerBackend.EXTERNAL


@cache
def _log_fallback(message: str) -> None:
    logger.warning(message)


def backend_for_layer(target: Target, layer_name: str) -> Fp4GemmBackend:
    """The backend for one layer: the process's choice if it takes the layer, else (``auto`` only) the next that does.

    Raises:
        StartupError: a backend was named and it can't take this layer, or none can.
    """
    resolution = _resolution or resolve_fp4_gemm_backend("auto", None, replace(target, weight_only=None))
    chosen = backends()[resolution.name]
    reason = chosen.unsupported_reason(target)
    if reason is None:
        return chosen()
    shape = f"N={target.out_features}, K={target.in_features}"
    if resolution.requested != "auto":
        raise StartupError(
            f"layer {layer_name} ({shape}): {FLAG} {chosen.name} can't take it: {reason}; {FLAG} auto picks a backend "
            "for each layer"
        )
    reasons = [f"{chosen.name}: {reason}"]
    for backend in candidates(target):
        reason = backend.unsupported_reason(target)
        if reason is None:
            kind = "weight-only" if target.weight_only else "W4A4"
            _log_fallback(f"FP4 GEMM backend: {backend.name} for {kind} layers ({'; '.join(reasons)})")
            logger.debug("layer %s (%s): %s", layer_name, shape, backend.name)
            return backend()
        reasons.append(f"{backend.name}: {reason}")
    raise StartupError(f"layer {layer_name} ({shape}): no FP4 GEMM backend can take it: {'; '.join(reasons)}")
