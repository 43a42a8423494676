"""Ways to keep bf16 weights (copies, lower bits, nothing): how far training gets, its memory and its time.

A linear model and a small transformer (text of a Markov chain) are trained by AdamW for some thousand steps at a small
rate, on the same batches in four ways: with float32 copies of the weights (the reference), with the lower bits of such
copies, with stochastic rounding, and in plain PyTorch, which rounds each update to the nearest bf16 number. The error
is the final distance of the weights from the reference, relative to the distance that the reference has moved.

Memory is that of a step of a wider linear stack, planned and measured; time is the time of its update relative to the
update with copies, alternating.

    python benchmarks/bf16_weights.py [--steps N] [--out benchmarks/results/NAME.md]
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import report
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import anybatch as ab
from anybatch.diagnostics.memory_report import record_memory
from anybatch.engine import bf16_weights
from anybatch.engine.arguments import TrainSpec
from anybatch.planner.step_spec import StepSpec
from anybatch.planner.step_trace import trace_step

Batch = dict[str, torch.Tensor]
WAYS = {"float32 copies": "copied", "split": "split", "stochastic": "stochastic", "plain bf16": ""}
"""Each way to keep bf16 weights, and the engine's option for it; plain PyTorch has none."""
WIDTH, WORDS, LENGTH = 48, 64, 24
ROUNDS = 9


class Text(nn.Module):
    """Two layers of a causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.words(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def text_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the next word."""
    logits = model(batch["tokens"][:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def texts() -> Callable[[int], Batch]:
    """Return a function that draws sequences of a Markov chain."""
    chain = torch.softmax(2.0 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1)), dim=-1)

    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        tokens = [torch.randint(WORDS, (8,), generator=generator)]
        for _ in range(LENGTH):
            tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator)[:, 0])
        return {"tokens": torch.stack(tokens, 1)}

    return draw


def line_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def lines() -> Callable[[int], Batch]:
    """Return a function that draws samples of a line with noise."""
    true = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))

    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 32, generator=generator).bfloat16()
        return {"x": x, "y": x.float() @ true + 0.1 * torch.randn(16, 8, generator=generator)}

    return draw


TASKS = {
    "linear, rate 1e-3": (partial(nn.Linear, 32, 8), line_loss, lines, 1e-3),
    "transformer, rate 1e-4": (Text, text_loss, texts, 1e-4),
}


def adamw(rate: float, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return AdamW without decay."""
    return AdamW([one for _, one in named], lr=rate, weight_decay=0.0)


def trained(task: str, way: str, num_steps: int) -> tuple[nn.Module, nn.Module, float]:
    """Return the model before and after training, and its loss over new samples."""
    make, loss, drawn, rate = TASKS[task]
    torch.manual_seed(0)
    model = make().bfloat16()
    before, draw = copy.deepcopy(model), drawn()
    given = {"bf16_weights": way} if way else {}
    optimizer = partial(adamw, rate) if way else adamw(rate, model.named_parameters())
    with ab.Engine(
        model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4, check_loss=False, **given
    ) as engine:
        for step in range(num_steps):
            engine.step(draw(step))
    with torch.no_grad():
        losses = [loss(model, draw(-1 - number)).item() for number in range(100)]
    return before, model, statistics.mean(losses)


def weight_distance(one: nn.Module, other: nn.Module) -> float:
    """Return the distance of two models' weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum((a.double() - b.double()).square().sum().item() for a, b in pairs) ** 0.5


def rows_of_training(num_steps: int) -> list[str]:
    """Return the table of losses and errors."""
    rows = ["| trained | kept beside bf16 weights | loss | error of the weights |", "|---|---|--:|--:|"]
    for task in TASKS:
        runs = {name: trained(task, way, num_steps) for name, way in WAYS.items()}
        start, reference, _ = runs["float32 copies"]
        for name, (_, model, loss) in runs.items():
            error = weight_distance(model, reference) / weight_distance(start, reference)
            rows.append(f"| {task} | {name} | {loss:.4f} | {100 * error:.1f}% |")
            print(rows[-1], flush=True)
    return rows


def stack() -> nn.Module:
    """Return layers whose 12.6 million weights dominate the memory of a step."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the outputs over samples."""
    return model(batch).float().square().mean()


def engine_of(way: str) -> ab.Engine:
    """Return an engine over the stack."""
    model = stack().bfloat16()
    given = {"bf16_weights": way} if way else {}
    optimizer = partial(adamw, 1e-6) if way else adamw(1e-6, model.named_parameters())
    return ab.Engine(model, optimizer, ab.mean_over_samples(squares), micro_batch_size=1, check_loss=False, **given)


def planned(way: str) -> int:
    """Return the planned bytes of a step of two micro-batches."""

    def make() -> TrainSpec:
        model = stack().bfloat16()
        given = {"bf16_weights": way} if way else {}
        optimizer = partial(adamw, 1e-6) if way else adamw(1e-6, model.named_parameters())
        return TrainSpec(model=model, optimizer=optimizer, loss=ab.mean_over_samples(squares), **given)

    sample = torch.zeros(1, 1024, dtype=torch.bfloat16)
    return trace_step(StepSpec(train=make, sample=sample, profile="cpu"), 1).steady.peak_bytes


def rows_of_memory() -> list[str]:
    """Return the table of memory and times."""
    batch = torch.randn(2, 1024).bfloat16()
    engines = {name: engine_of(way) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.step(batch)
    for number in range(ROUNDS):
        for name, engine in list(engines.items())[:: 1 if number % 2 else -1]:
            begin = time.thread_time()
            engine.step(batch)
            seconds[name].append(time.thread_time() - begin)
    rows = [
        "| kept beside bf16 weights | planned, bytes a weight | measured | step's time by that with copies |",
        "|---|--:|--:|--:|",
    ]
    num_weights = sum(one.numel() for one in stack().parameters())
    for name, engine in engines.items():
        with record_memory(engine) as recording:
            engine.step(batch)
        measured = recording.report.timeline.peak_bytes
        ratios = [one / base for one, base in zip(seconds[name], seconds["float32 copies"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append(f"| {name} | {planned(WAYS[name]) / num_weights:.2f} | {measured / num_weights:.2f} | {times} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Train, measure and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of each training (default: 3000)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Update pieces in the proportion of a model with some billion weights.
    bf16_weights.PIECE_BYTES = 1 << 22
    report.publish(
        [*rows_of_training(options.steps), "", *rows_of_memory()],
        title="Weights in bf16, and what is kept beside them",
        command=f"python benchmarks/bf16_weights.py --steps {options.steps}",
        setting="1 thread, pieces of 4 MiB",
        out=options.out,
    )


if __name__ == "__main__":
    main()
