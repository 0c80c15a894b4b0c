"""The two protocols between a layer and its quantisation; method names and arguments are SGLang's.

An importer's own layer works unchanged: call ``config.get_quant_method(layer, prefix)``, then ``create_weights``
with a ``weight_loader``, load, ``process_weights_after_loading`` and ``apply``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from sglang.srt.layers.fusion import Rows, Step, Then

# Layers that are multiplied as one, and the parts that checkpoints store.
PACKED_MODULES = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def register_weight(layer: nn.Module, name: str, data: torch.Tensor, **attrs: Any) -> None:
    """Register ``data`` as a parameter without gradient (it may be of an integer dtype) and set ``attrs`` on it.

    Attributes that loaders read: ``output_dim`` / ``input_dim`` (which dimension is N / K; absent from tensors with
    one value per fused part), ``weight_loader(param, loaded_weight, shard_id)``, ``check(loaded_weight)``, which
    returns what is wrong with the values, or None, and ``optional`` (a checkpoint may lack it: the initial value says
    what that means).
    """
    param = nn.Parameter(data, requires_grad=False)
    for key, value in attrs.items():
        setattr(param, key, value)
    layer.register_parameter(name, param)


class LinearMethodBase(ABC):
    """How one linear layer stores its weight and multiplies with it."""

    # Checkpoint tensors of this layer (last name component) that may be in the file and are not read.
    unused_tensors: frozenset[str] = frozenset()

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters that the checkpoint fills.

        Args:
            layer: receives the parameters.
            input_size_per_partition: K of this rank.
            output_partition_sizes: N of this rank for each fused part (q, k, v or gate, up; one entry if not fused).
            input_size, output_size: K and N of the whole layer.
            params_dtype: dtype of activations and outputs.
            extra_weight_attrs: set on every parameter, ``weight_loader`` among them.
        """

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] times the layer's weight, plus ``bias``: [..., N] in ``params_dtype``."""

    def fuses(self, layer: nn.Module, step: Step, rows: int) -> bool:
        """Whether :meth:`apply_fused` takes ``step`` together with a product of ``rows`` rows; alone, or an input that
        is unscaled with one that follows."""
        return False

    def apply_fused(self, layer: nn.Module, x: Rows, bias: torch.Tensor | None = None, then: Then = None) -> Rows:
        """``apply`` on rows [T, K] that may be unscaled, and what follows it, of which :meth:`fuses` said yes.

        Returns:
            [T, N]; [T, N / 2] for :class:`SiluAndMul`; :class:`UnscaledRows` for :class:`AddRMSNorm`.
        """
        raise NotImplementedError(f"{type(self).__name__} only multiplies")

    def weight_bytes(self, layer: nn.Module) -> int:
        """Memory that the layer's weights take, in whatever form they are held."""
        return sum(param.nbytes for param in layer.parameters(recurse=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Turn loaded parameters into what ``apply`` needs. Called once, after every parameter was written."""
        return None


class QuantizationConfig(ABC):
    """What a checkpoint (or a flag) says about quantisation; makes one method per layer."""

    packed_modules_mapping: dict[str, list[str]]

    @classmethod
    @abstractmethod
    def get_name(cls) -> str:
        """Name in ``--quantization``."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """The method for the linear layer called ``prefix`` (its name in the checkpoint, a fused layer by its
        fused name); None if this kind of layer is never quantised."""

    def check_names(self, names: Collection[str]) -> None:
        """Compare what the config says about layers with the layers there are, ``names`` in the checkpoint's spelling.

        Raises:
            CheckpointError: it names layers that do not exist, so that it can't mean what it does here.
        """
        return

    @property
    def kv_cache_dtype(self) -> torch.dtype | None:
        """The KV cache dtype that the checkpoint asks for; None where it asks for none."""
        return None
