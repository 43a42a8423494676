"""Ranks of several processes: tensor parallelism along one mesh dimension, data parallelism along the other."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab
from anybatch.errors import (
    AnyBatchError,
    CompositionError,
    DataError,
    ParameterError,
    RankFailedError,
    ReplicaError,
    WorldError,
)
from anybatch.parallel.dtensors import gather
from anybatch.parallel.fsdp import FSDP
from anybatch.testing import RankOutcome, RankPool, relative_error, run_ranks
from tests.architecture.source_tree import ROOT
from tests.engine.cases import InMemory
from tests.faults import sees
from tests.parallel.mesh_models import (
    FORMS,
    LOSS,
    Batch,
    Tower,
    adamw,
    batches,
    by_tensors,
    grid,
    loss_of,
    plain_run,
    tower,
    whole,
)

pytestmark = pytest.mark.slow
TOLERANCE = 1e-12
NUM_STEPS = 6
CLIP = 0.3
NOT_TO_BE_CHANGED_IN_PLACE = "FSDP2-wrapped module .* returned a view tensor"
RUNS = (
    *(("tensors", "auto", NUM_STEPS), ("sequence", "zero1", 3), ("sequence", "auto", 3)),
    *(("both", "auto", 3), ("sequence", "fsdp", 3)),
)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Four processes: two ranks of two. Their cached meshes must not outlive this module."""
    with RankPool(4) as pool:
        yield pool


def engine_over(model: nn.Module, world: ab.World | None, strategy: Any = "auto", **options: Any) -> ab.Engine:
    """Return an engine with ragged micro-batches of at most 2; the optimizer is an instance where possible."""
    warnings.filterwarnings("ignore", message=NOT_TO_BE_CHANGED_IN_PLACE)
    makes_new = strategy == "fsdp" and not any(hasattr(one, "unshard") for one in model.modules())
    optimizer: Any = adamw if makes_new else adamw(model.parameters())
    given = {"micro_batch_size": 2, "strategy": strategy, "world": world, "clip": CLIP, **options}
    return ab.Engine(model, given.pop("optimizer", optimizer), LOSS, **given)


def trained(runs: Sequence[tuple[str, str, int]]) -> list[tuple[float, float, float]]:
    """Run on every process: return the errors of gradients, of norms and losses, and of parameters."""
    mesh, plain, found = grid(), {num: plain_run(num, CLIP) for num in {num for *_, num in runs}}, []
    with ab.World.of_mesh(mesh["dp"]) as world:
        assert (world.size, world.num_processes) == (2, 4)
        for form, strategy, num_steps in runs:
            expected, numbers, first = plain[num_steps]
            model = FORMS[form](tower(), mesh)
            with engine_over(model, world, strategy) as engine:
                gradients = engine.gradients(InMemory(batches(1)[0]))
                wrong = relative_error({name: gather(one) for name, one in gradients.items() if one is not None}, first)
                reports = [engine.step(InMemory(batch)) for batch in batches(num_steps)]
            told = [(report.grad_norm or 0.0, report.loss) for report in reports]
            of_numbers = max(
                abs(own / plain_one - 1)
                for one, other in zip(told, numbers, strict=True)
                for own, plain_one in zip(one, other, strict=True)
            )
            found.append((wrong, of_numbers, relative_error(whole(model), expected)))
    return found


@sees(
    "gradients are summed over the ranks that run one model",
    "src/anybatch/parallel/all_reduce.py",
    "work = dist.all_reduce(flat, group=self._world.group, async_op=True)",
    "work = dist.all_reduce(flat, async_op=True)",
)
@sees(
    "norms of replicated gradients count on each process",
    "src/anybatch/parallel/dtensors.py",
    "if not one.is_replicate())",
    "if one)",
)
def test_tensor_parallel_training_is_that_of_one_device(four_ranks: RankPool) -> None:
    """2 x 2 processes match one device's gradients, norms, losses and parameters over clipped AdamW steps.

    Covers ragged shares, accumulation, masked labels, sequence parallelism, each strategy, and a model that its user
    has also sharded.
    """
    for errors in four_ranks.run(trained, RUNS):
        assert len(errors) == len(RUNS)
        for run, found in zip(RUNS, errors, strict=True):
            assert max(found) <= TOLERANCE, run


