import resource

import pytest

from sglang.srt.utils.open_files import WANTED, raise_open_file_limit


@pytest.mark.parametrize(
    ("now", "most", "wanted"),
    [
        (1024, 20_000, 20_000),
        (1024, resource.RLIM_INFINITY, WANTED),
        (1024, 1 << 20, WANTED),
        (WANTED, 1 << 20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_open_files(now: int, most: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    raise_open_file_limit()
    assert limits == ([] if wanted is None else [(wanted, most)])
