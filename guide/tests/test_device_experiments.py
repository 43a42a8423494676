"""Recordings of several ranks: properties on any machine."""

import dataclasses
import itertools
import json
from collections.abc import Iterator

import pytest

from anybatch.planner.forecast import forecast
from anybatch_guide.experiments import ddp_step, forecasts, layer_order
from anybatch_guide.recording import plain
from guide.tests.page import WEB
from guide.tests.recorded_again import differences, recording


@pytest.mark.slow
def test_both_orders_are_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new step matches the recorded communication and memory, and the full batch's gradient."""
    monkeypatch.setattr(layer_order, "MICRO_BATCHES", (2,))
    made = layer_order.run(lambda _: None)["steps"]
    recorded = [step for step in recording("layer_order")["data"]["steps"] if step["num_micro_batches"] == 2]

    assert differences({"steps": recorded}, plain({"steps": made}), noisy=("gradient_error",)) == []
    assert max(step["gradient_error"] for step in made) < 1e-12


@pytest.mark.slow
def test_the_ring_is_reproduced() -> None:
    """A new step on four ranks matches the recording; its ring sums like torch's all-reduce and like one pass."""
    made = plain(ddp_step.run(lambda _: None))

    assert differences(recording("ddp_step")["data"], made) == []
    for rank in made["ranks"]:
        assert rank["hops"][-1]["after"] == rank["all_reduce"] == made["full_batch"]
        assert sum(hop["bytes"] for hop in rank["hops"]) == 2 * 3 * made["item_bytes"] * len(made["full_batch"]) // 4
    assert made["sampler"]["same_without"] == made["sampler"]["share"] > 100 * made["sampler"]["same_with"]


def test_the_page_calculates_the_forecasts_of_the_engine() -> None:
    """The steps with which the page's own arithmetic is compared are the engine's forecasts (web/tests)."""
    golden = json.loads((WEB / "tests" / "overlap.golden.json").read_text(encoding="utf-8"))

    assert golden == plain(list(calculated_steps()))


def calculated_steps() -> Iterator[dict[str, float]]:
    """Yield forecasts of steps on hosts with one device each, without the update and the control plane."""
    for link, ranks, steps, mebibytes, variation in itertools.product(
        forecasts.LINKS, (2, 4), (1, 2), (1, 25, 50, 100), (0.0, 0.1)
    ):
        work = dataclasses.replace(
            forecasts.workload(steps=steps, effective=None), bucket_bytes=mebibytes * 2**20, variation=variation
        )
        hosts = dataclasses.replace(forecasts.cluster(link, devices_per_host=1), algorithm="ring")
        row = forecast(work, hosts, world_size=ranks).rows[-1]
        yield {
            "ranks": ranks,
            "micro_batches": steps,
            "bucket": mebibytes * 2**20,
            "gigabits": round(hosts.link.bytes_per_second * 8 / 1e9),
            "slower": row.straggler_seconds / row.compute_seconds,
            "seconds": row.compute_seconds + row.straggler_seconds + row.exposed_seconds,
        }
