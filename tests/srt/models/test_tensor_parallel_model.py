"""The whole model on simulated ranks (threads with real collectives between them) against transformers."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.vocab_parallel_embedding import VocabShard
from step_harness import Stepper, make_model, make_runner, random_tokens
from thread_ranks import on_every_rank, thread_groups


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
    groups = thread_groups(size)

    def run(rank: int) -> torch.Tensor:
        runner = make_runner(tmp_path, tp=groups[rank])
        assert runner.token_to_kv_pool.get_key_buffer(0).shape[1] == max(1, kv_heads // size)
        stepper = Stepper(runner)
        first, _ = stepper.step({0: tokens[:15]})
        second, _ = stepper.step({0: tokens[15:16], 1: tokens[:3]})
        return torch.cat((first.next_token_logits, second.next_token_logits))

    for logits in on_every_rank(size, run):
        torch.testing.assert_close(logits, expected[[14, 15, 2]], rtol=0, atol=1e-5)


def test_vocabulary_shards_cover_it_once() -> None:
    shards = [VocabShard.of(1000, TensorParallelGroup(rank, 3)) for rank in range(3)]
    assert [(shard.start, shard.size) for shard in shards] == [(0, 384), (384, 384), (768, 232)]
    assert {shard.padded_size for shard in shards} == {384}
    assert VocabShard.of(1001, TensorParallelGroup()) == VocabShard(0, 1001, 1001, 1001)
    with pytest.raises(CheckpointError, match="vocabulary of 5 can't be shared by --tp-size 4"):
        VocabShard.of(5, TensorParallelGroup(0, 4))


@given(st.integers(1, 2000), st.integers(2, 8))
def test_every_rank_gets_some_of_any_vocabulary(vocab_size: int, ranks: int) -> None:
    try:
        shards = [VocabShard.of(vocab_size, TensorParallelGroup(rank, ranks)) for rank in range(ranks)]
    except CheckpointError:
        # Even without alignment the first ranks would take it all.
        assert -(-vocab_size // ranks) * (ranks - 1) >= vocab_size
        return
    rows = [row for shard in shards for row in range(shard.start, shard.start + shard.size)]
    assert rows == list(range(vocab_size))
    assert all(0 < shard.size <= shard.padded_size == shards[0].padded_size for shard in shards)
    assert all(shard.size == shard.padded_size for shard in shards[:-1])
