"""Compare the size that "auto" chooses with a search by hand, and measure the cost of the choice.

Three models. "auto" chooses a size three times, each time in a new engine. Then full steps run at every size that cuts
the batch into 1, 2, 3, 4, 6, 8, 12, 16, ... equal parts, alternating, so that a noisy machine affects all alike. The
best size has the shortest median step. The figure is the time of a step at the best size relative to the chosen size,
as a median over rounds: 100% is as fast as the best. Seconds are CPU seconds of the process (one thread).

A second table compares runs with and without a planned limit (`Auto(largest=...)`), with enough memory, and under an
enforced budget in which by the plan 60% of the batch fit as one micro-batch.

    python benchmarks/auto_size.py [--only-asking] [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import report
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.core.geometry import ceil_div
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.micro_batch_size.search import Auto
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.step_spec import StepSpec
from anybatch.recipes.planning.plan import planned_largest
from anybatch.testing import memory_budget

NUM_CHOICES = 3
NUM_ROUNDS = 5
CLOCK = time.process_time
"""One thread computes, so its CPU seconds do not depend on other programs."""
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, the loss of a batch, and a full batch."""

    name: str
    model: Callable[[], nn.Module]
    batch: Batch

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return len(self.batch["x"])


def convolutions() -> nn.Module:
    """Return a network of six convolutions for images of 32 x 32 pixels."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride=stride, padding=1), nn.GroupNorm(8, width), nn.GELU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Transformer(nn.Module):
    """Two layers of width 128 over 64 tokens of a vocabulary of 2,048, which predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2048, 128)
        self.places = nn.Parameter(torch.randn(64, 128) / 10)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each position."""
        scores: torch.Tensor = self.head(self.layers(self.tokens(x) + self.places))
        return scores.flatten(0, 1)


def perceptron() -> nn.Module:
    """Return three linear layers, for the 64 pixels of a digit."""
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"].flatten())


def cases() -> list[Case]:
    """Return the three models with a batch each."""
    words = torch.randint(0, 2048, (64, 64))
    return [
        Case("CNN, 32 x 32", convolutions, {"x": torch.randn(256, 3, 32, 32), "y": torch.randint(0, 10, (256,))}),
        Case("transformer, T = 64", Transformer, {"x": words, "y": words.roll(1, 1)}),
        Case("MLP, digits", perceptron, {"x": torch.randn(1024, 64), "y": torch.randint(0, 10, (1024,))}),
    ]


def engine(case: Case, size: "int | Auto", function: Callable[[nn.Module, Batch], torch.Tensor] = loss) -> ab.Engine:
    """Return a new engine over a new model."""
    torch.manual_seed(0)
    model = case.model()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-5)
    return ab.Engine(model, sgd, ab.mean_over_samples(function), micro_batch_size=size, check_loss=False)


def choose(case: Case) -> tuple[int, float]:
    """Return the size that "auto" chooses, and the extra seconds of the first step over the second."""
    with engine(case, Auto(clock=CLOCK)) as made:
        seconds = []
        for _ in range(2):
            begun = CLOCK()
            step = made.step(case.batch)
            seconds.append(CLOCK() - begun)
    return step.plan.split.micro_batch_size or case.num_samples, seconds[0] - seconds[1]


def sizes_of(num_samples: int) -> list[int]:
    """Return the sizes of 1, 2, 3, 4, 6, 8, 12, ... equal parts."""
    parts = [factor * 2**power for power in range(12) for factor in (2, 3)]
    return sorted({num_samples, *(ceil_div(num_samples, k) for k in parts if k <= num_samples)})


def rounds(case: Case, sizes: Sequence[int]) -> list[dict[int, float]]:
    """Return, for each round, the seconds of a step at each size."""
    engines = {size: engine(case, size) for size in sizes}
    for made in engines.values():
        made.step(case.batch)
    found = []
    for _ in range(NUM_ROUNDS):
        seconds = {}
        for size, made in engines.items():
            begun = CLOCK()
            made.step(case.batch)
            seconds[size] = CLOCK() - begun
        found.append(seconds)
    return found


def row(case: Case) -> str:
    """Return the line of a case in the first table."""
    chosen = [choose(case) for _ in range(NUM_CHOICES)]
    sizes = sorted({*sizes_of(case.num_samples), *(size for size, _ in chosen)})
    found = rounds(case, sizes)
    medians = {size: statistics.median(seconds[size] for seconds in found) for size in sizes}
    best = min(sizes, key=lambda size: medians[size])
    part = {size: statistics.median(seconds[best] / seconds[size] for seconds in found) for size in sizes}
    spent = [seconds for _, seconds in chosen]
    cells = [
        case.name,
        str(case.num_samples),
        f"{best} ({case.num_samples / medians[best]:,.0f} samples/s)",
        ", ".join(f"{size}: {part[size]:.0%}" for size, _ in chosen),
        f"{part[case.num_samples]:.0%}",
        f"{part[sizes[0]]:.0%} at {sizes[0]}",
        ", ".join(f"{seconds:.2f}" for seconds in spent),
        f"{statistics.median(spent) / medians[best]:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer of `engine`, over other parameters."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=1e-5)


class Asked:
    """Asks the planner for the largest micro-batch, and measures the time.

    Args:
        case: the case to plan.
        num_bytes: the budget; None for all available memory.
    """

    def __init__(self, case: Case, num_bytes: int | None) -> None:
        declared = ab.mean_over_samples(loss)
        device = torch.device("cpu")
        self._plan = planned_largest(
            lambda: TrainSpec(model=case.model(), optimizer=optimizer, loss=declared),
            device=device,
            budget_bytes=num_bytes,
            headroom=0.0,
        )
        self.seconds = 0.0

    def __call__(self, batch: Batch, num_samples: int) -> int | None:
        """Return the largest size that is planned to fit."""
        begun = CLOCK()
        size = self._plan(batch, num_samples)
        self.seconds = CLOCK() - begun
        return size


def settle(case: Case, asked: Asked | None, num_bytes: int | None) -> tuple[float, int]:
    """Return the extra seconds of the first step over the second, and the largest size that ran."""
    sizes: list[int] = []

    def seen(model: nn.Module, batch: Batch) -> torch.Tensor:
        value = loss(model, batch)
        value.register_hook(lambda _: sizes.append(len(batch["x"])))
        return value

    made = engine(case, Auto(clock=CLOCK, largest=asked), seen)
    seconds = []
    budget = nullcontext() if num_bytes is None else memory_budget(num_bytes, made.model, *case.batch.values())
    with made, budget:
        for _ in range(2):
            begun = CLOCK()
            made.step(case.batch)
            seconds.append(CLOCK() - begun)
    return seconds[0] - seconds[1], max(sizes)


def row_of_asking(case: Case, *, enforced: bool) -> str:
    """Return a line of the second table."""
    num_bytes = planned_bytes(case, 6 * case.num_samples // 10) if enforced else None
    own = sum(tensor.nbytes for tensor in case.batch.values())  # the plan counts two micro-batches, but this is one
    limit = None if num_bytes is None else num_bytes + own
    plain, planned, planning = [], [], []
    for _ in range(NUM_CHOICES):
        asked = Asked(case, num_bytes)
        plain.append(settle(case, None, limit))
        planned.append(settle(case, asked, limit))
        planning.append(asked.seconds)
    ratio = statistics.median(one / other for (one, _), (other, _) in zip(planned, plain, strict=True))
    cells = [
        case.name,
        "60% of the batch" if enforced else "all",
        f"{statistics.median(seconds for seconds, _ in plain):.2f}",
        f"{statistics.median(seconds for seconds, _ in planned):.2f}",
        f"{statistics.median(planning):.2f}",
        f"{ratio:.2f}",
        ", ".join(map(str, sorted({size for _, size in plain}))),
        ", ".join(map(str, sorted({size for _, size in planned}))),
    ]
    return f"| {' | '.join(cells)} |"


def planned_bytes(case: Case, size: int) -> int:
    """Return the planned bytes of a step in micro-batches of `size`."""
    spec = StepSpec(
        train=lambda: TrainSpec(model=case.model(), optimizer=optimizer, loss=ab.mean_over_samples(loss)),
        sample=case.batch,
        strategy="single",
        profile="cpu",
    )
    return find_envelopes(spec, 2**40, max_samples=case.num_samples).peak_bytes(size)


def table_of_choices() -> list[str]:
    """Return the first table."""
    heads = ("model", "samples", "best by hand", "chosen: part of the best", "whole batch", "smallest", "s spent")
    lines = [f"| {' | '.join((*heads, 'in steps'))} |", f"|---|--:|{'---|' * 6}"]
    return [*lines, *(row(case) for case in cases())]


def table_of_asking() -> list[str]:
    """Return the second table."""
    heads = ("model", "memory for", "s by doubling", "s with a plan", "of them planning", "ratio")
    lines = [f"| {' | '.join((*heads, 'largest run', 'with a plan'))} |", f"|---|---|{'--:|' * 6}"]
    return [*lines, *(row_of_asking(case, enforced=enforced) for enforced in (False, True) for case in cases())]


def main() -> None:
    """Measure all models."""
    parser = report.parser(__doc__)
    parser.add_argument("--only-asking", action="store_true", help="only the second table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = table_of_asking() if given.only_asking else [*table_of_choices(), "", *table_of_asking()]
    title = 'What "auto" chooses, against a search by hand, and what asking the planner costs'
    if given.only_asking:
        title = 'What asking the planner costs "auto", and what it saves'
    command = f"python benchmarks/auto_size.py{' --only-asking' * given.only_asking}"
    rounds_of_asking = f"medians of {NUM_CHOICES} rounds"
    setting = f"1 thread, {NUM_CHOICES} choices, medians of {NUM_ROUNDS} rounds; of asking, {rounds_of_asking}"
    if given.only_asking:
        setting = f"1 thread, {rounds_of_asking}"
    report.publish(lines, title=title, command=command, setting=setting, out=given.out)


if __name__ == "__main__":
    main()
