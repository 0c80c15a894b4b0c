"""FlashInfer's attention wrappers on a CPU: their Python is the real package's, their kernels are these.

A kernel computes from the buffers that it is given at the call, and refuses to if the plan was made for others. The GPU
takes a plan from pinned memory as late as it can: no other may be made there before somebody has waited for it.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention import flashinfer_backend

CAUSAL = 1
decode = importlib.import_module("flashinfer.decode")
prefill = importlib.import_module("flashinfer.prefill")


def _on_hopper(device: Any, rope: int, fp16: bool, mask: bool, q: torch.dtype, kv: torch.dtype, **dims: int) -> str:
    return "fa3" if q == kv else "fa2"


class _Event:
    def __init__(self, in_flight: set[int]) -> None:
        self._all, self._before = in_flight, frozenset(in_flight)

    def synchronize(self) -> None:
        self._all -= self._before


class AttentionKernels:
    """Stands for all compiled modules, on a device of compute capability 9.0.

    Attributes:
        modules: what was asked for: "decode" or the prefill backend, and whether it masks a sliding window.
        plans: of each plan, the lengths of requests as the kernel's scheduler got them.
        runs: the kind of each module that was run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modules: set[tuple[str, bool]] = set()
        self.plans: list[dict[str, Any]] = []
        self.runs: list[str] = []
        self._in_flight: set[int] = set()
        monkeypatch.setattr(flashinfer_backend, "record_event", lambda device: _Event(self._in_flight))
        empty, tensor = torch.empty, torch.tensor
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        monkeypatch.setattr(torch, "tensor", lambda *data, pin_memory=False, **options: tensor(*data, **options))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        for module in (decode, prefill):
            monkeypatch.setattr(module, "device_support_pdl", lambda device: True)
            monkeypatch.setattr(module, "get_compute_capability", lambda device: (9, 0), raising=False)
            monkeypatch.setattr(module, "get_batch_prefill_module", self._prefill_module)
            monkeypatch.setattr(module, "determine_attention_backend", _on_hopper)
        monkeypatch.setattr(decode, "get_batch_decode_module", self._decode_module)

    def _decode_module(self, q: Any, kv: Any, out: Any, index: Any, qk: int, vo: int, rope: int, window: bool,
                       *rest: Any) -> SimpleNamespace:  # fmt: skip
        self.modules.add(("decode", window))

        def plan(space: Any, ints: Any, pinned: Any, indptr: torch.Tensor, batch: int, heads: int, kv_heads: int,
                 page: int, graph: bool, window_left: int, *rest: Any) -> list[int]:  # fmt: skip
            assert heads // kv_heads in (1, 2, 3, 4, 8)
            lengths = None  # this scheduler knows pages only
            return self._planned(pinned, range(batch + 1), indptr, lengths, page, heads, kv_heads, False, window_left)

        def run(space: Any, ints: Any, plan: list[int], q: Any, k: Any, v: Any, indptr: Any, indices: Any, last: Any,
                out: Any, lse: Any, layout: int, window_left: int, pdl: bool, alibi: Any, cap: float,
                scale: float, *rest: Any) -> None:  # fmt: skip
            self._run("decode", plan, q, k, v, None, indptr, indices, last, out, 0, window_left, scale)

        return SimpleNamespace(plan=plan, run=run)

    def _prefill_module(self, backend: str, q: Any, kv: Any, out: Any, index: Any, qk: int, vo: int, rope: int,
                        window: bool, *rest: Any) -> SimpleNamespace:  # fmt: skip
        assert backend == "fa2" or q == kv
        self.modules.add((backend, window))

        def plan(space: Any, ints: Any, pinned: Any, q_indptr: torch.Tensor, indptr: torch.Tensor, lengths: Any,
                 rows: int, batch: int, heads: int, kv_heads: int, page: int, graph: bool, qk: int, vo: int,
                 causal: bool, window_left: int, *rest: Any) -> list[int]:  # fmt: skip
            assert len(rest) == (0 if backend == "fa3" else 3 if len(rest) == 3 else 5)
            return self._planned(pinned, q_indptr.tolist(), indptr, lengths, page, heads, kv_heads, causal, window_left)

        def run(space: Any, ints: Any, plan: list[int], q: Any, k: Any, v: Any, q_indptr: Any, indptr: Any,
                indices: Any, last: Any, out: Any, lse: Any, mask: int, layout: int, window_left: int, pdl: bool,
                custom: Any, custom_indptr: Any, alibi: Any, prefix: Any, items: Any, longest: Any, cap: float,
                scale: float, *rest: Any) -> None:  # fmt: skip
            # As the real one: a window of queries that are not the sequence's last is masked wrong without causality.
            assert mask == CAUSAL or window_left < 0
            self._run(backend, plan, q, k, v, q_indptr, indptr, indices, last, out, mask, window_left, scale)

        return SimpleNamespace(plan=plan, paged_run=run)

    def _planned(self, pinned: torch.Tensor, q_indptr: Any, indptr: torch.Tensor, lengths: Any, page: int, heads: int,
                 kv_heads: int, causal: bool, window_left: int) -> list[int]:  # fmt: skip
        assert pinned.data_ptr() not in self._in_flight
        self._in_flight.add(pinned.data_ptr())
        self.plans.append(
            {
                "q_indptr": list(q_indptr),
                "indptr": indptr.tolist(),
                "lengths": None if lengths is None else lengths.tolist(),
                "page": page,
                "heads": (heads, kv_heads),
                "causal": causal,
                "window": window_left,
            }
        )
        return [len(self.plans) - 1]

    def _run(self, kind: str, plan: list[int], q: Any, k: Any, v: Any, q_indptr: Any, indptr: Any, indices: Any,
             last: Any, out: Any, mask: int, window_left: int, scale: float) -> None:  # fmt: skip
        self.runs.append(kind)
        planned = self.plans[plan[0]]
        starts = planned["q_indptr"] if q_indptr is None else q_indptr.tolist()
        assert starts == planned["q_indptr"] and indptr.tolist() == planned["indptr"]
        assert k.shape[1] == planned["page"] and (q.shape[1], k.shape[2]) == planned["heads"]
        assert (mask == CAUSAL) == planned["causal"] and window_left == planned["window"]
        assert q.stride(2) == 1 and out.is_contiguous()
        group = q.shape[1] // k.shape[2]
        for number, (start, end) in enumerate(pairwise(starts)):
            pages = indices[indptr[number] : indptr[number + 1]].long()
            length = (len(pages) - 1) * planned["page"] + int(last[number])
            if planned["lengths"] is not None:
                assert length == planned["lengths"][number]
            keys, values = (
                x[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v)
            )
            position = torch.arange(length - (end - start), length).unsqueeze(1)
            token = torch.arange(length)
            hidden = token > position if mask == CAUSAL else torch.zeros(end - start, length, dtype=torch.bool)
            if window_left >= 0:
                hidden |= token < position - window_left
            scores = q[start:end].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:end] = (weights @ values).transpose(0, 1).to(out.dtype)
