"""Code shared by all stages of `make gpu`: sizes, rows that are kept once measured, and failures as rows."""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Size = Literal["full", "small", "tiny"]
FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a stage runs and how much of it.

    Attributes:
        device: "cuda:0" or "cpu".
        size: "full" for a data-centre GPU, "small" for a rehearsal on a CPU, "tiny" for CI.
    """

    device: str
    size: Size

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def pick(self, full: Any, small: Any, tiny: Any) -> Any:  # noqa: ANN401 (the caller's own type)
        """Return the value for this size."""
        return {"full": full, "small": small, "tiny": tiny}[self.size]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        table: the heading of the table that it belongs to.
        cells: column -> value, as text; rows of one table have the same columns.
    """

    table: str
    cells: dict[str, str]


Rows = Iterator[Row]
Check = Callable[[Setting], Rows]


def run_checks(checks: tuple[Check, ...], setting: Setting, write: Callable[[Row], None]) -> int:
    """Run checks one after the other, write each row immediately, and return how many checks failed.

    A check that raises becomes a row, and the next one still runs.
    """
    num_failed = 0
    for check in checks:
        try:
            for row in check(setting):
                write(row)
        except Exception as error:  # noqa: BLE001 (the other checks still run)
            num_failed += 1
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            write(Row(FAILED, {"check": check.__name__, "error": f"{type(error).__name__}: {first_line}"}))
        if setting.on_gpu:
            torch.cuda.empty_cache()
    return num_failed


def row_writer(path: Path) -> Callable[[Row], None]:
    """Return a function that appends rows to a file of JSON lines, on disk before it returns."""

    def write(row: Row) -> None:
        print(f"  {row.table}: " + ", ".join(f"{name} {value}" for name, value in row.cells.items()), flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([row.table, row.cells]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return write


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, without a last line that was cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(Row(*json.loads(line)))
        except ValueError:
            continue
    return rows


def tables(rows: list[Row]) -> list[str]:
    """Return the rows as Markdown tables, one for each heading."""
    lines: list[str] = []
    for heading in dict.fromkeys(row.table for row in rows):
        cells = [row.cells for row in rows if row.table == heading]
        columns = list(dict.fromkeys(name for row in cells for name in row))
        lines += ["", f"## {heading}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row.get(name, "").replace("|", "/") for name in columns) + " |" for row in cells]
    return lines
