"""Measurements of `--verify`, kept in a file and used by the next plan for that device.

Two things are the same for every step on a device: the size of its context, and that the planner's model was compared
with it. The error of a plan belongs to the model that was trained: to its convolutions rather than to the device.
"""

from collections.abc import Callable, Sequence

import torch

from anybatch.core.headroom import HEADROOM, measured_headroom
from anybatch.engine.telemetry.notifier import software_versions
from anybatch.errors import UserError
from anybatch.planner.budget import DeviceMeasurements
from anybatch.planner.cache.measured_devices import (
    LEAST_OUTSIDE_BYTES,
    MOST_EXCESS,
    MOST_LETTERS,
    MOST_OUTSIDE_BYTES,
    KnownDevices,
    MeasuredStep,
    driver_version,
)
from anybatch.planner.cost.device import Device
from anybatch.planner.cost.devices import find_device, parse_budget
from anybatch.planner.report import Plan
from anybatch.planner.verification import Verification, full_name

_CPU = "cpu:"


def measured_of(device: str | int | Device, name: str, precision: str, known: KnownDevices) -> DeviceMeasurements:
    """Return the measurements of a device by its name or memory.

    A step counts that was measured on a device of that name, or under a budget of as many bytes, with the same versions
    of torch, of anybatch and of the driver. By how much the plan of the same model was too low is kept free beside 10%;
    what is known of other models lowers the headroom only.

    Args:
        device: as `budget_of` takes it.
        name: of what is trained.
        precision: number formats of forward and backward.
        known: the file of measured steps.

    Raises:
        UserError: nothing is known of such a device.
    """
    return _measured(_belongs(device), subject(name, precision), known, _versions(on_cpu=_is_cpu(device)))


def measured_here(device: torch.device, name: str, precision: str, known: KnownDevices) -> DeviceMeasurements:
    """Return the measurements of a device of this machine; see `measured_of`.

    Args:
        device: of this machine.
        name: of what is trained.
        precision: number formats of forward and backward.
        known: the file of measured steps.
    """
    full = full_name(device)
    versions = _versions(on_cpu=device.type == "cpu")
    return _measured(lambda step: step.device == full, subject(name, precision), known, versions)


def _measured(
    belongs: Callable[[MeasuredStep], bool], of: str, known: KnownDevices, versions: dict[str, str | None]
) -> DeviceMeasurements:
    """Combine the measured steps of one device."""
    steps, refused = known.steps()
    mine = [step for step in steps if belongs(step)]
    # Other versions of torch or of the driver allocate otherwise, so their measurements do not count.
    fresh = [step for step in mine if step.versions == versions]
    notes = (refused,) if refused else ()
    if not fresh:
        # Of the stale measurements only the newest is mentioned.
        return DeviceMeasurements(notes=(*notes, *(_stale(step, versions) for step in mine[-1:])))
    same = [step for step in fresh if step.subject == of]
    excess = max(step.excess for step in same or fresh)
    # An error seen on another model may lower the headroom, and never raises it.
    headroom = measured_headroom(excess) if same else min(HEADROOM, measured_headroom(excess))
    seen = [step.outside_bytes for step in fresh if step.outside_bytes is not None]
    last = (same or fresh)[-1]
    why = f"measured on {last.date} with torch {versions['torch']}"
    said = f"{why}: headroom {100 * headroom:.0f}%; {_compared(excess)} for {last.subject}"
    return DeviceMeasurements(
        headroom=headroom, outside_bytes=seen[-1] if seen else None, why=f"as {why}", notes=(*notes, said)
    )


def keep(found: Verification, plan: Plan, known: KnownDevices) -> str:
    """Keep what a plan was found to take; return a sentence that says so, or why it was not.

    Args:
        found: the step that was run.
        plan: the plan it was run for.
        known: the file to keep it in.
    """
    step = _step(found, plan, known)
    if found.too_large:
        return "not kept: the planned size ran out of memory, so what was measured is another one's"
    device = plan.budget.device
    if device is not None and _catalogued(step.device) is not device:
        return f"not kept: this device is a {step.device.partition(': ')[2]}, and the plan is for {device.name}"
    if step.excess > MOST_EXCESS:
        return "not kept: more than twice of what was planned was taken, which says nothing of other plans"
    if not known.keep(step):
        return f"it could not be kept for later plans: {known.path} cannot be written"
    return (
        f"kept in {known.path}\n"
        "later plans for this device keep 10% free; delete the file to forget it, name --headroom to pass it over"
    )


def subject(name: str, precision: str) -> str:
    """Return the key of a step in the file: the name of what was trained, and its precision."""
    # The end of a long name is kept, since the precision is there.
    return "".join(letter for letter in f"{name} in {precision}" if letter.isprintable())[-MOST_LETTERS:]


def _step(found: Verification, plan: Plan, known: KnownDevices) -> MeasuredStep:
    """Return the pair of planned and measured bytes that is further apart: of tensors, or of the allocator."""
    workspace, outside = plan.budget.workspace_bytes, found.outside_bytes
    pairs = [(found.planned_bytes + workspace, found.measured_bytes)]
    if found.planned_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        pairs.append((found.planned_reserved_bytes + workspace, found.measured_reserved_bytes))
    # The worse of the two errors decides the headroom of later plans.
    planned, measured = max(pairs, key=lambda pair: pair[1] / pair[0])
    of_a_context = outside is not None and LEAST_OUTSIDE_BYTES <= outside <= MOST_OUTSIDE_BYTES
    return MeasuredStep(
        device=found.name,
        budget_bytes=plan.budget.total_bytes,
        subject=subject(plan.name, plan.precision),
        planned_bytes=planned,
        measured_bytes=measured,
        outside_bytes=outside if of_a_context else None,
        versions=_versions(on_cpu=found.name.startswith(_CPU)),
        date=known.today(),
    )


def _is_cpu(device: str | int | Device) -> bool:
    return isinstance(device, str) and device.startswith(_CPU)


def _belongs(device: str | int | Device) -> Callable[[MeasuredStep], bool]:
    """Return the question whether a step was measured on this device.

    Raises:
        UserError: nothing is known of such a device.
    """
    if _is_cpu(device):
        here = full_name(torch.device("cpu"))
        return lambda step: step.device == here
    if isinstance(device, Device):
        return lambda step: _catalogued(step.device) is device
    total_bytes, named = (device, None) if isinstance(device, int) else parse_budget(device)
    if named is not None:
        return lambda step: _catalogued(step.device) is named
    return lambda step: step.budget_bytes == total_bytes and not step.device.startswith(_CPU)


def _catalogued(full: str) -> Device | None:
    """Return the device of the table that a driver calls so; None for one that is not in it."""
    kind, _, name = full.partition(": ")
    if kind == "cpu":
        return None
    try:
        return find_device(name)
    except UserError:
        return None


def _versions(*, on_cpu: bool) -> dict[str, str | None]:
    software = software_versions()
    return {
        "torch": software["torch"],
        "anybatch": software["anybatch"],
        "driver": None if on_cpu else driver_version(),
    }


def _stale(step: MeasuredStep, versions: dict[str, str | None]) -> str:
    """Say of a step why it does not count."""
    other: Sequence[str] = [
        f"{name} {step.versions.get(name) or 'unknown'} (now {now or 'unknown'})"
        for name, now in versions.items()
        if step.versions.get(name) != now
    ]
    return f"what was measured on {step.date} was with {', '.join(other) or 'other versions'}, and does not count"


def _compared(excess: float) -> str:
    return f"{100 * excess:.1f}% more than planned was taken" if excess else "no more than planned was taken"
