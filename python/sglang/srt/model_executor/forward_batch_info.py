"""One model step as tensors: what the scheduler hands to the model runner, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import Attention
    from sglang.srt.layers.logits_processor import InputLogprobs, Logprobs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class ForwardMode(Enum):
    """EXTEND computes new prompt tokens behind a cached prefix; DECODE computes one token per request."""

    EXTEND = auto()
    DECODE = auto()

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


@dataclass
class ForwardBatch:
    """B requests with T new tokens in all (T == B in DECODE). Tensors are int64 on the model's device.

    Attributes:
        input_ids: [T] token ids of the new tokens, request after request.
        positions: [T] their positions.
        req_pool_indices: [B] rows of ``req_to_token_pool``.
        seq_lens: [B] length after this step; ``seq_lens_list`` is the same as Python integers.
        out_cache_loc: [T] KV slots of the new tokens; they are in ``req_to_token_pool`` already.
        extend_seq_lens: new tokens of each request (EXTEND), all 1 in DECODE.
        input_logprob_starts / input_logprob_targets: for request i, the log-probability of
            ``targets[i][j]`` is wanted from the hidden state of its new token ``starts[i] + j`` (EXTEND; empty
            list of targets where none are wanted).
        top_logprobs_nums: k of each request, 0 where none are wanted.
        token_ids_logprobs: tokens of each request whose log-probabilities are wanted at every position.
        return_logprob: some request of the batch wants log-probabilities.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_list: list[int]
    out_cache_loc: torch.Tensor
    extend_seq_lens: list[int]
    sampling_info: SamplingBatchInfo
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    attn_backend: Attention
    return_logprob: bool = False
    top_logprobs_nums: list[int] | None = None
    token_ids_logprobs: list[list[int]] | None = None
    input_logprob_starts: list[int] | None = None
    input_logprob_targets: list[list[int]] | None = None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_list)


@dataclass
class LogitsProcessorOutput:
    """Logits of each request's last new token, and log-probabilities where they were asked for.

    Attributes:
        next_token_logits: [B, vocabulary] float32; where the step was replayed, good until the next one is.
        input_logprobs: of the prompt tokens that the batch wants (log-softmax of the unscaled logits).
        next_logprobs: of the sampled tokens, in the distribution from which they were drawn before top-k, top-p and
            min-p; filled by ``ModelRunner.sample``.
    """

    next_token_logits: torch.Tensor
    input_logprobs: InputLogprobs | None = None
    next_logprobs: Logprobs | None = None
