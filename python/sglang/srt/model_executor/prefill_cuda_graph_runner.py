"""Prompts as recorded graphs, broken at the attention: SGLang's prefill backend "breakable".

What the layers compute between two attentions depends on the number of new tokens alone, so it is recorded for some
numbers of them. Attention depends on how long every request is and runs as it would without graphs, on the rows that
are real. A step of fewer tokens takes the next larger size: what its other rows hold is whatever an earlier step left
there, and no row reads another one's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.layers.attention.base_attn_backend import Attention, Rotary
from sglang.srt.model_executor.base_cuda_graph_runner import BaseCudaGraphRunner
from sglang.srt.model_executor.device_graph import Cut, DeviceCapture, DeviceGraph, borrowed
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.nvfp4_linear import NvFp4Linear
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

# Tokens of the largest step that is recorded by default: from some hundred tokens on a step of an 8B model takes the
# GPU longer than the host needs to launch it, and a larger model needs fewer.
MAX_CAPTURED_TOKENS = 1024


def why_no_prefill_graphs(args: ServerArgs, device: torch.device, linears: Iterable[NvFp4Linear]) -> str | None:
    """Why prompts are not recorded; None if they are."""
    if args.disable_cuda_graph:
        return "--disable-cuda-graph"
    if args.cuda_graph_backend_prefill == "disabled":
        return "--cuda-graph-backend-prefill disabled"
    if device.type != "cuda":
        return f"not on a {device.type.upper()}"
    if any(linear.rows_share_a_scale for linear in linears):
        return "a layer scales its input by the largest value of all rows, so padding would change it"
    return None


def captured_tokens(args: ServerArgs, most: int) -> list[int]:
    """Numbers of tokens to record, ascending, where a step has at most ``most``: those of --cuda-graph-bs-prefill
    (larger ones become ``most``), else steps of a sixteenth to a quarter up to the largest one."""
    if args.cuda_graph_bs_prefill is not None:
        return sorted({min(size, most) for size in args.cuda_graph_bs_prefill})
    largest = min(args.cuda_graph_max_bs_prefill or MAX_CAPTURED_TOKENS, most)
    usual = [16, 32, 48, *range(64, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, largest, 256)]
    return [*(size for size in usual if size < largest), largest]


class AttentionCall(NamedTuple):
    """Between two pieces: what a layer attends with, and where the next piece reads the result. ``q``, ``k`` and ``v``
    are [size, heads, dim], ``out`` is [size, heads * dim]."""

    layer: RadixAttention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotary: Rotary | None
    out: torch.Tensor


class Break(Attention):
    """Stands for the attention while a step is recorded: it computes nothing, but ends a piece."""

    def __init__(self, cut: Cut) -> None:
        self.calls: list[AttentionCall] = []
        self._cut = cut
        self._angles: tuple[Rotary, Rotary] | None = None  # of the last layer, and without a hold

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        rotary: Rotary | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None, "the next piece reads what is made here"
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        angles = None
        if rotary is not None:
            if self._angles is None or self._angles[0] is not rotary:
                self._angles = rotary, (borrowed(rotary[0]), borrowed(rotary[1]))
            angles = self._angles[1]
        self.calls.append(AttentionCall(layer, borrowed(q), borrowed(k), borrowed(v), angles, borrowed(out)))
        self._cut()
        return out


class RecordedPrefill(NamedTuple):
    """``pieces`` with ``calls`` between them, and what they compute: [size, hidden size]."""

    pieces: list[DeviceGraph]
    calls: list[AttentionCall]
    hidden_states: torch.Tensor


class PrefillGraphRunner(BaseCudaGraphRunner):
    """Records steps between their attentions and replays them.

    Args:
        forward: the model without its head, from a batch to hidden states [T, hidden size]. Outside of attention,
            what it does must depend on the batch's ``input_ids`` and ``positions`` alone.
        capture: records it.
        sizes: numbers of tokens to record, ascending.
    """

    kind, log_name, unit = "prefill", "prefill cuda graph", "num tokens"
    step = "the prefill of {} tokens"
    smaller, off = "--cuda-graph-max-bs-prefill", "--cuda-graph-backend-prefill disabled"

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        capture: DeviceCapture,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: MHATokenToKVPool,
        sizes: Sequence[int],
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._capture = capture
        self._req_to_token_pool = req_to_token_pool
        self._token_to_kv_pool = token_to_kv_pool
        self._steps: dict[int, RecordedPrefill] = {}
        device = req_to_token_pool.req_to_token.device
        self._input_ids, self._positions = torch.zeros(2, sizes[-1], dtype=torch.int64, device=device).unbind()

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record the step of ``size`` tokens.

        Raises:
            GraphUnavailable: it can't be recorded here.
        """
        input_ids, positions = self._input_ids[:size], self._positions[:size]
        broken: Break

        def run(cut: Cut) -> torch.Tensor:
            nonlocal broken
            broken = Break(cut)
            return self._forward(
                ForwardBatch(
                    forward_mode=ForwardMode.EXTEND,
                    input_ids=input_ids,
                    positions=positions,
                    req_pool_indices=positions[:1],
                    seq_lens=positions[:1],
                    seq_lens_list=[size],
                    out_cache_loc=positions,
                    extend_seq_lens=[size],
                    sampling_info=SamplingBatchInfo(groups=()),
                    req_to_token_pool=self._req_to_token_pool,
                    token_to_kv_pool=self._token_to_kv_pool,
                    attn_backend=broken,
                )
            )

        pieces, hidden_states = self._capture.in_pieces(run)
        self._steps[size] = RecordedPrefill(pieces, broken.calls, hidden_states)

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Compute a step for which the batch's attention backend is prepared: its hidden states [T, hidden size], or
        None if it is too large.

        They lie in memory that the next replay overwrites, on the same stream.
        """
        count = len(batch.input_ids)
        index = bisect_left(self.sizes, count)
        if index == len(self.sizes):
            return None
        step = self._steps[self.sizes[index]]
        torch._foreach_copy_([self._input_ids[:count], self._positions[:count]], [batch.input_ids, batch.positions])
        first, *others = step.pieces
        first.replay()
        rotary = angles = None
        for (layer, q, k, v, layers_rotary, out), piece in zip(step.calls, others, strict=True):
            if layers_rotary is not rotary:
                rotary = layers_rotary
                angles = None if rotary is None else (rotary[0][:count], rotary[1][:count])
            batch.attn_backend.forward(q[:count], k[:count], v[:count], layer, batch, angles, out[:count])
            piece.replay()
        return step.hidden_states[:count]
