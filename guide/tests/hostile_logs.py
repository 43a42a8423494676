"""Hostile logs: the bytes of an `events.jsonl` by attack."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

MARKUP: Final = "<img src=x onerror='window.hurt=1'></script><script>window.hurt=1</script>{@html 1}"
START: Final[Mapping[str, Any]] = {
    "version": 1,
    "sequence": 0,
    "time_seconds": 1.0,
    "kind": "start",
    "rank": 0,
    "world_size": 1,
    "first_step": 0,
    "geometry": "8 samples = 1 rank x 2 micro-batches x 4",
    "effective_batch_size": 8,
    "micro_batch_size": 4,
    "strategy": "single",
    "precision": "fp32",
    "device": "cpu",
    "dtype": "float32",
    "seed": 0,
    "num_parameters": 10,
    "gradient_bytes": 40,
    "versions": {"anybatch": "0.1.0"},
    "decisions": {"strategy": "single"},
}


def line(kind: str, *, seconds: object = 2.0, **more: Any) -> bytes:
    """Return a line in log format."""
    head = {"version": 1, "sequence": 1, "time_seconds": seconds, "kind": kind}
    return json.dumps({**head, **more}, separators=(",", ":")).encode() + b"\n"


def step(number: object, loss: object = 1.0, seconds: object = 2.0, **more: Any) -> bytes:
    """Return the line of a step."""
    usual: dict[str, Any] = {
        "rank": 0,
        "num_samples": 8,
        "gradient_norm": 1.0,
        "clipped": None,
        "learning_rates": [0.1],
        "skipped": False,
    }
    return line("step", seconds=seconds, **{**usual, "step": number, "loss": loss, **more})


def start(**more: Any) -> bytes:
    """Return a first line."""
    return json.dumps({**START, **more}, separators=(",", ":")).encode() + b"\n"


def span(event: str, seconds: float, number: int, name: str = "load") -> bytes:
    """Return the line for the start or end of a phase."""
    return line("phase", seconds=seconds, rank=0, event=event, step=number, name=name, position=None)


def hostile_logs() -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each."""
    markup = dict.fromkeys(("geometry", "strategy", "precision", "device", "dtype"), MARKUP)
    yield "markup in every text", b"".join((
        start(**markup, decisions={MARKUP: MARKUP}, versions={MARKUP: MARKUP}),
        span("begin", 1.5, 0, MARKUP), span("end", 1.6, 0, MARKUP), span("begin", 1.6, 0), span("end", 1.7, 0),
        line("diagnosis", rank=0, step=0, level=MARKUP, code=MARKUP, message=MARKUP, remedy=MARKUP),
        line("evaluate", step=1, num_samples=1, metrics={MARKUP: 0.5}),
        line("checkpoint", step=1, event=MARKUP, path=MARKUP, num_bytes=1, message=MARKUP),
        line("memory", rank=0, step=0, allocated_bytes=9, peak_bytes=9, category_bytes={MARKUP: 3}),
        step(0), line("end", status=MARKUP, num_steps=1, message=MARKUP, digest=None),
    ))  # fmt: skip
    yield "a line of 9 MB", start() + line("diagnosis", message="a" * 9_000_000) + step(0)
    yield "5 MB without an end", start() + step(0) + b"x" * 5_000_000
    yield "nested 100,000 deep", start() + b'{"version":1,"kind":' + b"[" * 100_000 + b"\n" + step(0)
    yield (
        "an integer of 5,000 digits",
        start(seed=10**4200) + step(0, loss=10**4200) + step(1).replace(b"1.0", b"9" * 5000),
    )
    yield "numbers that JSON lacks", start() + step(0).replace(b"1.0", b"NaN") + step(1).replace(b"1.0", b"Infinity")
    yield "bytes that are not text", start() + bytes(range(256)) * 40 + b"\n" + step(0)
    yield "zeros", b"\0" * 100_000 + b"\n" + start() + step(0)
    yield (
        "invalid steps",
        start() + b"".join(map(step, (-1, 1.5, "2", None, True, [3], 2**70, {"4": 4}))) + step(0),
    )
    yield "steps that go back and forth", start() + (step(1) + step(0)) * 10_000
    yield "steps far apart", start() + step(0) + step(2**53 - 2, seconds=3.0) + step(2**53 - 1, seconds=4.0)
    yield (
        "clocks that jump",
        start() + b"".join(step(n, seconds=t) for n, t in enumerate((1e308, -1e308, 5, 1e14, "x", 6))),
    )
    yield (
        "losses out of all bounds",
        start() + b"".join(step(n, v) for n, v in enumerate((1e308, 1e-308, -1e308, "NaN", "Infinity", 0))),
    )
    yield "samples out of all bounds", start() + b"".join(step(n, num_samples=2**53 - 1) for n in range(5))
    yield (
        "10,000 metrics",
        start() + step(0) + line("evaluate", step=1, metrics={f"m{n}": n for n in range(10_000)}) * 3,
    )
    yield "names of objects", start() + step(0) + b"".join(
        line("evaluate", step=n, metrics={"__proto__": 1, "constructor": 2, "": 3}) for n in range(3)
    )  # fmt: skip
    yield (
        "text that turns direction",
        start(geometry="abc\u202edcba\u2066\x1b[2J\0") + line("diagnosis", message="\u202e\r\b") + step(0),
    )
    yield "half a character", start() + line("diagnosis", message="\ud800", code="\udfff") + step(0)
    yield "other versions", b"".join(start(version=v) for v in (0, 2, "1", None, [1])) + start() + step(0)
    yield "lists for objects", start(decisions=[1], versions=2) + b"[1,2]\n3\nnull\n" + step(0, learning_rates={"a": 1})
    yield "invalid sizes", start(world_size=2**60, rank=-5) + step(0) + line(
        "memory", rank=0, step=0, peak_bytes=2**53 - 1, allocated_bytes=-1, limit_bytes=-7,
        category_bytes={"a": -3, "b": 2**80, "c": 5},
    )  # fmt: skip
    begins = b"".join(span("begin", 1.0 + n, 0, f"p{n}") for n in range(20_000))
    yield "20,000 begins without an end", start() + begins + step(0)
    backward = (
        span("begin", 5.0, 0) + span("end", 1.0, 0) + span("begin", 1.0, 0) + line("phase", seconds="x", event="end")
    )
    yield "spans that end before they begin", start() + backward + step(0)
    yield (
        "diagnoses without number",
        start() + line("diagnosis", message=MARKUP * 100, step=1, level="error") * 5_000 + step(0),
    )
