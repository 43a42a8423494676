"""Is the batch size that `ab.advise` calls best the one that a sweep finds? Three small jobs on this machine.

For every effective batch size of a sweep, in micro-batches of 16 at most, the learning rate is tuned on a grid (by
factors of 2). The sweep counts the steps to a fixed held-out loss: the median over seeds. Time is this number of steps
times the seconds of the engine's step at that size; steps of all sizes are timed alternately. `ab.advise` sees one run
at a batch size of 64 and its best rate, which stops at the same loss; 64 may be the best size by chance, so `ab.advise`
also sees a run at 512.

    python benchmarks/advise.py [--job regression] [--sweep FILE [--count]] [--out benchmarks/results/NAME.md]
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.core.gradient_noise import GradientNoise
from anybatch.diagnostics.advise import Advice
from anybatch.recipes.digits import Digits

SIZES, MICRO_BATCH, START = (4, 8, 16, 32, 64, 128, 256, 512), 16, 64
SEEDS, ROUNDS = 3, 12
Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]
OptimizerOf = Callable[[nn.Module, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    """A job of about a second: model, data, the loss to reach, and rates to try at 64 samples."""

    model: Callable[[], nn.Module]
    train: Batch
    held_out: Batch
    loss: Loss
    target: float
    optimizer: OptimizerOf
    rate: float
    most_samples: int


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.99))


def classify(model: Any, batch: Batch) -> Tensor:  # noqa: ANN401 (a module)
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def squared(model: Any, batch: Batch) -> Tensor:  # noqa: ANN401 (a module)
    """Return the mean squared error."""
    return functional.mse_loss(model(batch["x"]), batch["y"])


def digits() -> Task:
    """Return a network of two layers on the images of the recipe `digits`."""
    train, held_out = Digits("train"), Digits("held_out")
    return Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)),
        train={"x": train.images, "y": train.labels},
        held_out={"x": held_out.images, "y": held_out.labels},
        loss=classify,
        target=0.12,
        optimizer=sgd,
        rate=0.1,
        most_samples=60_000,
    )


def text() -> Task:
    """Return a network that predicts a byte of torch's sources from the eight bytes before it."""
    source = torch.cat([_bytes_of(module) for module in (nn.functional, nn.modules.activation, nn.modules.rnn)])
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(source) - 9, (60_000,), generator=generator)
    windows = torch.stack([source[start : start + 9] for start in starts])
    data = {"x": windows[:, :-1], "y": windows[:, -1]}
    return Task(
        model=lambda: nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 256)
        ),
        train={name: value[:58_000] for name, value in data.items()},
        held_out={name: value[58_000:] for name, value in data.items()},
        loss=classify,
        target=2.6,
        optimizer=adam,
        rate=0.005,
        most_samples=40_000,
    )


def regression() -> Task:
    """Return a network of two layers that fits a noisy function of 8 numbers."""
    torch.manual_seed(0)
    x, teacher = torch.randn(42_000, 8), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        y = 8 * teacher(4 * x) + torch.randn(42_000, 1)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 1)),
        train={"x": x[:40_000], "y": y[:40_000]},
        held_out={"x": x[40_000:], "y": y[40_000:]},
        loss=squared,
        target=1.5,
        optimizer=sgd,
        rate=0.02,
        most_samples=80_000,
    )


TASKS = {"digits": digits, "text": text, "regression": regression}


def _bytes_of(module: Any) -> Tensor:  # noqa: ANN401 (a module of Python's)
    with open(module.__file__, "rb") as file:  # noqa: PTH123 (bytes of a source)
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()


