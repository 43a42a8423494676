"""A cache file with the planned and measured memory of steps by device, one line of JSON each."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anybatch.planner.cache.cache_file import JsonLinesFile, JsonObject, cache_file
from anybatch.planner.torch_internals import cuda_driver_number

FILE_NAME = "measured_devices.jsonl"
LEAST_OUTSIDE_BYTES, MOST_OUTSIDE_BYTES = 64 * 2**20, 2 * 2**30
"""Bounds of a context's size; more memory than that belongs to other programs."""
MOST_EXCESS = 1.0
"""If a step needs more than twice the planned memory, its plan is wrong and gives no estimate for other plans."""
_MOST_BYTES = 1 << 50
MOST_LETTERS = 300
_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/sys/module/amdgpu/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A planned step that was run on the device.

    Attributes:
        device: type of the device and its driver's name.
        budget_bytes: the device's memory in the plan.
        subject: model, optimizer and precision, as one string.
        planned_bytes: the predicted peak: tensors, the allocator's rounding, and workspaces.
        measured_bytes: the measured peak.
        outside_bytes: memory outside of torch's allocator; None on a CPU, or if the driver does not report it.
        versions: versions of torch, anybatch and the driver.
        date: date of the measurement, such as 2030-12-31.
    """

    device: str
    budget_bytes: int
    subject: str
    planned_bytes: int
    measured_bytes: int
    outside_bytes: int | None
    versions: Mapping[str, str | None]
    date: str

    @property
    def excess(self) -> float:
        """Share by which the measured memory exceeds the planned memory; at least 0."""
        return max(0.0, self.measured_bytes / self.planned_bytes - 1.0)


class KnownDevices:
    """Stores measured steps in a file, to use them in later processes.

    If the file is damaged, written by a later version, or not readable or writable, the device counts as unknown, and a
    note gives the reason.

    Args:
        path: the file; None for one in the user's cache folder.
        today: returns the date, such as 2030-12-31.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        today: Callable[[], str] = lambda: datetime.now(tz=UTC).date().isoformat(),
    ) -> None:
        self._lines = JsonLinesFile(cache_file(FILE_NAME) if path is None else path)
        self.today = today

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    def steps(self) -> tuple[tuple[MeasuredStep, ...], str]:
        """Return all stored steps, the oldest first, and a sentence about skipped parts of the file."""
        lines = self._lines.read()
        read = [_step(line) for line in lines]
        found = tuple(step for step in read if step is not None)
        reasons = [self._lines.refused] if self._lines.refused else []
        if len(found) < len(lines):
            reasons.append(f"{len(lines) - len(found)} of its records are invalid")
        if not reasons:
            return found, ""
        return found, f"{self.path} was ignored, in whole or in part: {'; '.join(reasons)}. It can be deleted"

    def keep(self, step: MeasuredStep) -> bool:
        """Store a step, replacing the one of the same subject and device; return whether that succeeded.

        Args:
            step: the measurement.
        """
        others = [one for one in self.steps()[0] if (one.device, one.subject) != (step.device, step.subject)]
        return self._lines.write(dataclasses.asdict(one) for one in (*others, step))


def driver_version() -> str | None:
    """Return the version of the accelerator's driver, without using the accelerator; None without a driver."""
    # Try the driver's files first: torch reports a version only if it is built for CUDA.
    for path in (_NVIDIA, _AMD):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        match = re.search(r"\d+\.[\d.]*\d", text)
        if match is not None:
            return match.group()
    number = cuda_driver_number()
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else None


def _step(line: JsonObject) -> MeasuredStep | None:
    """Return the step of a line; None if the line is invalid or implausible."""
    texts = [line.get(name) for name in ("device", "subject")]
    sizes = [line.get(name) for name in ("budget_bytes", "planned_bytes", "measured_bytes")]
    outside, date, versions = line.get("outside_bytes"), line.get("date"), line.get("versions")
    plausible = (
        line.keys() == {one.name for one in dataclasses.fields(MeasuredStep)}
        and all(map(_is_text, texts))
        and all(_is_size(size, 1, _MOST_BYTES) for size in sizes)
        and (outside is None or _is_size(outside, LEAST_OUTSIDE_BYTES, MOST_OUTSIDE_BYTES))
        and isinstance(date, str)
        and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", date) is not None
        and isinstance(versions, dict)
        and all(value is None or _is_text(value) for value in versions.values())
    )
    step = MeasuredStep(**line) if plausible else None
    # Steps with such an excess are never stored, so the line was edited or written by another version.
    return None if step is None or step.excess > MOST_EXCESS else step


def _is_text(value: Any) -> bool:  # noqa: ANN401 (any JSON value)
    """Return whether a value is printable text, without control characters for the terminal."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MOST_LETTERS


def _is_size(value: Any, least: int, most: int) -> bool:  # noqa: ANN401 (any JSON value)
    # In Python, `True` is an int.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
