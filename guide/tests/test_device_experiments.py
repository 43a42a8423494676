"""Recordings of several ranks: properties on any machine."""

from typing import Any

import pytest

from anybatch_guide.experiments import layer_order
from anybatch_guide.recording import differences, plain, read_recording
from guide.tests.recorded_again import RECORDINGS


def data_of(name: str) -> Any:
    """Return the data of a recording."""
    return read_recording(RECORDINGS / f"{name}.json").data


@pytest.mark.slow
def test_both_orders_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new step matches the recorded communication and memory, and the full batch's gradient."""
    monkeypatch.setattr(layer_order, "MICRO_BATCHES", (2,))
    made = layer_order.run(lambda _: None)["steps"]
    recorded = [step for step in data_of("layer_order")["steps"] if step["num_micro_batches"] == 2]

    assert differences({"steps": recorded}, plain({"steps": made}), noisy=("gradient_error",)) == []
    assert max(step["gradient_error"] for step in made) < 1e-12
