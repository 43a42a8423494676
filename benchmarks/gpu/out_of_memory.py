"""Stage 4: real out-of-memory errors, and the size that "auto" chooses under a budget.

On a GPU the budget is `torch.cuda.set_per_process_memory_fraction`, so that torch's allocator raises. A CPU has no such
limit, and `anybatch.testing.memory_budget` counts tensors instead.
"""

import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from gpu.stage import Row, Rows, Setting
from gpu.two_models import Batch, Case, cases, seconds_of
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import DoesNotFitError, MemoryExhaustedError
from anybatch.records import MicroBatchRecord, OutOfMemoryRecord
from anybatch.testing import memory_budget

TITLE = "Out of memory"
NUM_STEPS = 3
MIB, GIB = 2**20, 2**30
UNLIMITED = 1 << 50


class GpuMemory:
    """torch's allocator on the GPU, with a limit on its reserved bytes."""

    def limit(self, num_bytes: int) -> None:
        """Raise an out-of-memory error beyond this."""
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes allocated and reserved."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def now(self) -> tuple[int, int, int]:
        """Return bytes allocated, bytes reserved but not allocated, and bytes of inactive split blocks."""
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return allocated, reserved - allocated, torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)


class SimulatedMemory:
    """The tensors of a CPU under a simulated budget, which nothing fragments."""

    def __init__(self, budget: Any) -> None:  # noqa: ANN401 (what `memory_budget` yields)
        self._budget = budget

    def limit(self, num_bytes: int) -> None:
        """Raise an out-of-memory error beyond this."""
        self._budget.num_bytes = num_bytes

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes allocated and reserved."""
        return self._budget.peak_bytes, self._budget.peak_bytes

    def now(self) -> tuple[int, int, int]:
        """Return bytes allocated; nothing is reserved and nothing is split."""
        return self._budget.held_bytes, 0, 0


Memory = GpuMemory | SimulatedMemory


@contextmanager
def limited(setting: Setting, num_bytes: int, *holders: Any) -> Iterator[Memory]:  # noqa: ANN401 (models, optimizers)
    """Limit memory to a number of bytes."""
    gc.collect()
    if not setting.on_gpu:
        with memory_budget(num_bytes, *holders) as budget:
            yield SimulatedMemory(budget)
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    memory = GpuMemory()
    memory.limit(num_bytes)
    try:
        yield memory
    finally:
        memory.limit(UNLIMITED)


class Watch:
    """Observes a run: where memory ran out, which samples count, and peaks.

    Attributes:
        memory: what peaks are read from.
        peaks: after each forward, and before each but the first: after a backward. Bytes allocated and reserved.
        failed_in: "forward" or "backward" for each error.
    """

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        self.memory: Memory | None = None
        self.peaks: list[tuple[int, int]] = []
        self.failed_in: list[str] = []
        self._loss = loss
        self._place = ""
        self._counted: dict[int, list[int]] = {}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss and note how far the micro-batch is."""
        if self._place and self.memory is not None:
            self.peaks.append(self.memory.peaks())
        self._place = "forward"
        value = self._loss(model, batch)
        self._place = "backward"
        if self.memory is not None:
            self.peaks.append(self.memory.peaks())
        return value

    def observe(self, record: object) -> None:
        """Take a record of the engine."""
        if isinstance(record, OutOfMemoryRecord):
            self.failed_in.append(self._place)
            self._counted.pop(record.step, None)  # the step is repeated
        elif isinstance(record, MicroBatchRecord) and record.event == "end":
            self._counted.setdefault(record.step, []).append(record.num_samples)

    @property
    def num_samples(self) -> int:
        """Samples in all updates."""
        return sum(map(sum, self._counted.values()))


