"""Prepares a run: builds it, and loads the newest checkpoint when resuming."""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from anybatch.checkpoints import list_checkpoints
from anybatch.core.geometry import ceil_div
from anybatch.core.records import DiagnosisRecord, Observer
from anybatch.core.run_config import RunConfig
from anybatch.core.token_budget import token_budget
from anybatch.data.batches import Batches
from anybatch.engine.engine import Engine
from anybatch.engine.micro_batch_size.search import Auto, Memory
from anybatch.errors import AnyBatchError, UserError
from anybatch.parallel.world import World
from anybatch.planner.measurements import KnownDevices
from anybatch.recipes.job import Job
from anybatch.recipes.run_folder import Origin, RunFolder, RunHeader, Stretch
from anybatch.recipes.start import LEARNED, JobRun, num_steps_of, resolve_settings, scheduler_function, start

if TYPE_CHECKING:
    from anybatch.recipes.planning.plan import Largest

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun:
    """A run that is ready to continue; `rest` is None when no steps are left, `num_steps` is None without a length."""

    run: JobRun
    rest: Batches | None
    num_steps: int | None


def prepare(
    job: Job,
    given: RunConfig,
    header: RunHeader | None,
    origin: Origin,
    *,
    place: RunFolder,
    world: World,
    known: Memory | None = None,
    devices: KnownDevices | None = None,
    observer: Observer,
) -> PreparedRun:
    """Build a run, load its newest checkpoint if there is one, and write its header.

    `header` belongs to the run to resume, None for a new run; without `known` the fastest sizes are measured again.
    """
    former = None if header is None else header.stretches[-1]
    settings = resolve_settings(job, given, None if former is None else former.settings, world_size=world.size)
    largest = _largest_that_ran(header, given)
    # Made once, so that a resumed run continues on the same data set.
    dataset = job.dataset()
    job = dataclasses.replace(job, defaults=settings, dataset=lambda: dataset)
    run = start(
        job,
        settings,
        schedule_steps=None if header is None else header.stretches[-1].schedule_steps,
        **_sizes(settings, world, largest, known, _planned_largest(job, world, devices)),
        observer=observer,
        world=world,
    )
    # Parameter groups usually share a rate, which is then printed once.
    run.engine.decisions.add("learning_rate", "; ".join(dict.fromkeys(map(str, run.rates))))
    if header is None:
        num_steps = num_steps_of(run.batches)
        header, ready = RunHeader(origin, (Stretch(0, settings, num_steps),)), PreparedRun(run, run.batches, num_steps)
    else:
        if largest is not None:
            message = (
                f"micro-batches are limited to {largest} samples, because larger ones ran out of memory in a step "
                "that could not be repeated; the result stays the same"
            )
            run.engine.decisions.add("micro_batch_size", message)
            notify(observer, run.engine, "goes_on_smaller", message)
        _load(run.engine, place, observer)
        rest = _rest(settings, dataset, job, run.engine)
        left = 0 if rest is None else num_steps_of(rest)
        ready = PreparedRun(run, rest, None if left is None else run.engine.num_steps + left)
        header = _follow_changes(job, header, settings, ready=ready, observer=observer)
    header = dataclasses.replace(header, origin={**header.origin, **origin}, largest_micro_batch_size=largest)
    on_first_rank(world, partial(place.write, header))
    return ready


def _largest_that_ran(header: RunHeader | None, given: RunConfig) -> int | None:
    """Return the micro-batch limit left by earlier sessions; a newly given size lifts it."""
    if header is None:
        return None
    former = header.stretches[-1].settings
    same = all(
        chosen in (None, before)
        for chosen, before in (
            (given.micro_batch_size, former.micro_batch_size),
            (given.accumulation_steps, former.accumulation_steps),
        )
    )
    return header.largest_micro_batch_size if same else None


def _sizes(
    settings: RunConfig, world: World, limit: int | None, known: Memory | None, planned: "Largest | None"
) -> dict[str, Any]:
    """Return the fields of `Hardware` about micro-batch sizes."""
    if settings.micro_batch_tokens is not None and limit is None:
        return {"micro_batch_size": token_budget(settings.micro_batch_tokens)}
    size, steps = settings.micro_batch_size, settings.accumulation_steps
    if limit is None:
        auto = Auto(largest=planned, known=None if size == "remeasure" else known)
        return {"micro_batch_size": size if isinstance(size, int) else auto, "accumulation_steps": steps}
    if steps is not None:
        size = ceil_div(settings.largest_batch_size, world.size * steps)
    return {"micro_batch_size": min(size, limit) if isinstance(size, int) else limit, "accumulation_steps": None}