def batches(data: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches in a new order for each pass; drop an incomplete last batch."""
    generator = torch.Generator().manual_seed(seed)
    number = len(data["x"])
    while True:
        order = torch.randperm(number, generator=generator)
        for start in range(0, number - size + 1, size):
            chosen = order[start : start + size]
            yield {name: value[chosen] for name, value in data.items()}


def steps_to_loss(task: Task, size: int, rate: float, seed: int, max_steps: int) -> int | None:
    """Return the number of steps to the task's loss, None above `max_steps`. Accumulation would not change it."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer, every = task.optimizer(model, rate), max(1, 64 // size)
    for step, batch in enumerate(batches(task.train, size, seed), start=1):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                found = float(task.loss(model, task.held_out))
            if found <= task.target:
                return step
            if not math.isfinite(found):
                return None
        if step >= max_steps:
            return None
    return None


def best_of_rates(task: Task, size: int) -> tuple[float, float]:
    """Return the fewest steps to the loss (median over seeds), and the learning rate that needs them."""
    found: dict[float, float] = {}

    def tried(power: float) -> float:
        if power not in found:
            # A run is stopped at twice the steps of the best rate so far.
            most = int(min(max(400, task.most_samples // size), 2 * min(found.values(), default=math.inf)))
            steps = [steps_to_loss(task, size, task.rate * 2.0**power, seed, most) for seed in range(SEEDS)]
            found[power] = statistics.median(math.inf if one is None else one for one in steps)
        return found[power]

    # Search around the rate of the square root rule; extend the grid as long as its end is the best.
    middle = round(math.log2(size / START) / 2)
    for power in range(middle - 2, middle + 3):
        tried(power)
    while (least := min(found, key=lambda one: found[one])) in (min(found), max(found)) and len(found) < 12:
        tried(least - 1 if least == min(found) else least + 1)
    return found[least], task.rate * 2.0**least


def engine_of(task: Task, rate: float, noise: GradientNoise | None = None) -> ab.Engine:
    """Return an engine with micro-batches of 16 at most."""
    torch.manual_seed(0)
    model = task.model()
    mean = ab.mean_over_samples(task.loss)
    return ab.Engine(
        model, task.optimizer(model, rate), mean, micro_batch_size=MICRO_BATCH, noise=noise, check_loss=False
    )


def step_seconds(task: Task) -> dict[int, float]:
    """Return the seconds of a step by batch size: medians of alternating steps."""
    engines = {size: engine_of(task, 1e-6) for size in SIZES}
    data = {size: next(batches(task.train, size, 0)) for size in SIZES}
    taken: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(ROUNDS + 3):
        for size, engine in engines.items():
            begun = time.perf_counter()
            engine.step(data[size])
            if number >= 3:
                taken[size].append(time.perf_counter() - begun)
    return {size: statistics.median(seconds) for size, seconds in taken.items()}


def advised(task: Task, size: int, rate: float, steps: int) -> Advice:
    """Return the advice of `ab.advise` after one run at a batch size."""
    engine = engine_of(task, rate, GradientNoise(every=2, decay=0.98))
    return ab.advise(engine, batches(task.train, size, 1), steps=max(40, steps))


def swept(name: str, kept: Path | None) -> dict[int, tuple[float, float]]:
    """Return steps and rate by batch size, from the file of an earlier call, or counted now."""
    task = TASKS[name]()
    found = {size: report.kept(kept, f"{name}, {size}", partial(best_of_rates, task, size)) for size in SIZES}
    return {size: (steps, rate) for size, (steps, rate) in found.items()}


def job_lines(name: str, kept: Path | None) -> tuple[list[str], str]:
    """Sweep a job, get advice on it, and return its lines and the verdict."""
    task = TASKS[name]()
    found = swept(name, kept)
    seconds = step_seconds(task)
    advice, other = (
        advised(task, size, found[size][1], 40 if math.isinf(found[size][0]) else round(found[size][0]))
        for size in (START, SIZES[-1])
    )
    totals = {size: steps * seconds[size] for size, (steps, _) in found.items()}
    fastest = min(totals, key=lambda size: totals[size])
    predicted = {size: advice.cost.seconds(size, by=START) for size in SIZES}
    lines = []
    for size, (steps, rate) in found.items():
        lines.append(
            f"| {name} | {size} | {rate:.4g} | {steps:.0f} | {steps * size:.0f} | {1e3 * seconds[size]:.2f} | "
            f"{totals[size]:.2f} | {totals[size] / totals[START]:.2f} | {predicted[size]:.2f} |"
        )
    nearest = min(SIZES, key=lambda size: abs(math.log2(size / max(1.0, advice.best))))
    low, high = advice.best_interval
    crit_low, crit_high = advice.interval
    verdict = (
        f"- {name}: advised {advice.best:.0f} samples ({low:.0f} to {high:.0f}; noise scale "
        f"{advice.cost.critical_batch_size:.0f}, {crit_low:.0f} to {crit_high:.0f}; overhead "
        f"{1e3 * advice.cost.overhead_seconds:.2f} ms, {1e3 * advice.cost.seconds_per_sample:.3f} ms a sample); the "
        f"sweep's fastest is {fastest}. Of the sweep's sizes {nearest} is the nearest to the advice, and takes "
        f"{totals[nearest] / totals[fastest]:.2f} times the least time; the present {START} took "
        f"{totals[START] / totals[fastest]:.2f} times. Steps and samples of the sweep fit a critical batch of "
        f"{fitted(found):.0f}. A run at {SIZES[-1]} advises {other.best:.0f} ({other.best_interval[0]:.0f} to "
        f"{other.best_interval[1]:.0f}; noise scale {other.cost.critical_batch_size:.0f})."
    )
    print("\n".join([*lines, verdict]), flush=True)
    return lines, verdict


def fitted(found: dict[int, tuple[float, float]]) -> float:
    """Return the critical batch size for which steps(B) = least (1 + B_crit / B) fits best in logarithms."""
    known = {size: steps for size, (steps, _) in found.items() if math.isfinite(steps)}

    def error(critical: float) -> float:
        logs = [math.log(steps / (1 + critical / size)) for size, steps in known.items()]
        return statistics.pvariance(logs)

    return min((2 ** (power / 8) for power in range(112)), key=error)


def main() -> None:
    """Print the tables, and write them to a file if requested."""
    parser = report.parser(__doc__)
    parser.add_argument("--job", choices=list(TASKS), action="append", help="only these")
    parser.add_argument("--sweep", type=Path, help="keep the steps that were counted, or take them from there")
    parser.add_argument("--count", action="store_true", help="count steps only; time is for a quiet machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.count:
        for name in given.job or TASKS:
            print(name, swept(name, given.sweep), flush=True)
        return
    lines, verdicts = [], []
    for name in given.job or TASKS:
        table, verdict = job_lines(name, given.sweep)
        lines += table
        verdicts.append(verdict)
    columns = ("job", "batch", "best rate", "steps", "samples", "ms of a step", "seconds", "by 64", "predicted")
    head = [f"| {' | '.join(columns)} |", f"|---|{'--:|' * (len(columns) - 1)}"]
    report.publish(
        [*verdicts, "", *head, *lines],
        title="The advised batch size against a sweep",
        command="python benchmarks/advise.py",
        setting=f"1 thread, medians over {SEEDS} seeds",
        out=given.out,
    )


if __name__ == "__main__":
    main()
