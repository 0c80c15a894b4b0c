"""Schedulers with and without overlap."""

import fake_model
import pytest
from slow_device import SlowDevice


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SlowDevice | None:
    """Runs a test twice: with a scheduler that reads the tokens of a step before the next one, and with one that
    launches the next one first, on a device that has to be waited for, which is returned."""
    if not request.param:
        return None
    monkeypatch.setattr(fake_model, "OVERLAP", True)
    device = SlowDevice()
    device.attach(monkeypatch)
    return device
