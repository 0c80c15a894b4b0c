import math

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams


def test_rows_are_sorted_by_what_they_need() -> None:
    info = SamplingBatchInfo.from_params(
        [
            SamplingParams(temperature=0.0, top_p=0.5),
            SamplingParams(temperature=0.7),
            SamplingParams(top_k=1),
            SamplingParams(top_k=9, min_p=0.25),
            SamplingParams(top_k=100),
            SamplingParams(top_k=101, top_p=0.5),
        ],
        vocab_size=100,
        device="cpu",
    )
    plain, filtered = info.groups
    assert not info.is_all_greedy
    assert (plain.most_kept, plain.rows.tolist()) == (0, [1, 4])
    assert plain.temperatures.flatten().tolist() == [0.699999988079071, 1.0]
    assert (filtered.most_kept, filtered.rows.tolist()) == (100, [3, 5])
    assert filtered.top_ks.tolist() == [[9], [100]]
    # No limit is infinite: a running sum of float32 probabilities can exceed 1.
    assert filtered.top_ps.tolist() == [[math.inf], [0.5]]
    assert filtered.min_ps.tolist() == [[0.25], [0.0]]


def test_greedy_batch_has_no_tensors() -> None:
    info = SamplingBatchInfo.from_params([SamplingParams(temperature=0.0)] * 3, 100, "cpu")
    assert info.is_all_greedy
    assert info.groups == ()
