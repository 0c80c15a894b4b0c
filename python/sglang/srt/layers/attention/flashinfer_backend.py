"""FlashInfer's attention over the paged KV cache: ``BatchDecodeWithPagedKVCacheWrapper`` and
``BatchPrefillWithPagedKVCacheWrapper``, and for decode steps of few requests our own kernel.

A step of FlashInfer's is planned once for every distinct sliding window, from lengths that the host knows: nothing is
read back from the GPU. What no new token of a request sees is not among the pages that its plan lists.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from sglang.srt.errors import StartupError
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionTarget, Rotary
from sglang.srt.layers.attention.decode_kernel import DecodeKernel, NewTokens
from sglang.srt.layers.attention.flashinfer_obstacles import obstacle
from sglang.srt.layers.attention.flashinfer_pages import Pages, list_pages
from sglang.srt.layers.operators import operators_for
from sglang.srt.platforms import DeviceEvent, device_capability, record_event

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

# For the partial results of sequences that are cut into pieces; as much as SGLang gives. A captured batch needs the
# most: 64 bytes for every value of its queries, 128 MiB for 256 requests with 64 heads of 128 values.
WORKSPACE_BYTES = 384 << 20
# For a plan; as much as FlashInfer gives.
PLAN_BYTES = 8 << 20
# The kernels for CUDA cores know no groups of 5, 6 and 7 query heads, and lose from 4 on.
TENSOR_CORE_GROUP = 4
# Steps that make FlashInfer load every kernel it may choose: for prompts it looks at their number of new tokens.
PROBED_LENGTHS = (1, 128)


class Package(NamedTuple):
    """What is called of FlashInfer."""

    decode: Callable[..., Any]
    prefill: Callable[..., Any]
    fast_decode_plan: Callable[..., None]


@cache
def package() -> Package:
    """Imports FlashInfer, which importing this module does not need."""
    decode, prefill = importlib.import_module("flashinfer.decode"), importlib.import_module("flashinfer.prefill")
    return Package(
        decode.BatchDecodeWithPagedKVCacheWrapper,
        prefill.BatchPrefillWithPagedKVCacheWrapper,
        decode.fast_decode_plan,
    )


@dataclass
class GraphBuffers:
    """What the captured steps of one sliding window read, whatever their size: they run one after the other.

    Attributes:
        indptr, last_page_len, indices: as in :class:`Pages`, for the largest batch, all on the device.
        plan, pinned: uint8 [PLAN_BYTES]: FlashInfer's plan, and where it makes it on the host.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor
    plan: torch.Tensor
    pinned: torch.Tensor


