"""Files of a report: JSON and a picture."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Report(Protocol):
    """The result of a command."""

    def as_json(self) -> Mapping[str, Any]:
        """Return it as `json.dumps` accepts it."""
        ...


ReportT = TypeVar("ReportT", bound=Report)


def write_report_files(
    report: ReportT, draw: Callable[[ReportT, Path], object], *, json_file: Path | None, figure: Path | None
) -> None:
    """Write the requested files, and print their names; None skips a file."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"wrote {json_file}\n")
    if figure is not None:
        draw(report, figure)
        sys.stdout.write(f"wrote {figure}\n")
