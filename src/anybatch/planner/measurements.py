"""Measurements of this machine, kept in the user's cache folder for the next plan: micro-batch sizes, memory of steps.

Each file has one line of JSON per measurement. Users can edit the files, so invalid lines are skipped, never an error.
"""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs
import torch

from anybatch.core.geometry import KnownSize
from anybatch.engine.notifier import software_versions
from anybatch.memory.device_memory import device_name
from anybatch.planner.torch_internals import cuda_driver_number

MOST_LINES = 1000
MOST_BYTES = 4 * 2**20
"""Larger files are not read; a thousand lines need a tenth of this."""
LEAST_OUTSIDE_BYTES, MOST_OUTSIDE_BYTES = 64 * 2**20, 2 * 2**30
"""Bounds of a context's size; more memory than that belongs to other programs."""
MOST_EXCESS = 1.0
"""If a step needs more than twice the planned memory, its plan is wrong and gives no estimate for other plans."""
MOST_LETTERS = 300
_MOST_NUMBER = 1 << 50
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
JsonObject = dict[str, Any]


class _CacheFile:
    """A file with one JSON object per line."""

    NAME = ""

    def __init__(self, path: Path | None = None, *, today: Callable[[], str] | None = None) -> None:
        folder = Path(platformdirs.user_cache_dir("anybatch", appauthor=False))
        self.path = folder / self.NAME if path is None else path
        self.today = today or (lambda: datetime.now(tz=UTC).date().isoformat())

    def _read(self) -> tuple[list[JsonObject], str]:
        """Return the objects, the oldest first, and the reason for skipped lines; empty without any."""
        try:
            if not self.path.exists():
                return [], ""
            if not self.path.is_file() or self.path.stat().st_size > MOST_BYTES:
                return [], f"it is not a file of at most {MOST_BYTES:,} bytes"
            lines = [_parsed(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            return [], f"it cannot be read ({type(error).__name__})"
        found = [line for line in lines if line is not None]
        skipped = len(lines) - len(found)
        return found, f"{skipped} of its {len(lines)} lines are not records" if skipped else ""

    def _write(self, lines: Iterable[JsonObject]) -> bool:
        """Replace the file atomically by these lines, at most the last thousand; return whether that succeeded."""
        text = [f"{json.dumps(line, sort_keys=True)}\n" for line in lines]
        name = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write("".join(text[-MOST_LINES:]))
            Path(name).replace(self.path)
        except OSError:
            return False
        finally:
            if name is not None:
                with suppress(OSError):  # after a success it no longer exists
                    Path(name).unlink()
        return True


class KnownSizes(_CacheFile):
    """Stores the fastest micro-batch size for given circumstances in a file, to use it in later processes.

    A size is used only if all circumstances are the same. If the file is damaged, written by a later version, or not
    readable or writable, the size counts as unknown.

    Args:
        path: the file; None for one in the user's cache folder.
        today: returns the date, such as 2030-12-31; None for the current date.
    """

    NAME = "micro_batch_sizes.jsonl"

    def find(self, circumstances: Mapping[str, Any]) -> KnownSize | None:
        """Return the latest size for exactly these circumstances; None if there is no such size.

        Args:
            circumstances: everything that the fastest size depends on; names to plain values.
        """
        wanted = _plain(circumstances)
        found = (_size(line) for line in reversed(self._read()[0]) if line.get("circumstances") == wanted)
        return next((one for one in found if one is not None), None)

    def keep(self, circumstances: Mapping[str, Any], size: int, samples_per_second: float) -> bool:
        """Store a size, replacing the one for the same circumstances; return whether that succeeded.

        Args:
            circumstances: everything that the fastest size depends on; names to plain values.
            size: samples of a micro-batch.
            samples_per_second: measured at that size.
        """
        wanted = _plain(circumstances)
        others = [line for line in self._read()[0] if line.get("circumstances") != wanted]
        known = KnownSize(size, samples_per_second, self.today())
        return self._write([*others, {"circumstances": wanted, **dataclasses.asdict(known)}])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A planned step that was run on the device."""

    device: str  # type of the device and its driver's name
    budget_bytes: int  # the device's memory in the plan
    subject: str  # model, optimizer and precision, as one string
    planned_bytes: int  # the predicted peak: tensors, the allocator's rounding, and workspaces
    measured_bytes: int
    outside_bytes: int | None  # memory outside of torch's allocator; None on a CPU, or if the driver does not report it
    versions: Mapping[str, str | None]  # versions of torch, anybatch and the driver
    date: str  # date of the measurement, such as 2030-12-31

    @property
    def excess(self) -> float:
        """Share by which the measured memory exceeds the planned memory; at least 0."""
        return max(0.0, self.measured_bytes / self.planned_bytes - 1.0)


class KnownDevices(_CacheFile):
    """Stores measured steps in a file, to use them in later processes.

    If the file is damaged, written by a later version, or not readable or writable, the device counts as unknown, and a
    note gives the reason.

    Args:
        path: the file; None for one in the user's cache folder.
        today: returns the date, such as 2030-12-31; None for the current date.
    """

    NAME = "measured_devices.jsonl"

    def steps(self) -> tuple[tuple[MeasuredStep, ...], str]:
        """Return all stored steps, the oldest first, and a sentence about skipped parts of the file."""
        lines, reason = self._read()
        found = tuple(step for line in lines if (step := _step(line)) is not None)
        if not reason and len(found) < len(lines):
            reason = f"{len(lines) - len(found)} of its records are invalid"
        return found, f"{self.path} was ignored, in whole or in part: {reason}. It can be deleted" if reason else ""

    def keep(self, step: MeasuredStep) -> bool:
        """Store a step, replacing the one of the same subject and device; return whether that succeeded.

        Args:
            step: the measurement.
        """
        others = [one for one in self.steps()[0] if (one.device, one.subject) != (step.device, step.subject)]
        return self._write(dataclasses.asdict(one) for one in (*others, step))


def subject(name: str, precision: str) -> str:
    """Return the key of a step in the file: name and precision."""
    # Keep the end of a long name, which contains the precision.
    return "".join(letter for letter in f"{name} in {precision}" if letter.isprintable())[-MOST_LETTERS:]


def full_name(device: torch.device) -> str:
    """Return a device's type and its driver's name."""
    return f"{device.type}: {device_name(device)}"


def versions_here(*, on_cpu: bool) -> dict[str, str | None]:
    """Return the versions of torch, anybatch and the accelerator's driver."""
    software = software_versions()
    driver = None if on_cpu else driver_version()
    return {"torch": software["torch"], "anybatch": software["anybatch"], "driver": driver}


def driver_version() -> str | None:
    """Return the version of the accelerator's driver, without using the accelerator; None without a driver."""
    # Try the driver's files first: torch reports a version only if it is built for CUDA.
    for path in _DRIVERS:
        with suppress(OSError, UnicodeDecodeError):
            if match := re.search(r"\d+\.[\d.]*\d", path.read_text(encoding="utf-8")):
                return match.group()
    number = cuda_driver_number()
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else None


def _plain(value: object) -> Any:  # noqa: ANN401 (any JSON value)
    """Return a value as read back from a file, with tuples as lists."""
    return json.loads(json.dumps(value))


def _parsed(line: str) -> JsonObject | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: a thousand nested brackets
        return None
    return found if isinstance(found, dict) else None


def _size(line: JsonObject) -> KnownSize | None:
    """Return the size of a line; None if the line is invalid."""
    size, rate, date = line.get("size"), line.get("samples_per_second"), line.get("date")
    valid = _is_number(size, int, 1) and _is_number(rate, int | float, 0) and _is_text(date)
    return KnownSize(int(line["size"]), float(line["samples_per_second"]), str(date)) if valid else None


def _step(line: JsonObject) -> MeasuredStep | None:
    """Return the step of a line; None if the line is invalid or implausible."""
    outside, versions = line.get("outside_bytes"), line.get("versions")
    valid = (
        line.keys() == {one.name for one in dataclasses.fields(MeasuredStep)}
        and all(_is_text(line[name]) for name in ("device", "subject", "date"))
        and all(_is_number(line[name], int, 1) for name in ("budget_bytes", "planned_bytes", "measured_bytes"))
        and (outside is None or _is_number(outside, int, LEAST_OUTSIDE_BYTES, MOST_OUTSIDE_BYTES))
        and isinstance(versions, dict)
        and all(value is None or _is_text(value) for value in versions.values())
    )
    step = MeasuredStep(**line) if valid else None
    # Steps with such an excess are never stored, so the line was edited or written by another version.
    return None if step is None or step.excess > MOST_EXCESS else step


def _is_text(value: object) -> bool:
    """Return whether a value is printable text, without control characters for the terminal."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MOST_LETTERS


def _is_number(value: Any, kind: Any, least: int, most: int = _MOST_NUMBER) -> bool:  # noqa: ANN401 (any JSON value)
    # In Python, `True` is an int; NaN, which JSON can hold, fails the comparison.
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
