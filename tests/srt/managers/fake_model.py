"""A model whose output is a hash of everything it can see in the KV cache, and a harness around a real scheduler.

The fake model stores each token and its position in the KV slot that the scheduler chose and computes the next token
from what it finds in the slots of the whole sequence. A slot that is shared wrongly, overwritten or stale gives a wrong
position (an assertion) or other tokens than :func:`expected`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    TokenizedGenerateReqInput,
    decode_to_tokenizer,
    encode,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 50
EOS = 1


def _hash(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(bytes(tokens), digest_size=6).digest(), "big")


def next_token(tokens: list[int]) -> int:
    return _hash(tokens) % VOCAB


def logprob(tokens: list[int], target: int) -> float:
    """Of ``target`` behind ``tokens``."""
    return -float(_hash([*tokens, target]) % 1000) / 8


def top_logprobs(tokens: list[int], k: int) -> list[tuple[float, int]]:
    return sorted(((logprob(tokens, t), t) for t in range(VOCAB)), reverse=True)[:k]


def logprobs_of_ids(tokens: list[int], ids: list[int]) -> list[tuple[float, int]]:
    return [(logprob(tokens, token_id), token_id) for token_id in ids]


Position = tuple[float, list[tuple[float, int]], list[tuple[float, int]]]


def position(tokens: list[int], target: int, top: int, ids: list[int]) -> Position:
    """Everything that is wanted of one position."""
    return logprob(tokens, target), top_logprobs(tokens, top), logprobs_of_ids(tokens, ids)


@dataclass(frozen=True)
class FakeLogprobs:
    """``Logprobs`` or ``InputLogprobs``."""

    values: list[Any]

    def to_host(self) -> FakeLogprobs:
        return self

    def lists(self) -> list[Any]:
        return self.values


@dataclass
class Result:
    """Everything that came for one request."""

    output_ids: list[int] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    cached_tokens: int = 0
    input_token_logprobs: list[Any] | None = None
    input_top_logprobs: list[Any] | None = None
    output_token_logprobs: list[Any] = field(default_factory=list)
    output_top_logprobs: list[Any] = field(default_factory=list)
    input_token_ids_logprobs: list[Any] | None = None
    output_token_ids_logprobs: list[Any] = field(default_factory=list)
    messages: int = 0


def expected(recv: TokenizedGenerateReqInput, room: int) -> Result:
    """What the request must get, computed alone and without a cache. ``room``: tokens it may generate at most."""
    params, tokens, result = recv.sampling_params, list(recv.input_ids), Result()
    limit = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    if recv.return_logprob:
        start, top = recv.logprob_start_len, recv.top_logprobs_num
        positions = range(start, len(tokens))
        result.input_token_logprobs = [
            (None if p == start else logprob(tokens[:p], tokens[p]), tokens[p]) for p in positions
        ]
        if top:
            result.input_top_logprobs = [None if p == start else top_logprobs(tokens[:p], top) for p in positions]
        if ids := recv.token_ids_logprob:
            result.input_token_ids_logprobs = [
                None if p == start else logprobs_of_ids(tokens[:p], ids) for p in positions
            ]
    while result.finish_reason is None:
        token = next_token(tokens)
        if limit:
            result.output_ids.append(token)
            if recv.return_logprob:
                result.output_token_logprobs.append((logprob(tokens, token), token))
                if recv.top_logprobs_num:
                    result.output_top_logprobs.append(top_logprobs(tokens, recv.top_logprobs_num))
                if recv.token_ids_logprob:
                    result.output_token_ids_logprobs.append(logprobs_of_ids(tokens, recv.token_ids_logprob))
            tokens.append(token)
        if len(result.output_ids) >= limit:
            result.finish_reason = {"type": "length", "length": limit}
        elif token in stops:
            result.finish_reason = {"type": "stop", "matched": token}
    return result


class FakeModelRunner:
    """Stands in for ``ModelRunner`` with real pools."""

    on = "cpu"

    def __init__(self, size: int, page_size: int, context_len: int, rows: int) -> None:
        self.device = torch.device(self.on)
        self.page_size = page_size
        self.max_total_num_tokens = size
        self.max_running_requests = rows
        self.req_to_token_pool = ReqToTokenPool(rows, context_len, self.device)
        self.token_to_kv_pool = MHATokenToKVPool(size, page_size, torch.float32, 1, 2, 1, self.device)
        self.attn_backend = None
        self.model = nn.Linear(3, 5)
        self.layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        self.batches.append(batch)
        assert batch.seq_lens.tolist() == batch.seq_lens_list
        assert len(batch.input_ids) == sum(batch.extend_seq_lens)
        assert batch.out_cache_loc.min() >= self.page_size, "the padding page was handed out"
        assert len(set(batch.out_cache_loc.tolist())) == len(batch.out_cache_loc)
        kv = torch.stack([batch.input_ids, batch.positions], dim=1).float()
        batch.token_to_kv_pool.set_kv_buffer(self.layer, batch.out_cache_loc, kv, kv)
        logits = torch.zeros(batch.batch_size, VOCAB, device=self.device)
        output = LogitsProcessorOutput(logits)
        inputs: list[list[Position]] = [[] for _ in batch.seq_lens_list]
        self._sequences: list[list[int]] = []
        begin = 0
        for i, (length, new) in enumerate(zip(batch.seq_lens_list, batch.extend_seq_lens, strict=True)):
            slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[i], :length].long()
            assert torch.equal(slots[length - new :], batch.out_cache_loc[begin : begin + new])
            begin += new
            tokens, positions = batch.token_to_kv_pool.get_key_buffer(0)[slots, 0].long().T.tolist()
            assert positions == list(range(length)), "a KV slot holds another token"
            logits[i, next_token(tokens)] = 1
            self._sequences.append(tokens)
            if batch.return_logprob and batch.forward_mode.is_extend():
                inputs[i] = self._input_logprobs(batch, i, tokens, length - new)
        if batch.return_logprob:
            output.input_logprobs = FakeLogprobs(inputs)  # type: ignore[assignment]
        return output

    def _input_logprobs(self, batch: ForwardBatch, i: int, tokens: list[int], prefix: int) -> list[Position]:
        assert batch.input_logprob_starts is not None and batch.input_logprob_targets is not None
        assert batch.top_logprobs_nums is not None and batch.token_ids_logprobs is not None
        targets = batch.input_logprob_targets[i]
        ends = [prefix + batch.input_logprob_starts[i] + j + 1 for j in range(len(targets))]
        assert all(end <= len(tokens) for end in ends)
        top, ids = batch.top_logprobs_nums[i], batch.token_ids_logprobs[i]
        return [position(tokens[:end], target, top, ids) for end, target in zip(ends, targets, strict=True)]

    def sample(self, output: LogitsProcessorOutput, batch: ForwardBatch) -> torch.Tensor:
        assert batch.sampling_info.is_all_greedy
        token_ids = output.next_token_logits.argmax(dim=-1)
        if batch.return_logprob:
            assert batch.top_logprobs_nums is not None and batch.token_ids_logprobs is not None
            columns = (self._sequences, token_ids.tolist(), batch.top_logprobs_nums, batch.token_ids_logprobs)
            output.next_logprobs = FakeLogprobs(  # type: ignore[assignment]
                [position(*row) for row in zip(*columns, strict=True)]
            )
        return token_ids


# Set by the fixture ``each_loop`` (conftest.py) where a test runs with overlap.
OVERLAP = False


class FakeChannel:
    """Hands out what is in ``inbox``; what is sent passes through the real encoding."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.sent: list[BatchTokenIDOutput | ControlReply] = []

    def recv(self, block: bool) -> list[Any]:
        assert self.inbox or not block, "the scheduler would wait for ever"
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: BatchTokenIDOutput | ControlReply) -> None:
        self.sent.append(decode_to_tokenizer(encode(message)))

    def post(self, message: Any) -> None:
        self.inbox.append(message)


