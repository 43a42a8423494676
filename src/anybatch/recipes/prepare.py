"""Prepares a run: builds it, and loads the newest checkpoint when resuming."""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from anybatch.checkpoints import list_checkpoints
from anybatch.core.records import DiagnosisRecord, Observer
from anybatch.core.run_config import RunConfig
from anybatch.data.batches import Batches
from anybatch.engine.engine import Engine
from anybatch.engine.micro_batch_size.search import Auto
from anybatch.errors import AnyBatchError, UserError
from anybatch.parallel.world import World
from anybatch.recipes.job import Job
from anybatch.recipes.run_folder import Origin, RunFolder, RunHeader, Stretch
from anybatch.recipes.start import LEARNED, JobRun, num_steps_of, resolve_settings, scheduler_function, start

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun:
    """A run that can step: `rest` are the remaining batches, or None without steps; `num_steps` is None if unknown."""

    run: JobRun
    rest: Batches | None
    num_steps: int | None


def prepare(
    job: Job,
    given: RunConfig,
    header: RunHeader | None,
    origin: Origin,
    *,
    folder: RunFolder,
    world: World,
    observer: Observer,
) -> PreparedRun:
    """Build a run, load its newest checkpoint if there is one, and write its header.

    `header` is the header of the run to resume, with its settings so far; None for a new run.
    """
    former = None if header is None else header.stretches[-1]
    settings = resolve_settings(job, given, None if former is None else former.settings, world_size=world.size)
    limit = _micro_batch_limit(header, given)
    # Created once, so that a resumed run continues on the same data set.
    dataset = job.dataset()
    job = dataclasses.replace(job, defaults=settings, dataset=lambda: dataset)
    run = start(
        job,
        settings,
        schedule_steps=None if header is None else header.stretches[-1].schedule_steps,
        **_sizes(job, settings, limit, world),
        observer=observer,
        world=world,
    )
    # Parameter groups usually share a rate, which is then printed once.
    run.engine.decisions["learning_rate"] = "; ".join(dict.fromkeys(map(str, run.rates)))
    if header is None:
        num_steps = num_steps_of(run.batches)
        header, ready = RunHeader(origin, (Stretch(0, settings, num_steps),)), PreparedRun(run, run.batches, num_steps)
    else:
        if limit is not None:
            message = (
                f"micro-batches are limited to {limit} samples, because larger ones ran out of memory in a step "
                "that could not be repeated; the result stays the same"
            )
            run.engine.decisions["micro_batch_size"] = message
            notify(observer, run.engine, "goes_on_smaller", message)
        _load(run.engine, folder, observer)
        rest = _rest(settings, dataset, job, run.engine)
        left = 0 if rest is None else num_steps_of(rest)
        ready = PreparedRun(run, rest, None if left is None else run.engine.num_steps + left)
        header = _follow_changes(job, header, settings, ready=ready, observer=observer)
    header = dataclasses.replace(header, origin={**header.origin, **origin}, largest_micro_batch_size=limit)
    on_first_rank(world, partial(folder.write, header))
    return ready


def _micro_batch_limit(header: RunHeader | None, given: RunConfig) -> int | None:
    """Return the micro-batch limit that earlier sessions have stored; a new micro-batch size removes the limit."""
    if header is None:
        return None
    former = header.stretches[-1].settings
    names = ("micro_batch_size", "accumulation_steps")
    same = all(getattr(given, name) in (None, getattr(former, name)) for name in names)
    return header.largest_micro_batch_size if same else None


def _sizes(job: Job, settings: RunConfig, limit: int | None, world: World) -> dict[str, Any]:
    """Return the micro-batch arguments of `Hardware` that override the settings."""
    if limit is not None:
        return {"micro_batch_size": limit, "accumulation_steps": None}
    is_given = isinstance(settings.micro_batch_size, int) or settings.micro_batch_tokens is not None
    # On a CPU, planning takes longer than it saves (docs/log.md).
    if is_given or world.device.type != "cuda":
        return {}
    from anybatch.recipes.planning.plan import planned_largest  # noqa: PLC0415 (imports the planner)

    planned = planned_largest(job.train_spec, device=world.device, world_size=world.size)
    return {"micro_batch_size": Auto(largest=planned)}


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


def _load(engine: Engine, folder: RunFolder, observer: Observer) -> None:
    """Load the newest intact checkpoint; if the run ended before its first checkpoint, it starts again at step 0."""
    # Rank 0 writes checkpoints, but another rank's machine may not see the folder.
    has_checkpoint = bool(list_checkpoints(folder.checkpoints))
    if not any(engine.world.gather_objects(has_checkpoint)):
        message = "no checkpoint yet: starting again at step 0"
        notify(observer, engine, "no_checkpoint", message, is_warning=True)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # observers receive each warning as a record
        engine.load(folder.checkpoints)


def _rest(settings: RunConfig, dataset: Any, job: Job, engine: Engine) -> Batches | None:  # noqa: ANN401 (any data set)
    """Return the remaining batches; None if no steps are left."""
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
    """Reset the learning rates if the settings differ from the checkpoint's; return the updated header."""
    engine, last = ready.run.engine, header.stretches[-1]
    before = header.before(engine.num_steps)
    changes = before.settings.differences(settings, LEARNED)
    if not changes and before.schedule_steps == last.schedule_steps:
        unchanged = settings == last.settings
        return header if unchanged else header.with_change(Stretch(engine.num_steps, settings, last.schedule_steps))
    num_scheduled = getattr(engine.scheduler, "last_epoch", 0)  # fewer than steps if fp16 skipped some
    for group, values in zip(engine.optimizer.param_groups, ready.run.hyperparameters, strict=True):
        # A scheduler stores its base rate in the group, where the next scheduler would read it.
        group.pop("initial_lr", None)
        group.update(values)
    make = scheduler_function(job, ready.num_steps)
    if make is not None:
        engine.reschedule(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a scheduler that is stepped before its optimizer
        # The new schedule advances to the position of the old one.
        for _ in range(num_scheduled):
            cast("Any", engine.scheduler).step()
    changed = ", ".join(changes) or "unchanged settings"
    message = (
        f"from step {engine.num_steps} on, learning rates follow the schedule of a run of {ready.num_steps} steps "
        f"with {changed}"
    )
    notify(observer, engine, "learning_rates_follow", message)
    return header.with_change(Stretch(engine.num_steps, settings, ready.num_steps))