def saved_and_loaded(folder: str, num_steps: int) -> list[float]:
    """Run on every process: save under two strategies, and resume a single-device checkpoint; return the errors."""
    mesh, (expected, *_) = grid(), plain_run(2 * num_steps, CLIP)
    errors = []
    with ab.World.of_mesh(mesh["dp"]) as world:
        for form, strategy in (("tensors", "zero1"), ("both", "auto")):
            with engine_over(FORMS[form](tower(), mesh), world, strategy, average_decay=0.9) as engine:
                for batch in batches(num_steps):
                    engine.step(InMemory(batch))
                engine.save(Path(folder, form))
        for form, strategy in (("sequence", "auto"), ("both", "auto"), ("sequence", "zero1")):
            model = FORMS[form](tower(), mesh)
            with engine_over(model, world, strategy, average_decay=0.9) as engine:
                engine.load(Path(folder, "one"))
                for batch in batches(2 * num_steps)[num_steps:]:
                    engine.step(InMemory(batch))
                averaged = engine.average
                assert averaged is not None
                own = {name: gather(weight) for name, weight in averaged.weights.items()}
            errors += [relative_error(whole(model), expected), relative_error(own, _averages(2 * num_steps))]
    return errors


def _averages(num_steps: int) -> dict[str, torch.Tensor]:
    with one_device() as engine:
        for batch in batches(num_steps):
            engine.step(InMemory(batch))
        assert engine.average is not None
        return {name: weight.clone() for name, weight in engine.average.weights.items()}


def one_device() -> ab.Engine:
    """Return an engine for the plain model on one device."""
    return engine_over(tower(), ab.World(), average_decay=0.9)


def test_a_checkpoint_moves_between_a_mesh_and_one_device(four_ranks: RankPool, tmp_path: Path) -> None:
    """Checkpoints move between 2 x 2 processes and one device, with optimizer state and averages."""
    num_steps = 2
    with one_device() as engine:
        for batch in batches(num_steps):
            engine.step(InMemory(batch))
        engine.save(tmp_path / "one")
    for errors in four_ranks.run(saved_and_loaded, str(tmp_path), num_steps):
        assert max(errors) <= TOLERANCE
    expected, *_ = plain_run(2 * num_steps, CLIP)
    for form in ("tensors", "both"):
        with one_device() as engine:
            engine.load(tmp_path / form)
            for batch in batches(2 * num_steps)[num_steps:]:
                engine.step(InMemory(batch))
            assert relative_error(whole(engine.model), expected) <= TOLERANCE  # type: ignore[arg-type]
            assert engine.average is not None
            assert relative_error(engine.average.weights, _averages(2 * num_steps)) <= TOLERANCE


def refusals() -> dict[str, str]:
    """Run on every process: check the classes of errors of unsupported settings; return the errors."""
    mesh, said = grid(), {}

    def note(name: str, error: type[AnyBatchError], act: Any) -> None:
        with pytest.raises(error) as caught:
            act()
        said[name] = str(caught.value)

    def cut() -> Tower:
        return by_tensors(tower(), mesh)

    note("no world", ParameterError, lambda: engine_over(cut(), None))
    note("two dimensions", WorldError, lambda: ab.World.of_mesh(mesh))
    with ab.World.from_environment() as everyone:
        model = tower()
        fully_shard(model, mesh=mesh["dp"])
        note("sharded over some", ParameterError, lambda: engine_over(model, everyone))
    with ab.World.of_mesh(mesh["dp"]) as world:
        note("ddp", CompositionError, lambda: engine_over(cut(), world, "ddp"))
        note("fp16", CompositionError, lambda: engine_over(cut(), world, precision="fp16"))
        joined = cut()
        together = torch.optim.AdamW(joined.parameters(), foreach=True)
        note("foreach", CompositionError, lambda: engine_over(joined, world, optimizer=together))
        unlike = cut()
        with torch.no_grad():
            unlike.first.weight.add_(world.process)
        note("unlike", ReplicaError, lambda: engine_over(unlike, world))
        note("replicas", WorldError, lambda: engine_over(cut(), world, FSDP(replicas=2), optimizer=adamw))
        with engine_over(cut(), world) as engine:
            mine = batches(4)[world.process]
            note("samples", AnyBatchError, lambda: engine.step(mine))
        with engine_over(cut(), world) as engine:
            shifted = batches(1)[0] | {"y": torch.full((7, 4), 1) if world.process else batches(1)[0]["y"]}
            note("counts", DataError, lambda: engine.step(InMemory(shifted)))
        drifting: Any = cut()
        with engine_over(drifting, world) as engine:
            engine.step(InMemory(batches(1)[0]))
            if world.process == 3:
                with torch.no_grad():
                    drifting.blocks[1].norm.weight.mul_(2.0)
            note("drift", ReplicaError, lambda: engine.step(InMemory(batches(2)[1])))
            with torch.no_grad():
                (drifting.blocks[1].norm.weight if world.process == 3 else torch.zeros(1)).mul_(0.5)
                if world.process == 3:
                    part: Any = drifting.blocks[1].up.weight
                    part.to_local().mul_(2.0)
            note("parts drift", ReplicaError, lambda: engine.save("nowhere"))
    return said