class Harness:
    """A scheduler with a fake model, driven step by step."""

    def __init__(
        self,
        size: int = 512,
        page_size: int = 1,
        context_len: int = 200,
        rows: int = 8,
        chunk: int = -1,
        radix: bool = True,
        max_queued: int | None = None,
    ) -> None:
        self.runner = FakeModelRunner(size, page_size, context_len, rows)
        self.channel = FakeChannel()
        server_args: Any = SimpleNamespace(
            chunked_prefill_size=chunk,
            disable_radix_cache=not radix,
            max_queued_requests=max_queued,
            disable_overlap_schedule=False,
        )
        config: Any = SimpleNamespace(context_len=context_len, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
        self.scheduler = Scheduler(server_args, config, self.runner, self.channel)  # type: ignore[arg-type]
        self.scheduler.enable_overlap = OVERLAP
        self.requests: dict[str, TokenizedGenerateReqInput] = {}
        self.results: dict[str, Result] = {}
        self.aborted: set[str] = set()

    def add(self, prompt: list[int], max_new_tokens: int | None = 8, **options: Any) -> str:
        """Queue a request; ``options`` are those of the message or of the sampling parameters."""
        fields = {k: options.pop(k) for k in list(options) if k in TokenizedGenerateReqInput.__struct_fields__}
        params = SamplingParams(max_new_tokens=max_new_tokens, **{"temperature": 0.0, **options})
        rid = f"r{len(self.requests)}"
        recv = TokenizedGenerateReqInput(rid=rid, input_ids=prompt, sampling_params=params, **fields)
        self.requests[rid] = recv
        self.results[rid] = Result()
        self.channel.inbox.append(recv)
        return rid

    def abort(self, rid: str) -> None:
        self.aborted.add(rid)
        self.channel.inbox.append(AbortReq(rid=rid))

    def step(self) -> bool:
        busy = self.scheduler.step()
        self._collect()
        return busy

    def read(self) -> None:
        """Take the tokens of what was launched; without overlap that is done already."""
        self.scheduler.process_pending_result()
        self.scheduler.send_outputs()
        self._collect()

    def run(self, limit: int = 20000) -> None:
        """Until nothing is left; the scheduler checks its own integrity then, and we check it slot by slot."""
        for _ in range(limit):
            if not self.step():
                self.check_slots()
                return
        raise AssertionError(f"still busy after {limit} steps")

    def check_slots(self) -> None:
        """Every page is free or in the tree, exactly once."""
        allocator, tree = self.scheduler.pools.allocator, self.scheduler.tree_cache
        pages = allocator.free_pages().cpu()
        if isinstance(tree, RadixCache):
            values = tree.all_values_flatten().cpu().view(-1, allocator.page_size)
            assert torch.equal(values - values[:, :1], torch.arange(allocator.page_size).expand_as(values))
            pages = torch.cat([pages, values[:, 0] // allocator.page_size])
        assert pages.sort().values.tolist() == list(range(1, allocator.num_pages + 1))

    def check_results(self) -> None:
        """Every request got exactly what it gets alone (an aborted one: a prefix of it)."""
        limit = self.scheduler.max_req_len
        for rid, recv in self.requests.items():
            got, want = self.results[rid], expected(recv, limit - len(recv.input_ids))
            if rid in self.aborted and got.finish_reason is not None and got.finish_reason["type"] == "abort":
                assert got.output_ids == want.output_ids[: len(got.output_ids)]
                continue
            assert got.output_ids == want.output_ids, rid
            assert got.finish_reason == want.finish_reason, rid
            assert got.input_token_logprobs == want.input_token_logprobs, rid
            assert got.input_top_logprobs == want.input_top_logprobs, rid
            assert got.output_token_logprobs == want.output_token_logprobs, rid
            assert got.output_top_logprobs == want.output_top_logprobs, rid
            assert got.input_token_ids_logprobs == want.input_token_ids_logprobs, rid
            assert got.output_token_ids_logprobs == want.output_token_ids_logprobs, rid

    def _collect(self) -> None:
        for message in self.channel.sent:
            if not isinstance(message, BatchTokenIDOutput):
                continue
            for out in message.outputs:
                got = self.results[out.rid]
                assert got.finish_reason is None, "an output behind the last one"
                assert out.prompt_tokens == len(self.requests[out.rid].input_ids)
                got.messages += 1
                got.output_ids += out.output_ids
                assert out.completion_tokens == len(got.output_ids)
                got.finish_reason = out.finish_reason
                got.cached_tokens = out.cached_tokens
                if out.input_token_logprobs is not None:
                    assert got.messages == 1, "input log-probabilities come with the first message"
                    got.input_token_logprobs = out.input_token_logprobs
                    got.input_top_logprobs = out.input_top_logprobs
                    got.input_token_ids_logprobs = out.input_token_ids_logprobs
                got.output_token_logprobs += out.output_token_logprobs or []
                got.output_top_logprobs += out.output_top_logprobs or []
                got.output_token_ids_logprobs += out.output_token_ids_logprobs or []
        self.channel.sent = [m for m in self.channel.sent if not isinstance(m, BatchTokenIDOutput)]
