"""A run that is saved and resumed equals an uninterrupted one."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.checkpoints import list_checkpoints
from anybatch.errors import CheckpointError, RankFailedError
from tests.engine.cases import Batch
from tests.faults import sees
from tests.ranks_fixture import Ranks

NUM_SAMPLES, SIZE, EPOCHS, STOP = 55, 20, 3, 4
Weights = dict[str, torch.Tensor]
Kind = Literal["plain", "batch_norm", "averaged", "master_weights", "fp16"]


def data(dtype: torch.dtype) -> list[Batch]:
    """Return samples in memory."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
    return [{"x": x[i], "y": y[i]} for i in range(NUM_SAMPLES)]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, computed in the model's precision."""
    return functional.cross_entropy(model(batch["x"]).float(), batch["y"])


def build(kind: Kind) -> tuple[nn.Module, ab.Engine, torch.dtype]:
    """Return a model with dropout, its engine, and the dtype of its data."""
    torch.manual_seed(6)
    norm = nn.BatchNorm1d(12) if kind == "batch_norm" else nn.LayerNorm(12)  # BatchNorm has buffers that change
    model = nn.Sequential(nn.Linear(6, 12), norm, nn.Dropout(0.3), nn.Tanh(), nn.Linear(12, 4))
    dtype = torch.bfloat16 if kind == "master_weights" else torch.float32
    model.to(dtype)
    every: dict[str, dict[str, Any]] = {"averaged": {"average_decay": 0.8}, "fp16": {"precision": "fp16"}}
    engine = ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=0.05),
        ab.mean_over_samples(loss),
        micro_batch_size=6,
        deal="fixed",
        clip=1.0,
        norms="keep",
        scheduler=lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, 9),
        **every.get(kind, {}),
    )
    return model, engine, dtype


def go_on(engine: ab.Engine, dtype: torch.dtype, num_steps: int | None = None) -> list[tuple[int, ...]]:
    """Train from the engine's position to the end, or for some steps; return the sample ids of each step."""
    ids = []
    batches = iter(ab.batches(data(dtype), effective_batch_size=SIZE, epochs=EPOCHS, seed=9, start=engine.position))
    for batch in batches:
        engine.step(batch)
        ids.append(tuple(int(sample) for sample in batch.sample_ids))
        if len(ids) == num_steps:
            break
    batches.close()
    return ids


def final(model: nn.Module, engine: ab.Engine) -> Weights:
    """Return the final state: weights, buffers, averages, loss scale, and the next learning rate."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if engine.average is not None:
        weights |= {f"average {name}": value.clone() for name, value in engine.average.weights.items()}
    scaler = engine._parts.updater.scaler  # noqa: SLF001 (no report contains it)
    if scaler.enabled:
        weights |= {f"scale {name}": torch.tensor(value) for name, value in scaler.scaler.state_dict().items()}
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    return weights | {"next learning rate": torch.tensor(rates), "steps": torch.tensor(engine.num_steps)}


def uninterrupted(kind: Kind) -> tuple[Weights, list[tuple[int, ...]]]:
    """Run on every rank: return the final state of an uninterrupted run, and its samples."""
    model, engine, dtype = build(kind)
    with engine:
        ids = go_on(engine, dtype)
        return final(model, engine), ids


def stop_early(kind: Kind, folder: Path) -> list[tuple[int, ...]]:
    """Run on every rank: make some steps, save, and stop."""
    _, engine, dtype = build(kind)
    with engine:
        ids = go_on(engine, dtype, STOP)
        engine.save(folder)
        return ids


def resume(kind: Kind, folder: Path) -> tuple[Weights, list[tuple[int, ...]]]:
    """Run on every rank: load, and continue to the end."""
    model, engine, dtype = build(kind)
    with engine:
        engine.load(folder)
        ids = go_on(engine, dtype)
        return final(model, engine), ids


def same_bits(found: Weights, expected: Weights) -> bool:
    """Return whether all tensors are bitwise equal."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@sees(
    "the model is not restored",
    "src/anybatch/engine/checkpoint_state.py",
    """
    parts.modules.load_state_dict({**model_state, **model})
""",
    "",
    cases=["plain", "batch_norm"],
)
@sees(
    "the optimizer is not restored",
    "src/anybatch/engine/checkpoint_state.py",
    """
    parts.target.load_optimizer(optimizer)
""",
    "",
    cases=["plain"],
)
@sees(
    "the scheduler is not restored",
    "src/anybatch/engine/checkpoint_state.py",
    """
        parts.scheduler.load_state_dict(dict(small["scheduler"]))
""",
    """
        pass
""",
    cases=["plain"],
)
@sees(
    "master weights are not restored",
    "src/anybatch/engine/checkpoint_state.py",
    """
            weight.copy_(saved_weight)
""",
    """
            pass
""",
    cases=["master_weights"],
)
@sees(
    "the average is not restored",
    "src/anybatch/engine/checkpoint_state.py",
    "parts.average.load(averages)",
    "dict(averages)",
    cases=["averaged"],
)
@sees(
    "the loss scaler is not restored",
    "src/anybatch/engine/checkpoint_state.py",
    """
        parts.scaler.scaler.load_state_dict(dict(small["scaler"]))
""",
    """
        pass
""",
    cases=["fp16"],
)
@pytest.mark.parametrize("kind", ["plain", "batch_norm", "averaged", "master_weights", "fp16"])
def test_resumed_run_is_bitwise_equal(kind: Kind, tmp_path: Path) -> None:
    """On one rank, weights, buffers, averages, schedule and samples of a resumed run are bitwise the same."""
    expected, ids = uninterrupted(kind)

    before = stop_early(kind, tmp_path)
    found, after = resume(kind, tmp_path)

    assert before + after == ids
    assert same_bits(found, expected)


