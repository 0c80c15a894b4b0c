from pathlib import Path

import psutil
import pytest
import torch

from sglang.srt import platforms
from sglang.srt.errors import ArgumentError
from sglang.srt.platforms import available_memory, resolve_device, total_memory

CPU = torch.device("cpu")


def test_automatic_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device() == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device() == torch.device("cuda", 0)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device(None, rank=1) == resolve_device("cuda", rank=1) == torch.device("cuda", 1)
    assert resolve_device("cpu") == resolve_device("cpu", rank=1) == CPU


def test_no_such_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cuda:2", "cuda:x", "tpu", "", "cpu:1x"):
        with pytest.raises(ArgumentError, match=f"--device {name}"):
            resolve_device(name)


def test_no_gpu_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ArgumentError, match="built without CUDA"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ArgumentError, match="no usable GPU"):
        resolve_device("cuda")


def test_cpu_memory_is_sane():
    assert 0 < available_memory(CPU) <= total_memory(CPU) <= psutil.virtual_memory().total
    assert platforms.device_capability(CPU) is None


def test_cpu_has_its_model_name(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert platforms.device_name(CPU) == "Some CPU @ 3 GHz"
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert platforms.device_name(CPU) == "riscv64"


def test_cgroup_limit_bounds_the_memory(monkeypatch):
    # The limit counts what is free inside each group; an exceeded one leaves nothing, not a negative number.
    monkeypatch.setattr(platforms, "_cgroup_memory", lambda: [(1000, 400), (2000, 100)])
    assert available_memory(CPU) == 600
    assert total_memory(CPU) == 1000
    monkeypatch.setattr(platforms, "_cgroup_memory", lambda: [(1000, 1400)])
    assert available_memory(CPU) == 0


def write_group(folder, names, limit, used, stat):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{stat}\n")


def test_cgroup_version_2(tmp_path):
    names = ("memory.max", "memory.current")
    root = tmp_path / "cgroup"
    write_group(root / "a" / "b", names, "max", 50, "inactive_file 1")
    write_group(root / "a", names, 1000, 600, "inactive_file 100")
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert platforms._cgroup_memory(membership, root) == [(1000, 500)]


def test_cgroup_version_1(tmp_path):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    root = tmp_path / "cgroup"
    write_group(root / "memory", names, 9000, 700, "total_inactive_file 200")
    membership = tmp_path / "membership"
    # The path is the host's: inside a container the group's files lie at the mount's root.
    membership.write_text("5:cpu:/docker/x\n4:memory:/docker/x\n")
    assert platforms._cgroup_memory(membership, root) == [(9000, 500)]
    assert platforms._cgroup_memory(tmp_path / "missing", root) == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_cuda_memory():
    device = resolve_device("cuda")
    assert 0 < available_memory(device) < total_memory(device)
    assert platforms.device_capability(device) >= (7, 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_become_a_tensor_of_the_device(device):
    for values in ([3, 4], torch.tensor([3.0, 4.0])):
        tensor = platforms.to_device(values, torch.int64, device)
        assert (tensor.dtype, tensor.device.type, tensor.shape) == (torch.int64, device, (2,))
        assert device == "meta" or tensor.tolist() == [3, 4]


def test_on_a_cpu_there_is_nothing_to_copy_or_to_wait_for():
    values = torch.tensor([1, 2])
    assert platforms.to_host(values) is values
    platforms.record_event(CPU).synchronize()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_copies_wait_for_nobody_and_come_in_order():
    device = resolve_device("cuda")
    work = torch.ones(4096, 4096, device=device)
    platforms.to_host(platforms.to_device([1], torch.int64, device))  # the allocators' first time
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            work = (work @ work).clamp_(max=1.0)
        host = platforms.to_host(platforms.to_device([5, 6], torch.int64, device) + work[0, :2].long())
        done = platforms.record_event(device)
        assert not done.query(), "the host has waited for 200 large products"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done.synchronize()
    assert host.tolist() == [6, 7] and host.is_pinned()
