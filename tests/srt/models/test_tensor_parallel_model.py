"""The whole model on simulated ranks (threads with real collectives between them) against transformers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from step_harness import Stepper, make_model, make_runner, random_tokens
from transformers import AutoConfig

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.vocab_parallel_embedding import VocabShard


@dataclass
class Board:
    """Where the ranks meet."""

    barrier: threading.Barrier
    slots: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadGroup(TensorParallelGroup):
    board: Board | None = None

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert self.board is not None
        self.board.slots[self.rank] = x.clone()
        self.board.barrier.wait(timeout=30)
        parts = [self.board.slots[rank] for rank in range(self.size)]
        self.board.barrier.wait(timeout=30)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)


@pytest.mark.parametrize(("size", "kv_heads", "tied"), [(2, 2, True), (2, 2, False), (4, 2, False)])
def test_ranks_agree_with_transformers(size: int, kv_heads: int, tied: bool, tmp_path: Path) -> None:
    vocab = 64 * (size - 1) + 7
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    tokens = random_tokens(20, vocab)
    with torch.inference_mode():
        expected = make_model(config, tmp_path)(torch.tensor([tokens])).logits[0]
    board = Board(threading.Barrier(size))
    runners = [make_runner(tmp_path, tp=ThreadGroup(rank, size, board=board)) for rank in range(size)]
    assert runners[0].token_to_kv_pool.get_key_buffer(0).shape[1] == max(1, kv_heads // size)

    def run(rank: int) -> torch.Tensor:
        stepper = Stepper(runners[rank])
        first, _ = stepper.step({0: tokens[:15]})
        second, _ = stepper.step({0: tokens[15:16], 1: tokens[:3]})
        return torch.cat((first.next_token_logits, second.next_token_logits))

    with ThreadPoolExecutor(size) as threads:
        for logits in threads.map(run, range(size)):
            torch.testing.assert_close(logits, expected[[14, 15, 2]], rtol=0, atol=1e-5)


def test_vocabulary_shards_cover_it_once() -> None:
    shards = [VocabShard.of(1000, TensorParallelGroup(rank, 3)) for rank in range(3)]
    assert [(shard.start, shard.size) for shard in shards] == [(0, 384), (384, 384), (768, 232)]
    assert {shard.padded_size for shard in shards} == {384}
    assert VocabShard.of(1001, TensorParallelGroup()) == VocabShard(0, 1001, 1001, 1001)
    with pytest.raises(CheckpointError, match="vocabulary of 100 can't be shared by --tp-size 3"):
        VocabShard.of(100, TensorParallelGroup(0, 3))
