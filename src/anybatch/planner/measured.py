"""Measurements of `--verify`, kept in a file and used by the next plan for that device.

The size of a device's context applies to every step on it. The error of a plan applies to the model that was measured:
it depends on its convolutions more than on the device.
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
from anybatch.planner.cost.devices import Device
from anybatch.planner.cost.devices import find_device, parse_budget
from anybatch.planner.report import Plan
from anybatch.planner.verification import Verification, full_name

_CPU = "cpu:"


def measured_of(device: str | int | Device, name: str, precision: str, known: KnownDevices) -> DeviceMeasurements:
    """Return the measurements of a device by its name or memory.

    A measured step is used if its device has that name, or its budget that many bytes, and the versions of torch,
    anybatch and the driver are the same. The headroom is 10% plus the error of the plan for the same model; errors for
    other models can only lower the default.

    Args:
        device: a device, as for `budget_of`.
        name: name of the trained model.
        precision: number formats of forward and backward.
        known: the file of measured steps.

    Raises:
        UserError: the device is unknown.
    """
    return _measured(_belongs(device), subject(name, precision), known, _versions(on_cpu=_is_cpu(device)))


def measured_here(device: torch.device, name: str, precision: str, known: KnownDevices) -> DeviceMeasurements:
    """Return the measurements of a device of this machine; see `measured_of`.

    Args:
        device: a device of this machine.
        name: name of the trained model.
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
    # Other versions of torch or of the driver allocate differently, so their measurements are ignored.
    fresh = [step for step in mine if step.versions == versions]
    notes = (refused,) if refused else ()
    if not fresh:
        # Mention only the newest outdated measurement.
        return DeviceMeasurements(notes=(*notes, *(_stale(step, versions) for step in mine[-1:])))
    same = [step for step in fresh if step.subject == of]
    excess = max(step.excess for step in same or fresh)
    # The error of another model may lower the headroom, but never raises it.
    headroom = measured_headroom(excess) if same else min(HEADROOM, measured_headroom(excess))
    seen = [step.outside_bytes for step in fresh if step.outside_bytes is not None]
    last = (same or fresh)[-1]
    why = f"measured on {last.date} with torch {versions['torch']}"
    note = f"{why}: headroom {100 * headroom:.0f}%; {_compared(excess)} for {last.subject}"
    return DeviceMeasurements(
        headroom=headroom, outside_bytes=seen[-1] if seen else None, why=f"as {why}", notes=(*notes, note)
    )


def keep(found: Verification, plan: Plan, known: KnownDevices) -> str:
    """Store the measurements of a plan; return a sentence with the file, or with the reason for not storing them.

    Args:
        found: measurements of the step.
        plan: the verified plan.
        known: the file of measured steps.
    """
    step = _step(found, plan, known)
    if found.too_large:
        return "not kept: the planned size ran out of memory, so a smaller one was measured"
    device = plan.budget.device
    if device is not None and _catalogued(step.device) is not device:
        return f"not kept: this device is a {step.device.partition(': ')[2]}, and the plan is for {device.name}"
    if step.excess > MOST_EXCESS:
        return "not kept: the step needed more than twice the planned memory, so other plans cannot use the result"
    if not known.keep(step):
        return f"not kept for later plans: cannot write {known.path}"
    return (
        f"kept in {known.path}\nlater plans for this device keep 10% free; override with --headroom, or delete the file"
    )


def subject(name: str, precision: str) -> str:
    """Return the key of a step in the file: name and precision."""
    # Keep the end of a long name, which contains the precision.
    return "".join(letter for letter in f"{name} in {precision}" if letter.isprintable())[-MOST_LETTERS:]


def _step(found: Verification, plan: Plan, known: KnownDevices) -> MeasuredStep:
    """Return the measured step, with the bytes of tensors or of the allocator: the ones with the larger error."""
    workspace, outside = plan.budget.workspace_bytes, found.outside_bytes
    pairs = [(found.planned_bytes + workspace, found.measured_bytes)]
    if found.planned_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        pairs.append((found.planned_reserved_bytes + workspace, found.measured_reserved_bytes))
    # The larger error determines the headroom of later plans.
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
    """Return a predicate: was a step measured on this device?

    Raises:
        UserError: the device is unknown.
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
    """Return the device in the table by its driver's name; None if it is missing."""
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
    """Return a note on why a measured step is ignored."""
    other: Sequence[str] = [
        f"{name} {step.versions.get(name) or 'unknown'} (now {now or 'unknown'})"
        for name, now in versions.items()
        if step.versions.get(name) != now
    ]
    return f"measurements of {step.date} are ignored: they used {', '.join(other) or 'other versions'}"


def _compared(excess: float) -> str:
    return f"{100 * excess:.1f}% more memory used than planned" if excess else "no more memory used than planned"
