"""Recordings of several ranks: properties on any machine."""

import pytest

from anybatch_guide.experiments import layer_order
from anybatch_guide.recording import plain
from guide.tests.recorded_again import differences, recording


@pytest.mark.slow
def test_both_orders_are_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new step matches the recorded communication and memory, and the full batch's gradient."""
    monkeypatch.setattr(layer_order, "MICRO_BATCHES", (2,))
    made = layer_order.run(lambda _: None)["steps"]
    recorded = [step for step in recording("layer_order")["data"]["steps"] if step["num_micro_batches"] == 2]

    assert differences({"steps": recorded}, plain({"steps": made}), noisy=("gradient_error",)) == []
    assert max(step["gradient_error"] for step in made) < 1e-12