@sees(
    "ranks of one model are dealt different samples",
    "src/anybatch/parallel/replicas.py",
    "        if len(shared) > 1:",
    "        if len(shared) > 8:",
)
def test_what_would_be_wrong_on_a_mesh_is_refused(four_ranks: RankPool) -> None:
    """Settings that would train wrongly, or fail in the middle of a step, are refused with the fix."""
    for said in four_ranks.run(refusals):
        assert "world=ab.World.of_mesh(mesh['dp'])" in said["no world"]
        assert "'blocks.1.norm.weight'" in said["drift"]
        assert "'blocks.1.up.weight'" in said["parts drift"]


def sharded_by_its_user(num_steps: int) -> dict[str, float]:
    """Run on every process: train models that the user has sharded, over all processes and with replicas."""
    (expected, *_), errors = plain_run(num_steps, CLIP), {}
    over_all = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with ab.World.from_environment() as world:
        for name, mesh, strategy in (
            ("all", over_all, "auto"),
            ("replicas", hybrid, "auto"),
            ("replicas, reduced in each", hybrid, FSDP(reduction="every_micro_batch")),
            ("replicas, reduced last", hybrid, FSDP(replicas=2, reduction="replicas_last")),
        ):
            model: Any = tower()
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            # As after a user's loop with accumulation and gradient means.
            model.set_gradient_divide_factor(4.0)
            model.set_requires_gradient_sync(False)
            model.set_requires_all_reduce(False)
            with engine_over(model, world, strategy) as engine:
                for batch in batches(num_steps):
                    engine.step(InMemory(batch))
            errors[name] = relative_error(whole(model), expected)
    return errors


@sees(
    "a model that its user has sharded goes on taking means",
    "src/anybatch/parallel/fsdp.py",
    "            module.set_gradient_divide_factor(1.0)",
    "            assert self._parameters is not None",
)
def test_a_model_sharded_by_its_user_is_made_to_sum(four_ranks: RankPool) -> None:
    """A model that the user has sharded with `fully_shard` trains like one device, despite its FSDP2 settings.

    Covers full sharding and replicas, for every time of reduction.
    """
    for errors in four_ranks.run(sharded_by_its_user, 2):
        assert len(errors) == 4
        assert max(errors.values()) <= TOLERANCE, errors


def drawn() -> float:
    """Run on every process: return the difference between dropout on a mesh and on one device."""
    mesh, found = grid(), []
    with ab.World.of_mesh(mesh["dp"]) as world:
        for own, model in ((world, by_tensors(tower(0.5), mesh)), (ab.World(), tower(0.5))):
            with engine_over(model, own, deal="fixed") as engine:
                for batch in batches(2):
                    engine.step(InMemory(batch))
            found.append(whole(model))
    return relative_error(*found)


def test_processes_of_a_rank_draw_the_same_random_numbers(four_ranks: RankPool) -> None:
    """Dropout draws the same numbers in all processes of a rank as on one device."""
    assert max(four_ranks.run(drawn)) <= TOLERANCE