@sees(
    "the seed is not restored",
    "src/anybatch/engine/parts.py",
    """
        self.planner.seed = state["seed"]
""",
    "",
)
def test_the_seed_of_the_run_is_part_of_its_state(tmp_path: Path) -> None:
    """An engine saves its seed; an engine without one resumes with the same random numbers."""

    def run(seed: int | None, *, stop: bool = False, resumed: bool = False) -> Weights:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=6, seed=seed) as engine:
            if resumed:
                engine.load(tmp_path)
            go_on(engine, torch.float32, STOP if stop else None)
            if stop:
                engine.save(tmp_path)
            return final(model, engine)

    expected = run(17)
    run(17, stop=True)

    assert same_bits(run(None, resumed=True), expected)
    assert not same_bits(run(None), expected)


def test_two_ranks_resume_on_any_number_of_ranks(
    one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    """A checkpoint of two ranks resumes bitwise on two, and up to rounding on one and three, with the same samples."""
    expected, ids = two_ranks.run(uninterrupted, "plain")[0]
    before = two_ranks.run(stop_early, "plain", tmp_path)[0]

    for ranks in (two_ranks, one_rank, three_ranks):
        for found, after in ranks.run(resume, "plain", tmp_path):
            assert before + after == ids
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
            if ranks is two_ranks:
                assert same_bits(found, expected)


def test_failed_save_is_an_error_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    """If rank 0 cannot write, it raises its own error, and the other rank raises one that quotes it."""
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("x")

    outcomes = two_ranks.run(error_of_save, blocked)

    assert outcomes[0][0] != "RankFailedError"
    assert outcomes[1][0] == "RankFailedError"
    assert outcomes[0][1].splitlines()[0] in outcomes[1][1]


def error_of_save(folder: Path) -> tuple[str, str]:
    """Run on every rank: return the error of a save that must fail."""
    try:
        with build("plain")[1] as engine:
            engine.save(folder)
    except (CheckpointError, OSError, RankFailedError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


@sees(
    "another model's checkpoint is half loaded",
    "src/anybatch/engine/checkpoint_state.py",
    """
    _check_model(parts.modules, state["model"])
""",
    "",
)
def test_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    """A checkpoint of another model is refused with names and shapes, and the engine stays unchanged."""
    stop_early("plain", tmp_path)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with (
        ab.Engine(model, optimizer, ab.mean_over_samples(loss)) as engine,
        pytest.raises(CheckpointError, match=r"different model.*0\.weight: \(12, 6\) saved, \(13, 6\) here") as caught,
    ):
        engine.load(tmp_path)

    assert caught.value.path == list_checkpoints(tmp_path)[-1]
    assert same_bits(dict(model.state_dict()), before)


def test_damaged_newest_falls_back_with_a_warning(tmp_path: Path) -> None:
    """If the newest checkpoint is damaged, the previous one is loaded, with a warning that names the damaged one."""
    _, engine, dtype = build("plain")
    with engine:
        go_on(engine, dtype, 2)
        engine.save(tmp_path)
        go_on(engine, dtype, 1)
        newest = engine.save(tmp_path)
    state = newest / "state.json"
    state.write_bytes(state.read_bytes()[:-7])

    _, engine, dtype = build("plain")
    with engine:
        with pytest.warns(UserWarning, match=newest.name):
            engine.load(tmp_path)

        assert engine.num_steps == 2


def test_another_effective_batch_size_warns(tmp_path: Path) -> None:
    """Resuming with another effective batch size works, warns, and is recorded as a decision."""
    stop_early("plain", tmp_path)
    torch.manual_seed(6)
    _, engine, _ = build("plain")
    engine.close()
    other = ab.Engine(
        engine.model,
        lambda named: torch.optim.AdamW(named, lr=0.05),
        ab.mean_over_samples(loss),
        effective_batch_size=10,
        scheduler=lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, 9),
    )

    with other:
        with pytest.warns(UserWarning, match="effective_batch_size None -> 10"):
            other.load(tmp_path)

        assert "effective_batch_size None -> 10" in other.decisions["resumed with changes"]


def test_checkpoint_of_another_precision_is_refused(tmp_path: Path) -> None:
    """A run with averaged weights refuses a checkpoint without, instead of silently restarting its averages."""
    stop_early("plain", tmp_path)
    _, engine, _ = build("averaged")

    with engine, pytest.raises(CheckpointError, match="this engine has a weight average, but") as caught:
        engine.load(tmp_path)
    assert caught.value.path == list_checkpoints(tmp_path)[-1]
