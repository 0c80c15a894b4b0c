"""Flags that don't go with each other, or with the device."""

from types import SimpleNamespace

import pytest
from flag_lines import parse, refusal

from sglang.srt.errors import ArgumentError
from sglang.srt.flag_combinations import check_device


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--cuda-graph-bs 4 0", ["--cuda-graph-bs must be 1 or more, not 0"]),
        ("--cuda-graph-bs 4 --cuda-graph-max-bs 4", ["--cuda-graph-max-bs says nothing with --cuda-graph-bs"]),
        ("--cuda-graph-max-bs 4 --disable-cuda-graph", ["--cuda-graph-max-bs says nothing with --disable-cuda-graph"]),
        ("--cuda-graph-bs-prefill 64 0", ["--cuda-graph-bs-prefill must be 1 or more, not 0"]),
        (
            "--cuda-graph-bs-prefill 64 --cuda-graph-max-bs-prefill 64",
            ["--cuda-graph-max-bs-prefill says nothing with --cuda-graph-bs-prefill, which lists all sizes"],
        ),
        (
            "--cuda-graph-max-bs-prefill 64 --cuda-graph-backend-prefill disabled",
            ["--cuda-graph-max-bs-prefill says nothing with --cuda-graph-backend-prefill disabled"],
        ),
        (
            "--cuda-graph-bs-prefill 64 --disable-cuda-graph",
            ["--cuda-graph-bs-prefill says nothing with --disable-cuda-graph"],
        ),
        (
            "--cuda-graph-backend-prefill breakable --disable-cuda-graph",
            ["--cuda-graph-backend-prefill breakable says nothing with --disable-cuda-graph"],
        ),
        ("--cuda-graph-backend-prefill tc_piecewise", ["tc_piecewise", "not supported", "breakable, disabled"]),
        ("--disable-prefill-cuda-graph", ["use --cuda-graph-backend-prefill disabled"]),
        ("--piecewise-cuda-graph-max-tokens 4", ["use --cuda-graph-max-bs-prefill"]),
        ("--cuda-graph-bs-decode 4", ["--cuda-graph-bs-decode", "use --cuda-graph-bs"]),
    ],
)
def test_graphs_that_make_no_sense(text, words):
    message = refusal(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--cuda-graph-backend-prefill breakable", "--cuda-graph-backend-prefill"),
        ("--cuda-graph-bs-prefill 64", "--cuda-graph-bs-prefill"),
        ("--cuda-graph-max-bs-prefill 64", "--cuda-graph-max-bs-prefill"),
    ],
)
def test_graphs_of_prompts_on_a_cpu(text, flag):
    with pytest.raises(ArgumentError, match=f"^{flag} says nothing on a CPU"):
        check_device(parse(text), "cpu")
    check_device(parse(text), "cuda")
    check_device(parse("--cuda-graph-backend-prefill disabled"), "cpu")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp 3 --nnodes 2 --dist-init-addr h:1", "--tp-size 3 must be a multiple of --nnodes 2"),
        ("--nnodes 2 --dist-init-addr h:1", "--tp-size 1 must be a multiple of --nnodes 2"),
        ("--tp 2 --nnodes 2 --node-rank 2 --dist-init-addr h:1", "--node-rank 2 must be less than --nnodes 2"),
        ("--node-rank 1", "--node-rank 1 must be less than --nnodes 1"),
        ("--tp 2 --nnodes 2", "--nnodes 2 needs --dist-init-addr host:port"),
        ("--dist-init-addr h:1", "--dist-init-addr says nothing without --nnodes"),
        ("--tp 2 --nnodes 2 --dist-init-addr h", "--dist-init-addr h: must be host:port"),
        ("--tp 2 --nnodes 2 --nccl-init-addr fd00::1:5000", "--dist-init-addr fd00::1:5000: must be host:port"),
        ("--tp 2 --nnodes 2 --dist-init-addr h:70000", "must be host:port"),
    ],
)
def test_nodes_that_make_no_sense(line, message):
    assert message in refusal(f"--device cpu {line}")


def test_ranks_of_a_node():
    args = parse("--device cpu --tp 8 --nnodes 2 --node-rank 1 --dist-init-addr [fd00::1]:5000")
    assert args.ranks_per_node == 4 and parse("").ranks_per_node == 1


def test_a_node_needs_a_gpu_for_each_of_its_ranks(monkeypatch):
    from sglang.srt import platforms

    monkeypatch.setattr(platforms, "gpu_count", lambda: 2)
    monkeypatch.setattr(platforms, "resolve_device", lambda *_: SimpleNamespace(type="cuda"))
    parse("--device cuda --tp 4 --nnodes 2 --dist-init-addr h:1")
    nodes = refusal("--device cuda --tp 8 --nnodes 2 --dist-init-addr h:1")
    assert "--tp-size 8: this machine has 2 GPU(s) for 4 ranks; use at most" in nodes
    assert "--tp-size 4: this machine has 2 GPU(s); use at most" in refusal("--device cuda --tp 4")