def new_engine(case: Case, model: nn.Module, size: Any, watch: Watch | None = None) -> tuple[ab.Engine, Any]:  # noqa: ANN401
    """Return an engine with AdamW, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ab.Engine(
        model,
        optimizer,
        ab.mean_over_samples(case.loss if watch is None else watch.loss),
        micro_batch_size=size,
        precision=case.precision,
        norms="keep",
        check_loss=False,
        observer=watch,
    )
    return engine, optimizer


@dataclass(kw_only=True)
class Run:
    """Results of a run.

    Attributes:
        refused: the error of a first step that raised, and whether parameters were as before.
        now: bytes after the last step: allocated, reserved but not allocated, inactive in split blocks.
        seconds: of the first step that was made.
    """

    state: Mapping[str, Tensor] = field(default_factory=dict)
    watch: Watch
    peaks: tuple[int, int]
    now: tuple[int, int, int]
    seconds: float
    size: int
    refused: str = ""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of parameters and buffers on the host."""
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def train(case: Case, setting: Setting, size: int, num_bytes: int, *, room: int | None = None) -> Run:
    """Make some steps on the same two micro-batches of `case.size` samples under a budget.

    Args:
        case: the model.
        setting: where.
        size: of micro-batches.
        num_bytes: the budget.
        room: bytes that a first step, which is meant to raise, may reserve beyond the weights; None: no such step.
    """
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()  # weights inside larger cached blocks would keep these reserved
    model, watch, refused = case.new_model(setting.device), Watch(case.loss), ""
    batch = case.batch(2 * case.size)
    engine, optimizer = new_engine(case, model, size, watch)
    before = {} if room is None else state_of(model)
    with warnings.catch_warnings(), limited(setting, num_bytes, model, optimizer) as memory, engine:
        warnings.simplefilter("ignore")  # of the smaller size
        watch.memory = memory
        if room is not None:
            memory.limit(sum(memory.now()[:2]) + room)
            try:
                engine.step(batch)
            except DoesNotFitError as error:
                refused = f"{type(error).__name__}, {len(optimizer.state)} states left"
            memory.limit(num_bytes)
            refused += ", parameters as before" if equal(state_of(model), before) else ", PARAMETERS CHANGED"
            before.clear()
        setting.synchronize()
        begun = time.perf_counter()
        plan = engine.step(batch).plan
        setting.synchronize()
        seconds = time.perf_counter() - begun
        for _ in range(NUM_STEPS - 1):
            plan = engine.step(batch).plan
        setting.synchronize()
        gc.collect()
        run = Run(
            watch=watch,
            peaks=memory.peaks(),
            now=memory.now(),
            seconds=seconds,
            size=max(unit.num_samples for unit in plan.units),
            refused=refused,
        )
        watch.memory = None
    return replace(run, state=state_of(model))


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use deterministic kernels only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # as torch.use_deterministic_algorithms, without importing inductor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def continued_runs(setting: Setting) -> Rows:
    """Compare runs that run out of memory in forward, backward and update with runs that never do."""
    if not setting.on_gpu:
        gc.freeze()  # a rehearsal spends most of its time on collecting garbage otherwise
    with deterministic():
        for case in cases(setting):
            large, small = (train(case, setting, size, UNLIMITED) for size in (case.size, case.size // 2))
            forward, backward = large.watch.peaks[:2]  # of the first micro-batch
            # Cases that must fit need at most the reserved bytes; cases that must fail need the allocated ones.
            limits = {"forward": (small.peaks[1] + forward[0]) // 2, "backward": (forward[1] + backward[0]) // 2}
            for name, limit in limits.items():
                print(f"  {case.name}: {name}, {limit / GIB:.2f} GiB", flush=True)
                found = train(case, setting, case.size, limit)
                yield row_of_run(case, found, train(case, setting, found.size, limit), limit)
            print(f"  {case.name}: update", flush=True)
            yield row_of_update(case, setting, large)


def row_of_run(case: Case, found: Run, expected: Run, limit: int) -> Row:
    """Return the row of a run against the run that began with its last size."""
    total = NUM_STEPS * 2 * case.size
    differing = sum(not torch.equal(value, expected.state[name]) for name, value in found.state.items())
    pairs = [f"{one / MIB:,.1f} / {other / MIB:,.1f}" for one, other in zip(found.now, expected.now, strict=True)]
    return Row(
        "A run that runs out of memory / a run that begins with the smaller micro-batch, 3 steps of AdamW",
        {
            "model": case.name,
            "budget, GiB": f"{limit / GIB:.3f}",
            "failed in": ", ".join(found.watch.failed_in) or "nothing",
            "micro-batch": f"{case.size} to {found.size}",
            "tensors that differ": f"{differing} of {len(found.state)}",
            "samples counted": f"{found.watch.num_samples} of {total}",
            "allocated afterwards, MiB": pairs[0],
            "reserved but free, MiB": pairs[1],
            "inactive split blocks, MiB": pairs[2],
            "first step, ms": f"{found.seconds * 1e3:,.0f} / {expected.seconds * 1e3:,.0f}",
        },
    )


def row_of_update(case: Case, setting: Setting, expected: Run) -> Row:
    """Return the row of a run whose optimizer state does not fit at first, against a run with enough memory."""
    weights = sum(parameter.nbytes for parameter in case.new_model("meta").parameters())
    found = train(case, setting, case.size, UNLIMITED, room=weights)
    return Row(
        "AdamW's state does not fit before the first update; then without a budget / a run without a budget",
        {
            "model": case.name,
            "state, MiB": f"{2 * weights / MIB:,.1f}",
            "room for it, MiB": f"{weights / MIB:,.1f}",
            "first step": found.refused,
            "final tensors equal": "yes" if equal(found.state, expected.state) else "no",
            "allocated afterwards, MiB": f"{found.now[0] / MIB:,.1f} / {expected.now[0] / MIB:,.1f}",
            "reserved but free, MiB": f"{found.now[1] / MIB:,.1f} / {expected.now[1] / MIB:,.1f}",
        },
    )


def fits(case: Case, setting: Setting, size: int, batch: Batch, num_bytes: int) -> bool:
    """Return whether a step with micro-batches of this size fits into a budget."""
    model = case.new_model(setting.device)
    engine, optimizer = new_engine(case, model, size)
    with warnings.catch_warnings(), limited(setting, num_bytes, model, optimizer), engine:
        warnings.simplefilter("ignore")
        try:
            return not engine.step(batch).too_large
        except MemoryExhaustedError:
            return False


def chosen(case: Case, setting: Setting, batch: Batch, num_bytes: int) -> tuple[int, float, float]:
    """Return the size of "auto" under a budget, the seconds of its search, and of a later step."""
    model = case.new_model(setting.device)
    engine, optimizer = new_engine(case, model, "auto")
    seconds, sizes = [], [0]
    with warnings.catch_warnings(), limited(setting, num_bytes, model, optimizer), engine:
        warnings.simplefilter("ignore")
        for _ in range(4):
            setting.synchronize()
            begun = time.perf_counter()
            report = engine.step(batch)
            setting.synchronize()
            seconds.append(time.perf_counter() - begun)
            sizes = [unit.num_samples for unit in report.plan.units]
        print(f"  {case.name}: {engine.decisions['micro_batch_size']}", flush=True)
    later = statistics.median(seconds[1:])
    return max(sizes), seconds[0] - later, later


def auto_size(setting: Setting) -> Rows:
    """Compare the size of "auto" with a sweep over powers of two that fit into the same budget."""
    for case in cases(setting):
        whole = 4 * case.size
        batch, budget = case.batch(whole), train(case, setting, case.size, UNLIMITED).peaks[1]
        size, search_seconds, later = chosen(case, setting, batch, budget)
        sizes = [whole >> power for power in range(6) if whole >> power]
        largest = next((one for one in sizes if fits(case, setting, one, batch, budget)), size)
        engines = {
            one: new_engine(case, case.new_model(setting.device), one)[0]
            for one in sorted({size, *(one for one in sizes if one <= largest)})
        }
        print(f"  {case.name}: sweep over {list(engines)}", flush=True)
        steps = {one: partial(engine.step, batch) for one, engine in engines.items()}
        seconds = seconds_of(setting, steps, setting.pick(4, 3, 2))
        medians = {one: statistics.median(values) for one, values in seconds.items()}
        best = min(medians, key=medians.__getitem__)
        part = statistics.median(a / b for a, b in zip(seconds[best], seconds[size], strict=True))
        yield Row(
            '"auto" / the best of a sweep over micro-batch sizes under the same budget',
            {
                "model": case.name,
                "samples of a step": str(whole),
                "budget, GiB": f"{budget / GIB:.3f}",
                '"auto"': str(size),
                "best of the sweep": str(best),
                "largest that fits": str(largest),
                'samples/s, "auto" / best': f"{part:.1%}",
                "samples/s, best": f"{whole / medians[best]:,.0f}",
                "search, s": f"{search_seconds:.2f}",
                "search, in steps": f"{search_seconds / later:.0f}",
                "sweep, samples/s": ", ".join(f"{one}: {whole / value:,.0f}" for one, value in medians.items()),
            },
        )
        del engines, steps
        gc.collect()


CHECKS = (continued_runs, auto_size)
