"""Backend ``faulty``: ``torch`` with a fault that can be changed while the server runs, to see what a test notices.

Registered as another package's backend would be. The file that ``FAULT_FILE`` names holds the fault's name; empty:
none, which is ``torch`` to the last bit.
"""

import os
from pathlib import Path

import torch

from sglang.srt.layers.quantization.fp4_backends.torch_reference import TorchBackend
from sglang.srt.layers.quantization.fp4_utils import PreparedWeight, Target
from sglang.srt.layers.quantization.nvfp4_utils import shuffle_rows


class FaultyBackend(TorchBackend):
    name = "faulty"
    out_multiple = 32  # blocks of the row order

    @classmethod
    def priority(cls, target: Target) -> int:
        return -1

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        fault = Path(os.environ["FAULT_FILE"]).read_text()
        if fault == "nibbles swapped":  # of the weight, which is the same as neighbours of the input
            x = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        y = super().apply(x, weight, bias)
        if fault == "zeros":
            y = torch.zeros_like(y)
        if fault.startswith("scale "):
            y = y * float(fault.removeprefix("scale "))
        if fault == "rows in trtllm's order":
            y = shuffle_rows(y.T).T
        return y
