"""How long a training takes, how many devices a deadline needs, and what it costs: from one plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anybatch.core.geometry import ceil_div
from anybatch.core.units import duration
from anybatch.errors import UserError
from anybatch.planner.cost.step_time import StepSeconds
from anybatch.planner.proposals.answer_text import in_seconds
from anybatch.planner.report import Plan

RANKS_PER_NODE = 8
_MOST_NODES = 128
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is asked about a training.

    Attributes:
        num_samples: samples it sees in all, each epoch's counted.
        deadline_hours: by when it has to be done; None: whenever it is.
        price: of a device and hour, in any currency; None: not asked.
    """

    num_samples: int
    deadline_hours: float | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """A training on some number of devices.

    Attributes:
        world_size: number of devices.
        num_steps: optimizer steps.
        step: time of one of them.
    """

    world_size: int
    num_steps: int
    step: StepSeconds

    @property
    def hours(self) -> float:
        """Predicted hours."""
        return self.num_steps * self.step.total / _SECONDS_PER_HOUR

    def cost(self, price: float) -> float:
        """Return the price of all devices for that long, at a price of a device and hour."""
        return price * self.world_size * self.hours


def training_time(plan: Plan, num_samples: int, world_size: int) -> TrainingTime | None:
    """Return how long a training takes on so many devices; None where the time of a step is not known.

    Args:
        plan: of a step; where changes were looked for that fit together, with these.
        num_samples: samples it sees in all.
        world_size: number of devices.
    """
    step = plan.seconds_on(world_size)
    if step is None:
        return None
    return TrainingTime(world_size=world_size, num_steps=ceil_div(num_samples, plan.batch.num_samples), step=step)


def fewest_devices(plan: Plan, training: Training) -> TrainingTime | None:
    """Return the training on the fewest devices that meet the deadline; None if 128 nodes of eight do not.

    Numbers up to eight are looked at, and whole nodes of eight above, as far as there is a sample for each device.

    Args:
        plan: of a step.
        training: with a deadline.
    """
    assert training.deadline_hours is not None, "there is a deadline to meet"
    for world_size in _numbers_of_devices(plan.batch.num_samples):
        found = training_time(plan, training.num_samples, world_size)
        if found is not None and found.hours <= training.deadline_hours:
            return found
    return None


def training_text(plan: Plan, training: Training) -> str:
    """Return what is asked about a training, in lines below a plan.

    Args:
        plan: of a step that fits, on a device whose rates are known.
        training: what is asked.

    Raises:
        UserError: the time of a step is not known.
    """
    found = _known_time(plan, training)
    least, greatest = (duration(found.num_steps * one) for one in (found.step.least, found.step.greatest))
    took = duration(_SECONDS_PER_HOUR * found.hours)
    steps = f"{found.num_steps:,} steps of {in_seconds(found.step.total)}"
    lines = [
        f"training   {training.num_samples:,} samples: {steps}, {took} on {found.world_size}",
        f"           between {least} and {greatest}",
    ]
    if training.deadline_hours is not None:
        lines.append(f"deadline   {duration(_SECONDS_PER_HOUR * training.deadline_hours)}: {_deadline(plan, training)}")
    if training.price is not None:
        lines.append(f"price      {found.cost(training.price):,.2f} at {training.price:g} for a device and hour")
    return "\n".join(lines)


def training_json(plan: Plan, training: Training) -> dict[str, Any]:
    """Return what `training_text` says as a value that `json.dumps` takes.

    Raises:
        UserError: the time of a step is not known.
    """
    met = None if training.deadline_hours is None else fewest_devices(plan, training)
    return {
        "num_samples": training.num_samples,
        **_as_json(_known_time(plan, training), training.price),
        "deadline_hours": training.deadline_hours,
        "fewest_for_deadline": None if met is None else _as_json(met, training.price),
    }


def _as_json(time: TrainingTime, price: float | None) -> dict[str, Any]:
    hours_by_second = time.num_steps / _SECONDS_PER_HOUR
    return {
        "world_size": time.world_size,
        "num_steps": time.num_steps,
        "hours": time.hours,
        "least_hours": hours_by_second * time.step.least,
        "greatest_hours": hours_by_second * time.step.greatest,
        "price": None if price is None else time.cost(price),
    }


def _known_time(plan: Plan, training: Training) -> TrainingTime:
    found = training_time(plan, training.num_samples, plan.batch.world_size)
    if found is None:
        message = (
            "how long a training takes is known where a step fits, and its time is known: on a device by name, not by "
            "its memory alone, and not under fsdp."
        )
        raise UserError(message)
    return found


def _deadline(plan: Plan, training: Training) -> str:
    found = fewest_devices(plan, training)
    if found is None:
        return f"not met by as many devices as a step of {plan.batch.num_samples:,} samples can use, or by 1,024"
    price = "" if training.price is None else f", {found.cost(training.price):,.2f} in all"
    devices = f"{found.world_size} device{'s' * (found.world_size > 1)}"
    return f"{devices}, {duration(_SECONDS_PER_HOUR * found.hours)}{price}"


def _numbers_of_devices(num_samples: int) -> Iterator[int]:
    numbers = (*range(1, RANKS_PER_NODE), *range(RANKS_PER_NODE, RANKS_PER_NODE * _MOST_NODES + 1, RANKS_PER_NODE))
    return (number for number in numbers if number <= num_samples)
