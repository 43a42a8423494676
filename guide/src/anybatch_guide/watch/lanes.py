"""The latest steps of a run as lanes, one per rank, and the parts of their time."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from anybatch.events.log_lines import Span, clock_shifts, decoded_line, spans_of
from anybatch_guide.watch.fields import cleaned, integer, time_of
from anybatch_guide.watch.rank_log import SpanLines

MAX_LANES: Final = 16
MAX_SPANS: Final = 400
_PARTS: Final = {"load": "load", "reduce": "reduce", "clip": "update", "update": "update"}


def lanes_of(ranks: Mapping[int, Sequence[SpanLines]]) -> dict[str, Any] | None:
    """Return the latest step logged by all ranks, as spans, and the parts of the latest steps.

    Times are host times: on an accelerator, device work appears where the host waits for it. A rank's time in "reduce"
    is exposed communication plus waiting for the slowest rank. In each step, the shortest "reduce" of all ranks counts
    as communication; the remaining "reduce" time of a rank counts as waiting for other ranks.
    """
    shown = dict(sorted(ranks.items())[:MAX_LANES])
    common = sorted(set.intersection(*({step.step for step in steps} for steps in shown.values()))) if shown else []
    if not common:
        return None
    ends = [{step.step: step.seconds for step in steps} for steps in shown.values()]
    shifts = clock_shifts(ends)
    spans = {rank: {step.step: _spans(step) for step in steps if step.step in common} for rank, steps in shown.items()}
    if not any(spans[rank][common[-1]] for rank in shown):
        return None
    latest = [
        span for rank, shift in zip(shown, shifts, strict=True) for span in _drawn(rank, spans[rank][common[-1]], shift)
    ]
    begin = min((span["from"] for span in latest), default=0.0)
    return {
        "step": common[-1],
        "ranks": list(shown),
        "num_left_out": len(ranks) - len(shown),
        "shifted": [rank for rank, shift in zip(shown, shifts, strict=True) if shift],
        "spans": [
            {**span, "from": _micros(span["from"] - begin), "to": _micros(span["to"] - begin)} for span in latest
        ],
        "num_steps": len(common),
        "parts": _parts_of(spans, common),
    }


def _spans(step: SpanLines) -> list[Span]:
    lines = (line for line in map(decoded_line, step.lines) if line is not None and time_of(line) is not None)
    return list(spans_of(lines))


def _drawn(rank: int, spans: Sequence[Span], shift: float) -> list[dict[str, Any]]:
    """Return spans for the page: micro-batches, reductions, and phases (except the phase around the micro-batches)."""
    drawn: list[dict[str, Any]] = []
    for span in spans:
        kind = "collective" if span.kind == "reduction" else _part(span)
        if kind is None:
            continue
        name = cleaned(span.name)
        details = {"samples": integer(span.details, "num_samples"), "bytes": integer(span.details, "num_bytes")}
        drawn.append(
            {
                "rank": rank,
                "kind": kind,
                "name": name,
                "from": span.begin_seconds + shift,
                "to": span.end_seconds + shift,
                **details,
            }
        )
    # Draw only the longest spans, because shorter ones would not be visible.
    return sorted(drawn, key=lambda part: part["from"] - part["to"])[:MAX_SPANS]


def _parts_of(spans: Mapping[int, Mapping[int, Sequence[Span]]], common: Sequence[int]) -> list[dict[str, Any]]:
    """Return, for each rank, the median seconds of the parts of a step."""
    waits = {step: min(_seconds(of_rank[step], "reduce") for of_rank in spans.values()) for step in common}
    rows = []
    for rank, of_rank in spans.items():
        median = {
            name: statistics.median(_seconds(of_rank[step], name) for step in common)
            for name in ("load", "compute", "update")
        }
        others = statistics.median(_seconds(of_rank[step], "reduce") - waits[step] for step in common)
        exposed = statistics.median(waits.values())
        whole_seconds = statistics.median(_whole(of_rank[step]) for step in common)
        seconds = {**median, "exposed": exposed, "others": others, "step": whole_seconds}
        rows.append({"rank": rank, **{name: _micros(value) for name, value in seconds.items()}})
    return rows


def _seconds(spans: Sequence[Span], part: str) -> float:
    return sum((span.end_seconds - span.begin_seconds for span in spans if _part(span) == part), 0.0)


def _part(span: Span) -> str | None:
    return "compute" if span.kind == "micro_batch" else _PARTS.get(span.name) if span.kind == "phase" else None


def _whole(spans: Sequence[Span]) -> float:
    return max((span.end_seconds for span in spans), default=0.0) - min(
        (span.begin_seconds for span in spans), default=0.0
    )


def _micros(seconds: float) -> float:
    return round(seconds, 6)
