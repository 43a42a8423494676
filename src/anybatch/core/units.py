"""Format and parse quantities with three significant digits and a unit; text tables; the headroom of a device."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anybatch.errors import UserError

_SMALLEST_PLAIN, _LARGEST_PLAIN = 1e-3, 1e6
_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400


def three_digits(value: float | None) -> str:
    """Return a number with three significant digits: `0.0123`, `12.3`, `12,300`, `1.23e-05`, `NaN`; `-` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    # Round first: 999.6 has three digits before rounding and four after.
    rounded = float(f"{value:.2e}")
    if not _SMALLEST_PLAIN <= abs(rounded) < _LARGEST_PLAIN:
        return f"{value:.2e}"
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def listed(items: Iterable[object]) -> str:
    """Return items as text: `1, 2 and 3`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def per_second(value: float | None) -> str:
    """Return a rate with three significant digits and no exponent: `0.0123`, `1,230,000`; `-` for None."""
    if value is None or abs(value) < _LARGEST_PLAIN or not math.isfinite(value):
        return three_digits(value)
    return f"{float(f'{value:.2e}'):,.0f}"


def in_bytes(num_bytes: float, limit_bytes: float | None = None) -> str:
    """Return a number of bytes, `1.23 GiB`, or with a limit `1.23 of 79.2 GiB`, both in the unit of the limit.

    A number below a hundredth of that unit gets a unit that fits it: `7.64 MiB of 1.00 TiB`.
    """
    largest, power = num_bytes if limit_bytes is None else limit_bytes, 0
    while float(f"{largest:.2e}") >= 1_000 and power < len(_BYTE_UNITS) - 1:  # noqa: PLR2004 (the three digits are full)
        largest, power = largest / 1024, power + 1
    if limit_bytes is not None and 0 < num_bytes < 1024**power / 100:
        return f"{in_bytes(num_bytes)} of {in_bytes(limit_bytes)}"
    used = f"{num_bytes:.0f}" if power == 0 else three_digits(num_bytes / 1024**power)
    limit = "" if limit_bytes is None else f" of {three_digits(largest)}"
    return f"{used}{limit} {_BYTE_UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Return a time as `4.2 s`, `42 s`, `3 min 05 s`, `2 h 03 min` or `3 d 04 h`; `-` for None or not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:  # noqa: PLR2004 (from here on it would be shown as 10.0)
        return f"{max(0.0, seconds):.1f} s"
    total = round(seconds)
    if total < _MINUTE:
        return f"{total} s"
    if total < _HOUR:
        return f"{total // _MINUTE} min {total % _MINUTE:02d} s"
    if total < _DAY:
        return f"{total // _HOUR} h {total % _HOUR // _MINUTE:02d} min"
    return f"{total // _DAY} d {total % _DAY // _HOUR:02d} h"


def shortened(name: str, width: int) -> str:
    """Return a name in at most `width` characters: of a longer name, `..` replaces the middle."""
    if len(name) <= width:
        return name
    length = max(0, width - 2)
    return f"{name[: length - length // 2]}..{name[len(name) - length // 2 :]}"[:width]


def columns(rows: Sequence[Sequence[str]], *, num_left: int = 1) -> list[str]:
    """Return the lines of a table: the first `num_left` columns aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [cell.ljust(size) if at < num_left else cell.rjust(size) for at, (cell, size) in enumerate(cells)]
        lines.append("  ".join(aligned).rstrip())
    return lines


UNITS: Mapping[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("KMGT")},
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
}
"""Bytes of each unit: a GB is 1000^3 bytes, a GiB 1024^3."""


def parse_bytes(text: str) -> int:
    """Return the bytes of `"24GiB"`, `"80 GB"` or `"512MiB"`, rounded down; refuse text without number or unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    if match is None:
        message = f"{text!r} is not a memory size. Write a number and a unit, such as 24GiB or 80GB."
        raise UserError(message)
    number, unit = match.groups()
    known = {name.lower(): factor for name, factor in UNITS.items()}
    if unit.lower() not in known:
        prefix = unit[:1].upper()
        meant = f" Is it {number}{prefix}iB or {number}{prefix}B?" if f"{prefix}iB" in UNITS else ""
        problem = f"unknown unit {unit!r} in {text!r}" if unit else f"{text!r} has no unit"
        message = f"{problem}.{meant} Units are {', '.join(UNITS)}."
        raise UserError(message)
    num_bytes = math.floor(float(number) * known[unit.lower()])
    if num_bytes < 1:
        message = f"{text!r} is less than one byte. Pass a memory size such as 24GiB."
        raise UserError(message)
    return num_bytes


HEADROOM = 0.15
"""Fraction of a device's memory that is kept free, as a margin for unplanned use such as fragmentation."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """The peak memory of a run, and the memory of its device."""

    peak_bytes: int
    limit_bytes: int
    headroom: float = HEADROOM

    @property
    def left(self) -> float:
        """Fraction of the device's memory that is free at the peak; below 0 if the peak exceeds it."""
        return 1.0 - self.peak_bytes / self.limit_bytes

    @property
    def kept(self) -> bool:
        """Whether the headroom is free at the peak: `peak <= floor((1 - headroom) * limit)`."""
        return self.peak_bytes <= math.floor((1.0 - self.headroom) * self.limit_bytes)


def describe_reserve(reserve: Reserve) -> str:
    """Return the peak and the free memory as text: `peak 10.2 of 24.0 GiB, 57% left: headroom of 15% kept`.

    Percentages are rounded down, so that free memory is never overstated.
    """
    peak = f"peak {in_bytes(reserve.peak_bytes, reserve.limit_bytes)}"
    if reserve.left < 0:
        return f"{peak}: more than there is"
    state = "kept" if reserve.kept else "used up"
    return f"{peak}, {math.floor(100 * reserve.left)}% left: headroom of {100 * reserve.headroom:g}% {state}"
