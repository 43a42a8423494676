"""The cost of filling a GPU: speed, allocator retries and unused reserved memory, at 60 to 99% of its memory.

One training step is run under smaller and smaller limits (`torch.cuda.set_per_process_memory_fraction`), so the work is
the same at every fill (the step's peak without a limit, divided by the limit). Fills alternate, round by round, and
each speed is compared with 60% in the same round; unused reserved memory is a share of the limit.
Micro-batches are of one shape, or of a random width each; the allocator's segments are torch's default ones, or
expandable, in a separate process.

Without a CUDA device it prints a message and exits with status 0. `--device cpu` runs a tiny model under a ledger of
tensor memory that enforces the limit; this measures nothing, but finds mistakes in this file.

    python benchmarks/headroom.py [--device cpu] [--rounds 3] [--out benchmarks/results/NAME.md]
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import report
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.memory.device_memory import begin_peak, memory_in_use
from anybatch.memory.ledger import MemoryLedger

FILLS = (0.60, 0.70, 0.80, 0.85, 0.90, 0.95, 0.97, 0.99)
SEGMENTS = ("default", "expandable")
SHAPES = ("fixed", "variable")
NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 8
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the model and its work."""

    width: int
    num_layers: int
    num_words: int
    num_places: int
    num_steps: int