def _planned_largest(job: Job, world: World, devices: KnownDevices | None) -> "Largest | None":
    """Return the planner's limit; None on a CPU, where planning takes longer than it saves (docs/log.md)."""
    if world.device.type != "cuda":
        return None
    from anybatch.recipes.planning.plan import planned_for_job  # noqa: PLC0415 (imports the planner)

    return planned_for_job(job, world, devices)


def on_first_rank(world: World, act: Callable[[], ResultT]) -> ResultT:
    """Call `act()` on rank 0 and return its picklable result on every rank; an error is raised on every rank."""
    outcome: tuple[ResultT | None, Exception | None] = (None, None)
    if world.rank == 0:
        try:
            outcome = (act(), None)
        except (AnyBatchError, OSError) as error:
            outcome = (None, error)
    result, failure = world.gather_objects(outcome)[0]
    if failure is not None:
        raise failure
    return cast("ResultT", result)


def notify(observer: Observer, engine: Engine, code: str, message: str, *, is_warning: bool = False) -> None:
    """Send a diagnosis to an observer before the first step of a session."""
    observer.observe(
        DiagnosisRecord(
            rank=engine.world.rank,
            step=engine.num_steps,
            code=code,
            level="warning" if is_warning else "info",
            message=message,
            remedy=None,
        )
    )


def _load(engine: Engine, place: RunFolder, observer: Observer) -> None:
    """Load the newest intact checkpoint; a run that ended before its first one starts again."""
    # Rank 0 writes checkpoints, but another rank's machine may not see the folder.
    there = bool(list_checkpoints(place.checkpoints))
    if not any(engine.world.gather_objects(there)):
        message = "no checkpoint yet: starting again at step 0"
        notify(observer, engine, "no_checkpoint", message, is_warning=True)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # observers receive each of them as a record
        engine.load(place.checkpoints)


def _rest(settings: RunConfig, dataset: Any, job: Job, engine: Engine) -> Batches | None:  # noqa: ANN401 (any data set)
    """Return the remaining batches; None if all steps are made."""
    left = None if settings.steps is None else settings.steps - engine.num_steps
    if left is not None and left < 0:
        message = (
            f"steps={settings.steps} counts from the start of the run, which has already made {engine.num_steps} "
            "steps. Increase it, or start a new run."
        )
        raise UserError(message, code="steps_already_made")
    if left == 0:
        return None
    return job.train_batches(
        dataset,
        effective_batch_size=settings.effective_batch_size,
        epochs=settings.epochs,
        steps=left,
        seed=settings.seed,
        start=engine.position,
    )


def _follow_changes(
    job: Job, header: RunHeader, settings: RunConfig, *, ready: PreparedRun, observer: Observer
) -> RunHeader:
    """Reset the learning rates if the checkpoint has other settings; return the updated header."""
    engine, last = ready.run.engine, header.stretches[-1]
    before = header.before(engine.num_steps)
    changes = before.settings.differences(settings, LEARNED)
    if not changes and before.schedule_steps == last.schedule_steps:
        unchanged = settings == last.settings
        return header if unchanged else header.with_change(Stretch(engine.num_steps, settings, last.schedule_steps))
    made = getattr(engine.scheduler, "last_epoch", 0)  # fewer than steps if fp16 skipped some
    for group, values in zip(engine.optimizer.param_groups, ready.run.hyperparameters, strict=True):
        # A scheduler stores its base rate in the group, where the next one would find it.
        group.pop("initial_lr", None)
        group.update(values)
    make = scheduler_function(job, ready.num_steps)
    if make is not None:
        engine.reschedule(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a scheduler that is stepped before its optimizer
        # The new schedule advances to the position of the old one.
        for _ in range(made):
            cast("Any", engine.scheduler).step()
    asked = ", ".join(changes) or "the settings of this one"
    message = f"from step {engine.num_steps} on learning rates follow a run of {ready.num_steps} steps with {asked}"
    notify(observer, engine, "learning_rates_follow", message)
    return header.with_change(Stretch(engine.num_steps, settings, ready.num_steps))