class Trouble:
    """A loss that raises an error on some processes, for micro-batches with more than one sample."""

    def __init__(self, error: type[BaseException], process: int, *, on: Sequence[int]) -> None:
        self.error: type[BaseException] | None = error if process in on else None

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the loss, or raise between forward and backward."""
        value = loss_of(model, batch)
        if self.error is not None and len(batch["x"]) > 1:
            raise self.error
        return value


def recoveries() -> tuple[str, float, int]:
    """Run on every process: two processes of one rank fail, then run out of memory, together.

    Returns:
        The errors raised, the error of the parameters after the steps, and the number of sizes that did not fit.
    """
    mesh, (expected, *_) = grid(), plain_run(2, CLIP)
    with ab.World.of_mesh(mesh["dp"]) as world:
        model, trouble = by_tensors(tower(), mesh), Trouble(ValueError, world.process, on=())
        loss = ab.mean_over_tokens(trouble, labels="y", shift=False)
        with ab.Engine(model, adamw(model.parameters()), loss, micro_batch_size=2, clip=CLIP, world=world) as engine:
            first, second = batches(2)
            engine.step(InMemory(first))
            trouble.error = ValueError if world.rank == 1 else None
            with pytest.raises((ValueError, RankFailedError)) as caught:
                engine.step(InMemory(second))
            trouble.error = torch.OutOfMemoryError if world.rank == 1 else None
            report = engine.step(InMemory(second))
        return caught.typename, relative_error(whole(model), expected), len(report.too_large)


def test_a_rank_of_several_processes_leaves_a_step_together(four_ranks: RankPool) -> None:
    """If all processes of a rank fail, or run out of memory, all ranks leave the step and continue together."""
    outcomes = four_ranks.run(recoveries)
    assert [name for name, *_ in outcomes] == ["RankFailedError"] * 2 + ["ValueError"] * 2
    for _, error, num_too_large in outcomes:
        assert error <= TOLERANCE
        assert num_too_large == 1


def left_alone(error: type[BaseException], num_ranks: int) -> str:
    """Run on every process: only the last one fails, while its rank's other process enters the backward."""
    mesh = grid(num_ranks)
    with ab.World.of_mesh(mesh["dp"]) as world:
        model, trouble = by_tensors(tower(), mesh), Trouble(error, world.process, on=())
        loss = ab.mean_over_tokens(trouble, labels="y", shift=False)
        engine = ab.Engine(model, adamw(model.parameters()), loss, micro_batch_size=2, world=world)
        first, second = batches(2)
        engine.step(InMemory(first))
        fails = world.process == world.num_processes - 1
        trouble.error = error if fails else None
        try:
            engine.step(InMemory(second))
        except (AnyBatchError, ValueError):
            if fails:
                with pytest.raises(WorldError):
                    engine.step(InMemory(second))
            raise
    return "nothing was raised"


@pytest.mark.parametrize(
    ("error", "own", "num_ranks"), [(ValueError, "ValueError", 2), (torch.OutOfMemoryError, "CannotRedoError", 1)]
)
def test_no_process_waits_for_one_that_left_alone(error: type[BaseException], own: str, num_ranks: int) -> None:
    """If one process of a rank fails alone, or runs out of memory, all processes end with errors that name it."""
    outcomes: list[RankOutcome] = run_ranks(2 * num_ranks, left_alone, error, num_ranks, timeout_seconds=600.0)
    *others, last = [str(outcome.error) for outcome in outcomes]
    assert own in last
    for said in others:
        assert f"RankFailedError: rank {len(others)} failed in step 1" in said


def shown_program() -> str:
    """Run on every process: run the program in the documentation; return its output."""
    page = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    program = page.split("## Tensor parallelism", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    with redirect_stdout(StringIO()) as printed:
        exec(compile(program, "docs/ranks.md", "exec"), {"__name__": "shown"})  # noqa: S102 (our own page)
    return printed.getvalue()


def test_the_program_of_the_page_runs(four_ranks: RankPool) -> None:
    """The tensor-parallel program in docs/ranks.md trains, and only one process prints."""
    first, *others = four_ranks.run(shown_program)
    assert first.startswith("2 ranks of 2 processes, loss 1.")
    assert not any(others)
