"""A worker with misbehaving experiments and the real ones: `main([FILE])` records its connections."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from anybatch_guide.catalogue import experiments
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.worker import work
from guide.tests.connections import watch_connections

NUM_STEPS, NUM_MICRO_BATCHES = 3, 4
FLOOD = 30_000
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028]]>'\"&"


def micro_batch(event: str, step: int, position: int) -> dict[str, object]:
    """Return a line like the engine's."""
    return {"kind": "micro_batch", "event": event, "step": step, "position": position}


def counting(emit: Emit) -> Data:
    """Emit steps of micro-batches like the engine."""
    emit({"kind": "start"})
    for step in range(NUM_STEPS):
        for position in range(NUM_MICRO_BATCHES):
            emit(micro_batch("begin", step, position))
            emit(micro_batch("end", step, position))
        emit({"kind": "step", "step": step, "loss": float("nan")})
    emit({"kind": "end"})
    return {"steps": NUM_STEPS, "worst": float("inf")}


def endless(emit: Emit) -> Data:
    """Emit progress forever, and ignore all errors."""
    done = 0
    while True:
        with suppress(Exception):
            emit({"kind": "guide.progress", "done": done, "of": 0, "what": "endless"})
        done += 1
        time.sleep(0.001)


def stuck(emit: Emit) -> Data:
    """Emit only one event, so that it cannot be cancelled normally."""
    emit({"kind": "start"})
    while True:
        signal.pause()


def deaf(emit: Emit) -> Data:
    """Ignore SIGTERM as well."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return stuck(emit)


def greedy(emit: Emit) -> Data:
    """Take a lot of memory, and wait."""
    held = bytearray(400 * 2**20)
    held[:: 2**12] = b"x" * len(held[:: 2**12])
    return stuck(emit)


def failing(emit: Emit) -> Data:
    """Fail with an ordinary exception."""
    emit({"kind": "start"})
    return {"never": 1 / 0}


def noisy(emit: Emit) -> Data:
    """Print fake answers, and emit invalid lines."""
    sys.stdout.write('{"id": "x", "done": true}\nnoise\n')
    sys.stdout.flush()
    emit({"no": "kind"})
    emit({"kind": "start", "long": "x" * 100_000})
    emit({"kind": "start", "text": HOSTILE})
    return {"text": HOSTILE}


def flood(emit: Emit) -> Data:
    """Emit more than a slow page can follow."""
    for number in range(FLOOD):
        emit(micro_batch("end", 0, number))
    emit({"kind": "step", "step": 0})
    return {}


EXPERIMENTS: tuple[Callable[[Emit], Data], ...] = (*(counting, endless, stuck, deaf, greedy, failing, noisy, flood),)


WARMED: list[str] = []


def offered() -> Mapping[str, Experiment]:
    """Return the guide's experiments and the misbehaving ones."""
    own = {run.__name__: Experiment(name=run.__name__, question="?", run=run, seconds=1.0) for run in EXPERIMENTS}
    own["warmed"] = Experiment(name="warmed", question="?", run=lambda _tell: {"warmed": WARMED}, seconds=1.0)
    only_recorded = Experiment(name="only_recorded", question="?", run=counting, seconds=600.0, runs_here=False)
    return {**experiments(), **own, "only_recorded": only_recorded}


def main(words: Sequence[str]) -> None:
    """Run as a worker."""
    if words:
        watch_connections(Path(words[0]))
    work(offered, lambda: WARMED.append("once"))
