"""Fixtures of tests that run a kernel on a GPU, and compiled for the CPU."""

from collections.abc import Iterator

import pytest
from host_cuda import ON_GPU, ON_HOST, HostKernels

from sglang.kernels import layers


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("host_cuda"))


@pytest.fixture(params=[ON_HOST, ON_GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """On the CPU, what ``layers`` launches runs there."""
    if request.param == "cpu":
        monkeypatch.setattr(layers, "launch", request.getfixturevalue("host_kernels").launch)
    yield request.param
