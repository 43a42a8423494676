"""Recordings of several ranks: properties on any machine."""

from collections import Counter
from typing import Any

import pytest

from anybatch_guide.experiments import ddp_timeline, layer_order, rank_memory
from anybatch_guide.recording import differences, plain, read_recording
from guide.tests.recorded_again import RECORDINGS

LATE = ("no_sync until the last micro-batch", "all_reduce of anybatch")
"""Ways that reduce only in the last micro-batch."""


def data_of(name: str) -> Any:
    """Return the data of a recording."""
    return read_recording(RECORDINGS / f"{name}.json").data


@pytest.mark.parametrize("world", [0, 1], ids=["2-ranks", "4-ranks"])
def test_buckets_are_the_gradient_once_or_in_every_micro_batch(world: int) -> None:
    """With no_sync, only the last micro-batch sends buckets, else every one; each bucket is sent, then done."""
    found = data_of("ddp_timeline")["worlds"][world]
    gradient = sum(p.numel() * p.itemsize for p in ddp_timeline.network().parameters())
    last = {ddp_timeline.NUM_MICRO_BATCHES - 1}
    for name, ranks in found["ways"].items():
        assert len(ranks) == found["num_ranks"]
        for rank in ranks:
            sent: Counter[int] = Counter()
            for bucket in rank["buckets"]:
                sent[bucket["micro_batch"]] += bucket["bytes"]
                assert 0 < bucket["sent"] <= bucket["done"] <= rank["seconds"]
            everywhere = set(range(ddp_timeline.NUM_MICRO_BATCHES))
            assert set(sent) == (last if name in LATE else everywhere)
            assert set(sent.values()) == {gradient}


def test_the_last_layers_are_ready_first() -> None:
    """Gradients complete from the last layer to the first, and a bucket is sent before all are complete."""
    for world in data_of("ddp_timeline")["worlds"]:
        for ranks in world["ways"].values():
            for rank in ranks:
                ready = [layer["ready"] for layer in rank["layers"]]
                assert [layer["layer"] for layer in rank["layers"]] == list(range(ddp_timeline.NUM_LAYERS))[::-1]
                assert ready == sorted(ready)
                final = [one for one in rank["buckets"] if one["micro_batch"] == ddp_timeline.NUM_MICRO_BATCHES - 1]
                assert min(one["sent"] for one in final) < ready[-1]


def test_shards_and_states_add_up() -> None:
    """With FSDP, the parts of all ranks form the parameters; with ZeRO-1, the states of all ranks equal one device."""
    data = data_of("rank_memory")
    whole = {one["name"]: one["shape"][0] for one in data["parameters"]}
    (alone,) = next(way for way in data["ways"] if way["strategy"] == "single")["ranks"]
    for way in data["ways"]:
        between = [rank["between"] for rank in way["ranks"]]
        if way["strategy"] == "fsdp":
            for name, rows in whole.items():
                parts = [part for rank in way["ranks"] for part in rank["parts"] if part["name"] == name]
                assert sum(part["shape"][0] for part in parts) == rows
                assert all(part["is_shard"] for part in parts)
            assert sum(one["weights"] for one in between) == alone["between"]["weights"]
        elif way["strategy"] == "zero1":
            states = sum(one["optimizer"] for one in between)
            assert states == pytest.approx(alone["between"]["optimizer"], rel=1e-3)  # plus a counter for each tensor
        elif way["strategy"] == "ddp":
            assert all(one["weights"] == alone["between"]["weights"] for one in between)


def test_a_block_is_gathered_before_it_is_used() -> None:
    """FSDP2 gathers each block in every forward and again in every backward, and reduces in the last micro-batch."""
    for way in data_of("rank_memory")["ways"]:
        if way["strategy"] != "fsdp":
            continue
        for rank in way["ranks"]:
            calls = Counter(call.split(" ")[0] for call in rank["calls"])
            micro_batches = rank_memory.BATCH // way["num_ranks"] // rank_memory.MICRO_BATCH
            assert calls["pre_forward"] == calls["pre_backward"] == micro_batches * rank_memory.NUM_BLOCKS
            # FSDP2 gathers the last block once more in the last backward, as if it were not the last micro-batch.
            assert calls["all_gather"] - 2 * calls["pre_forward"] in (0, 1)
            assert calls["post_backward_reduce"] == rank_memory.NUM_BLOCKS
            for block in range(rank_memory.NUM_BLOCKS):
                own = [call.split(" ")[0] for call in rank["calls"] if call.endswith(f"({block})")]
                assert own.index("all_gather") < own.index("pre_backward")


def test_the_ways_have_one_gradient() -> None:
    """Every way with the effective batch has the gradient of the unsplit batch, and sends it at most once."""
    data = data_of("ways_compared")
    assert not data["unmeasured"]
    for one in data["results"]:
        if one["way"]["num_samples"] == data["effective_batch_size"]:
            assert one["gradient_error"] < 1e-5


@pytest.mark.parametrize("order", ["micro_batches", "layers"])
@pytest.mark.parametrize("num_micro_batches", layer_order.MICRO_BATCHES)
def test_blocks_are_visited_once_in_each_direction(order: layer_order.Order, num_micro_batches: int) -> None:
    """In both orders, each block runs all micro-batches forward, and then backward."""
    visits = list(layer_order.visits(order, num_micro_batches))
    up = list(range(rank_memory.NUM_BLOCKS))
    for number in range(num_micro_batches):
        own = [(phase, block) for phase, block, one in visits if one == number]
        assert own == [*(("forward", block) for block in up), *(("backward", block) for block in up[::-1])]


def test_layer_by_layer_weights_travel_once_and_outputs_are_kept() -> None:
    """Recorded: gathers grow with micro-batches in only one order, saved bytes in the other; all gradients are correct.

    A block is not gathered twice in a row: 2 L - 1 gathers for one micro-batch, one less for each further.
    """
    data = data_of("layer_order")
    blocks = data["blocks"]
    gradient = sum(p.numel() * 8 for p in rank_memory.network().parameters())
    outputs = layer_order.SHARE * rank_memory.WIDTH * 8 * blocks
    for step in data["steps"]:
        number = step["num_micro_batches"]
        by_layer = step["order"] == "layers"
        gathers = 2 * blocks - 1 if by_layer else number * (2 * blocks - 2) + 1
        assert sum(gathered for *_, gathered in step["visits"]) == gathers
        assert step["gathered_bytes"] == gathers * gradient / blocks
        assert step["reduced_bytes"] == gradient
        assert step["kept_bytes"] == (outputs if by_layer else outputs / number)
        assert step["waiting_bytes"] == (gradient / blocks if by_layer or number == 1 else gradient)
        assert step["gradient_error"] < 1e-12


@pytest.mark.slow
def test_both_orders_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new step matches the recorded communication and memory, and the full batch's gradient."""
    monkeypatch.setattr(layer_order, "MICRO_BATCHES", (2,))
    made = layer_order.run(lambda _: None)["steps"]
    recorded = [step for step in data_of("layer_order")["steps"] if step["num_micro_batches"] == 2]

    assert differences({"steps": recorded}, plain({"steps": made}), noisy=("gradient_error",)) == []
    assert max(step["gradient_error"] for step in made) < 1e-12