class FlashInferAttnBackend(AttentionBackend):
    """Per layer one kernel that rotates and fills the cache, and one call of FlashInfer; or one call of
    :class:`DecodeKernel`, which does all that and needs no plan.

    Attributes:
        own_decode_pairs: a decode step with at most so many pairs of a request and a KV head is ``DecodeKernel``'s.

    Raises:
        StartupError: a kernel can't be compiled, or does not run.
    """

    name = "flashinfer"
    priority = 20
    captures_decode = True
    own_decode_pairs: ClassVar[int] = 128

    def __init__(self, target: AttentionTarget) -> None:
        super().__init__(target)
        capability = device_capability(target.device)
        self._pdl = capability is not None and capability >= (9, 0)
        self._fp8 = target.kv_cache_dtype == torch.float8_e4m3fn
        self._tensor_cores = self._fp8 or target.num_heads // target.num_kv_heads >= TENSOR_CORE_GROUP
        self._rotate_and_store = operators_for(target.device.type).rotate_and_store
        own = target.num_kv_heads <= self.own_decode_pairs and DecodeKernel.takes(target)
        self._decode_kernel = DecodeKernel(target, self.own_decode_pairs) if own else None
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=target.device)
        self._decode: dict[int | None, Any] = {}
        self._prefill: dict[int | None, Any] = {}
        self._captured: dict[tuple[int | None, int], Any] = {}
        self._graph_buffers: dict[int | None, GraphBuffers] = {}
        self._graph_limits = (0, 0)
        # Of the step: the wrapper that was planned for each sliding window, and whether a graph reads it.
        self._step: dict[int | None, Any] = dict.fromkeys(target.sliding_windows)
        self._in_graph = False
        self._planned: DeviceEvent | None = None
        self._load_kernels()

    @classmethod
    def unsupported_reason(cls, target: AttentionTarget) -> str | None:
        found = obstacle(target)
        return None if found is None else f"{found.reason} ({found.fix})" if found.fix else found.reason

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._plan_step(batch, in_graph=False)

    def init_cuda_graph_state(self, max_batch_size: int, max_context_len: int) -> None:
        self._graph_limits = (max_batch_size, max_context_len)
        for window in self._step:
            self._buffers_for(window)

    def init_graph_metadata(self, batch: ForwardBatch) -> None:
        self._plan_step(batch, in_graph=True)

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
        window = layer.sliding_window
        own = self._kernel_for(batch)
        if own is None and window not in self._step:
            # A model that took the first one's place may have another window: from now on it is planned too.
            self._step[window] = self._plan(window, batch)
            self._planned = record_event(self.target.device)
        pool = batch.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        # A checkpoint's scales are those of an fp8 cache.
        scales = (layer.k_scale or 1.0, layer.v_scale or 1.0) if self._fp8 else (1.0, 1.0)
        new = NewTokens(k, v, rotary) if own is not None else None
        if new is None or not new.readable(q.dtype):
            new = None
            if rotary is None:
                pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
            else:
                self._rotate_and_store(q, k, v, *rotary, keys, values, batch.out_cache_loc, *scales)
        if own is not None:
            table = batch.req_to_token_pool.req_to_token
            where = (table, batch.req_pool_indices, batch.seq_lens)
            return own(q, keys, values, *where, window, layer.scaling, *scales, new, out)
        return self._run(self._step[window], q, keys, values, self._page_size(window), layer.scaling, *scales, out)

    def _run(
        self,
        wrapper: Any,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_size: int,
        scaling: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, heads, dim] over buffers [slots, kv_heads, dim] to [T, heads * dim]."""
        if out is None:
            out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        pages = (-1, page_size, *keys.shape[1:])
        # Plans have a factor of 1 for the scores; q_scale is multiplied with it, so layers with different ones share
        # a plan.
        wrapper.run(
            q,
            (keys.view(pages), values.view(pages)),
            q_scale=scaling,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out.view(q.shape),
            enable_pdl=self._pdl,
        )
        return out

    def _page_size(self, window: int | None) -> int:
        """Slots of a page as plans see it. Single slots where there is a window: a decode step's list then ends where
        the window does and needs no mask, which FlashInfer's tensor-core decode would apply wrongly."""
        return self.target.page_size if window is None else 1

    def _kernel_for(self, batch: ForwardBatch) -> DecodeKernel | None:
        """What computes ``batch`` without a plan; None: FlashInfer does, with one."""
        few = batch.batch_size * self.target.num_kv_heads <= self.own_decode_pairs
        return self._decode_kernel if few and batch.forward_mode.is_decode() else None

    def _plan_step(self, batch: ForwardBatch, in_graph: bool) -> None:
        if self._kernel_for(batch) is not None:
            return
        if self._planned is not None:
            # FlashInfer makes all plans at one place on the host: the GPU must have taken the last one from there.
            self._planned.synchronize()
        self._in_graph = in_graph
        for window in self._step:
            self._step[window] = self._plan(window, batch)
        self._planned = record_event(self.target.device)

    def _plan(self, window: int | None, batch: ForwardBatch) -> Any:
        """The wrapper that computes ``batch`` in layers with this window."""
        if self._in_graph:
            out = self._buffers_for(window).indices
            return self._plan_graph(window, list_pages(batch, window, self._page_size(window), out))
        pages = list_pages(batch, window, self._page_size(window))
        if batch.forward_mode.is_decode():
            return self._plan_decode(window, pages)
        return self._plan_prefill(window, pages, batch.extend_seq_lens)

    def _plan_decode(self, window: int | None, pages: Pages) -> Any:
        wrapper = self._decode.get(window)
        if wrapper is None:
            wrapper = self._decode[window] = self._new_decode_wrapper()
        wrapper.plan(**self._decode_arguments(pages))
        return wrapper

    def _plan_prefill(self, window: int | None, pages: Pages, new_tokens: list[int]) -> Any:
        wrapper = self._prefill.get(window)
        if wrapper is None:
            wrapper = self._prefill[window] = package().prefill(self._workspace, "NHD")
        target = self.target
        wrapper.plan(
            qo_indptr=torch.tensor(
                [0, *accumulate(new_tokens)], dtype=torch.int32, pin_memory=target.device.type == "cuda"
            ),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            num_qo_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim_qk=target.head_dim,
            page_size=pages.page_size,
            causal=True,
            window_left=-1 if window is None else window - 1,
            sm_scale=1.0,
            q_data_type=target.dtype,
            kv_data_type=target.kv_cache_dtype,
        )
        return wrapper

    def _plan_graph(self, window: int | None, pages: Pages) -> Any:
        """Plan for pages whose numbers are where captured kernels read them. The first plan of a size chooses its
        kernel."""
        size = len(pages.last_page_len)
        buffers, arguments = self._buffers_for(window), self._decode_arguments(pages)
        wrapper = self._captured.get((window, size))
        if wrapper is None:
            wrapper = self._captured[window, size] = self._new_decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=buffers.indptr[: size + 1],
                paged_kv_indices_buffer=buffers.indices,
                paged_kv_last_page_len_buffer=buffers.last_page_len[:size],
            )
            # A plan of its own for every size would be 16 MiB each.
            wrapper.reset_workspace_buffer(self._workspace, buffers.plan)
            wrapper._pin_memory_int_workspace_buffer = buffers.pinned
            wrapper.plan(**arguments)
            return wrapper
        buffers.indptr[: size + 1].copy_(pages.indptr, non_blocking=True)
        buffers.last_page_len[:size].copy_(pages.last_page_len, non_blocking=True)
        package().fast_decode_plan(wrapper, **arguments)
        return wrapper

    def _new_decode_wrapper(self, **graph: Any) -> Any:
        return package().decode(self._workspace, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2", **graph)

    def _decode_arguments(self, pages: Pages) -> dict[str, Any]:
        target = self.target
        return {
            "indptr": pages.indptr,
            "indices": pages.indices,
            "last_page_len": pages.last_page_len,
            "num_qo_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "page_size": pages.page_size,
            "sm_scale": 1.0,
            "q_data_type": target.dtype,
            "kv_data_type": target.kv_cache_dtype,
        }

    def _buffers_for(self, window: int | None) -> GraphBuffers:
        buffers = self._graph_buffers.get(window)
        if buffers is None:
            requests, context = self._graph_limits
            pages = -(-context // self._page_size(window)) if window is None else min(window, context)
            device, pinned = self.target.device, self.target.device.type == "cuda"
            buffers = self._graph_buffers[window] = GraphBuffers(
                indptr=torch.empty(requests + 1, dtype=torch.int32, device=device),
                last_page_len=torch.empty(requests, dtype=torch.int32, device=device),
                indices=torch.empty(requests * pages, dtype=torch.int32, device=device),
                plan=torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device),
                pinned=torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=pinned),
            )
        return buffers

    def _load_kernels(self) -> None:
        """Run every kernel once, so that no request waits for its compilation."""
        target = self.target
        logger.info(
            "FlashInfer loads its attention kernels; where they were never compiled before, this takes minutes."
        )
        try:
            for window in self._step:
                for length in PROBED_LENGTHS:
                    self._probe(window, length)
                    # The next plan is made where the GPU takes this one from, late if others use it too.
                    record_event(target.device).synchronize()
        except Exception as error:  # whatever compilers, the loader and the driver raise
            logger.debug("FlashInfer's attention kernels", exc_info=True)
            text = " ".join(str(error).split())
            raise StartupError(
                f"attention backend {self.name}: FlashInfer's kernels for {target} can't be compiled or don't run "
                f"({type(error).__name__}: ...{text[-600:]}); --attention-backend torch_native needs none of them"
            ) from error

    def _probe(self, window: int | None, length: int) -> None:
        """A prompt of ``length`` tokens whose pages are all the same one, and a token behind it."""
        target, page_size = self.target, self._page_size(window)
        cache = torch.zeros(page_size, target.num_kv_heads, target.head_dim, dtype=torch.float32, device=target.device)
        cache = cache.to(target.kv_cache_dtype)
        q = torch.zeros(length, target.num_heads, target.head_dim, dtype=target.dtype, device=target.device)
        count = -(-length // page_size)
        indices = torch.zeros(count, dtype=torch.int32, device=target.device)
        pages = Pages.of([0, count], [(length - 1) % page_size + 1], indices, page_size)
        self._run(self._plan_prefill(window, pages, [length]), q, cache, cache, page_size, 1.0)
        self._run(self._plan_decode(window, pages), q[:1], cache, cache, page_size, 1.0)
        if self._decode_kernel is not None:
            ones = torch.ones(1, dtype=torch.int64, device=target.device)
            self._decode_kernel(q[:1], cache, cache, indices.unsqueeze(0), ones - 1, ones, window, 1.0)