SCALES = {"cuda:0": Scale(1024, 12, 32_000, 512, 10), "cpu": Scale(16, 2, 100, 16, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Measurements of some steps under a limit.

    Attributes:
        seconds: time of all steps; None if they ran out of memory.
        num_retries: how often the allocator freed its cache, per step.
        peak_bytes: peak of allocated memory.
        reserved_bytes: peak of reserved memory.
    """

    seconds: float | None
    num_retries: float
    peak_bytes: int
    reserved_bytes: int


class Device(Protocol):
    """A device with a limit and counters."""

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Limit memory to this many bytes, or not at all for None, starting with an empty cache."""
        ...

    def begin(self) -> None:
        """Start to count."""
        ...

    def read(self) -> tuple[int, int, int]:
        """Return the peak, the reserved peak, and retries since `begin`, once the device is idle."""
        ...


class Cuda:
    """The first CUDA device."""

    def __init__(self) -> None:
        self._device = torch.device("cuda:0")
        self._total_bytes = torch.cuda.get_device_properties(self._device).total_memory

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Limit the allocator."""
        gc.collect()
        torch.cuda.empty_cache()
        share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def begin(self) -> None:
        """Reset the peaks."""
        torch.cuda.synchronize()
        begin_peak(self._device)

    def read(self) -> tuple[int, int, int]:
        """Wait for the device and read the allocator's counters."""
        torch.cuda.synchronize()
        found = memory_in_use(self._device)
        assert found is not None
        return found.peak_bytes, torch.cuda.max_memory_reserved(self._device), found.num_retries


class Rehearsal:
    """A CPU with a tensor ledger that enforces the limit. It reserves nothing, and never retries."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._ledger = MemoryLedger()

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Record tensors in a ledger and enforce the limit."""

        def refuse(held_bytes: int, num_bytes: int, operation: str) -> None:
            if limit_bytes is not None and held_bytes > limit_bytes:
                message = (
                    f"{operation} asks for {num_bytes} bytes, and {held_bytes - num_bytes} of {limit_bytes} are held"
                )
                raise torch.OutOfMemoryError(message)

        with MemoryLedger(on_allocation=refuse) as self._ledger:
            yield
        self._ledger.forget()

    def begin(self) -> None:
        """Reset the peak."""
        self._ledger.peak_bytes = self._ledger.held_bytes

    def read(self) -> tuple[int, int, int]:
        """Return the ledger's peak."""
        return self._ledger.peak_bytes, self._ledger.peak_bytes, 0


class Texts:
    """An effective batch of token sequences, of one width or of a random width for each micro-batch."""

    seed = 0
    end = Position(0, 0)
    sample_ids = range(NUM_MICRO_BATCHES * MICRO_BATCH_SIZE)

    def __init__(self, scale: Scale, number: int, *, variable: bool) -> None:
        self._scale, self._variable = scale, variable
        self._generator = torch.Generator().manual_seed(number)

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[torch.Tensor]:
        """Yield micro-batches of tokens; the second one, with gradients already allocated, has the maximum width."""
        del later_units
        for positions in units:
            places = self._scale.num_places
            if self._variable and positions[0] != MICRO_BATCH_SIZE:
                places = int(torch.randint(places // 2, places + 1, (), generator=self._generator))
            yield torch.randint(self._scale.num_words, (len(positions), places), generator=self._generator)


class Model(nn.Module):
    """A transformer that predicts its input, since only its memory matters."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.words = nn.Embedding(scale.num_words, scale.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(scale.width, scale.width // 8, 4 * scale.width, dropout=0.0, batch_first=True)
            for _ in range(scale.num_layers)
        )
        self.head = nn.Linear(scale.width, scale.num_words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a logit for each position and token."""
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over samples."""
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def run(device: Device, scale: Scale, *, name: str, variable: bool, limit_bytes: int | None) -> Reading:
    """Train a new model for some steps under a limit; return its measurements, and whether it ran out of memory."""
    with device.limited(limit_bytes):
        try:
            return _steps(device, scale, name=name, variable=variable)
        except torch.OutOfMemoryError:
            peak, reserved, retries = device.read()
            return Reading(seconds=None, num_retries=float(retries), peak_bytes=peak, reserved_bytes=reserved)


def _steps(device: Device, scale: Scale, *, name: str, variable: bool) -> Reading:
    torch.manual_seed(0)
    model = Model(scale)
    with ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=1e-4),
        ab.mean_over_samples(loss),
        micro_batch_size=MICRO_BATCH_SIZE,
        precision="bf16",
        check_loss=False,
        world=ab.World.from_environment(device=name),
    ) as engine:
        for number in range(WARM_UP_STEPS):
            engine.step(Texts(scale, number, variable=variable))
        _, _, before = device.read()
        device.begin()
        start = time.perf_counter()
        for number in range(scale.num_steps):
            engine.step(Texts(scale, WARM_UP_STEPS + number, variable=variable))
        peak, reserved, after = device.read()
        seconds = time.perf_counter() - start
    num_retries = (after - before) / scale.num_steps
    return Reading(seconds=seconds, num_retries=num_retries, peak_bytes=peak, reserved_bytes=reserved)


def measure(name: str, *, rounds: int) -> dict[str, Any]:
    """Return, by micro-batch shape, the peak without a limit and the readings of each fill by round."""
    device: Device = Rehearsal() if name == "cpu" else Cuda()
    scale = SCALES[name]
    found: dict[str, Any] = {}
    for shapes in SHAPES:
        variable = shapes == "variable"
        free = run(device, scale, name=name, variable=variable, limit_bytes=None)
        readings: dict[str, list[dict[str, Any]]] = {str(fill): [] for fill in FILLS}
        for _ in range(rounds):
            for fill in FILLS:
                limit = int(free.peak_bytes / fill)
                one = run(device, scale, name=name, variable=variable, limit_bytes=limit)
                readings[str(fill)].append(asdict(one))
        found[shapes] = {"peak_bytes": free.peak_bytes, "readings": readings}
    return found


def in_a_process(segments: str, name: str, rounds: int) -> dict[str, Any]:
    """Measure in a process with one kind of allocator segments."""
    environment = dict(os.environ)
    if segments == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, str(Path(__file__)), "--device", name, "--rounds", str(rounds), "--child"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each kind of segments, shapes and fill."""
    lines = [
        "| segments | shapes | fill | speed, of that at 60% (quartiles) | retries per step | reserved in vain |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for segments, by_shapes in found.items():
        for shapes, measured in by_shapes.items():
            readings = {float(fill): [Reading(**one) for one in rows] for fill, rows in measured["readings"].items()}
            for fill, rows in readings.items():
                limit = measured["peak_bytes"] / fill
                lines.append(
                    f"| {segments} | {shapes} | {100 * fill:.0f}% | {cells(rows, readings[FILLS[0]], limit)} |"
                )
    return lines


def cells(rows: Sequence[Reading], reference: Sequence[Reading], limit_bytes: float) -> str:
    """Return a line of the table: speed, retries, and memory reserved above the peak."""
    pairs = [(one.seconds, two.seconds) for one, two in zip(rows, reference, strict=True)]
    ratios = [two / one for one, two in pairs if one is not None and two is not None]
    num_failed = sum(one.seconds is None for one in rows)
    retries = statistics.mean(one.num_retries for one in rows)
    idle = statistics.median((one.reserved_bytes - one.peak_bytes) / limit_bytes for one in rows)
    failed = f"out of memory in {num_failed} of {len(rows)}"
    if not ratios:
        return f"{failed} | {retries:.1f} | {100 * idle:.1f}%"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    speed = f"{100 * middle:.1f}% ({100 * low:.1f} to {100 * high:.1f})"
    return f"{speed}{f', {failed}' * bool(num_failed)} | {retries:.1f} | {100 * idle:.1f}%"


def main() -> int:
    """Measure each kind of segments in a separate process, print the table, and write it to a file if requested."""
    given = options().parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print("needs a CUDA device, and there is none: nothing was measured (--device cpu tries the program out)")
        return 0
    if given.child:
        print(json.dumps(measure(given.device, rounds=given.rounds)))
        return 0
    found = {segments: in_a_process(segments, given.device, given.rounds) for segments in SEGMENTS}
    setting = "a rehearsal on a CPU, which measures nothing" if given.device == "cpu" else "one GPU"
    report.publish(
        table(found),
        title="What it costs to fill a GPU",
        command=f"python benchmarks/headroom.py --rounds {given.rounds}",
        setting=setting,
        out=given.out,
    )
    return 0


def options() -> argparse.ArgumentParser:
    """Return the options."""
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", choices=tuple(SCALES), help="cpu: try the program out")
    parser.add_argument("--rounds", type=int, default=3, help="how often each fill is measured (default: 3)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
