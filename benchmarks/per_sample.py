"""The cost of dropout masks by sample, relative to torch's dropout: of dropout alone, and of a whole step.

`F.dropout` forward and backward alone, at four sizes; then the engine's step with rng="per_sample" over one with
rng="micro_batch", on a small stack of five blocks with dropout. Both alternate call by call; the figure is the median
of the ratios of neighbouring calls, with the quartiles.

    python benchmarks/per_sample.py [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable

import report
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.per_sample_dropout import SampleRandomness
from anybatch.parallel.strategy import Turn

SHAPES = ((4, 64), (16, 512), (16, 128, 256), (16, 4, 256, 256))
BATCH, MICRO_BATCH, WIDTH = 32, 8, 128


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(name: str, plain: Callable[[], object], keyed: Callable[[], object], rounds: int) -> str:
    """Return a row of the table."""
    for _ in range(3):
        plain(), keyed()
    pairs = [(seconds(plain), seconds(keyed)) for _ in range(rounds)]
    low, middle, high = statistics.quantiles([two / one for one, two in pairs], n=4)
    before, after = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    return f"| {name} | {before:.3f} | {after:.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def alone(shape: tuple[int, ...]) -> str:
    """Return the row of one forward and backward of dropout."""
    values = torch.randn(shape, requires_grad=True)
    randomness = SampleRandomness(nn.Identity(), torch.device("cpu"))
    micro_batch = MicroBatch(Unit(0, 0, shape[0]), (), Turn(first=True, last=True), 0, BatchKey(0, 0, range(shape[0])))

    def both() -> None:
        functional.dropout(values, 0.1).sum().backward()

    def keyed() -> None:
        with randomness.micro_batch(micro_batch):
            both()

    return compare(f"F.dropout {shape}", both, keyed, 40 if values.numel() > 10**6 else 200)


def stack() -> nn.Module:
    """Return five blocks with dropout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def whole_step(num_tokens: int) -> str:
    """Return the row of one step of the engine."""
    batch = {"x": torch.randn(BATCH, num_tokens, WIDTH), "y": torch.randint(0, 10, (BATCH,))}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["x"]).mean(1), batch["y"])

    steps = []
    for rng in ("micro_batch", "per_sample"):
        model = stack()
        engine = ab.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            ab.mean_over_samples(loss),
            micro_batch_size=MICRO_BATCH,
            rng=rng,  # type: ignore[arg-type]  # one of the two names
        )
        steps.append(lambda engine=engine: engine.step(batch))
    return compare(f"step, {num_tokens} tokens a sample", *steps, rounds=60)


def main() -> None:
    """Measure and print."""
    options = report.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    lines = [
        "| what | by micro-batch, ms | by sample, ms | ratio: median (quartiles) |",
        "|---|---|---|---|",
        *map(alone, SHAPES),
        whole_step(1),
        whole_step(64),
        "",
        "Ratios above 1 are what masks by sample cost. Dropout alone is timed forward and backward; its row by sample",
        "includes starting and checking a micro-batch, which a model pays once for all its layers.",
    ]
    report.publish(
        lines,
        title="What dropout masks by sample cost",
        command="python benchmarks/per_sample.py",
        setting=f"float32, 1 thread, {MICRO_BATCH} of {BATCH} samples a micro-batch",
        out=options.out,
    )


if __name__ == "__main__":
    main()
