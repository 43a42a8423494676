"""Which rule for the learning rate holds, and up to which batch size?

Small versions of both recipes (`small_runs.py`), with SGD and AdamW: a grid of batch sizes and learning rates, five
seeds each, where all runs of a recipe see the same number of samples. Each rule scales the best rate at the smallest
batch size to the other batch sizes, and these runs are made as well.

- *Keeps the loss*: the held-out loss is not significantly higher than that at the smallest batch size (paired by seeds,
  95% of Student's t), at this and all smaller sizes.
- *As good as tuned*: it is not significantly higher than with the best rate of the grid at the same batch size. This is
  possible if no rate keeps the loss, because the batch is too large for the number of samples.

    python benchmarks/learning_rate_rules.py --runs FILE [--seconds N] [--figure FILE.png] [--out NAME.md]

Runs are kept in FILE: after a stop, or with `--seconds`, the study resumes there. It takes half an hour of one core.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import report
import torch
from small_runs import OptimizerName, Runs, Setting, Task, batches_of, engine_of, new_model, taken, task_of

from anybatch.core.learning_rate import Memory, noise_gain, scale_rate
from anybatch.core.run_config import ScalingRule

SEEDS = range(5)
STUDENT_95 = 2.776
"""For four degrees of freedom: five differences."""
BETAS: Mapping[OptimizerName, tuple[float, ...]] = {"SGD": (0.9,), "AdamW": (0.9, 0.99)}
EPS: Mapping[OptimizerName, float] = {"SGD": 0.0, "AdamW": 1e-8}
OPTIMIZERS: tuple[OptimizerName, ...] = ("SGD", "AdamW")
TASKS = ("digits", "text")

COLOURS = ("#E69F00", "#D55E00", "#009E73", "#56B4E9", "#CC79A7")

Rule = Callable[[Setting, int], Setting]
"""Function (run at the smallest batch, batch size) -> the rule's run at that size."""


def scaled(rule: ScalingRule, memory: Memory | None = None) -> Rule:
    """Return a rule of the library."""

    def carry(base: Setting, size: int) -> Setting:
        is_sgd = base.optimizer == "SGD"
        rate = scale_rate(
            base.learning_rate,
            base_batch_size=base.batch_size,
            effective_batch_size=size,
            rule=rule,
            betas=() if is_sgd else base.betas,
            eps=None if is_sgd else base.eps,
            momentum=base.betas[0] if is_sgd else 0.0,
            memory=memory,
        )
        betas = (rate.momentum,) if is_sgd else rate.betas
        eps = base.eps if rate.eps is None else rate.eps
        return dataclasses.replace(base, batch_size=size, learning_rate=rate.learning_rate, betas=betas, eps=eps)

    return carry


def gained(noise_scale: float) -> Rule:
    """Return the noise-gain rule, with its square root for AdamW."""

    def carry(base: Setting, size: int) -> Setting:
        gain = noise_gain(noise_scale, base_batch_size=base.batch_size, effective_batch_size=size)
        factor = gain if base.optimizer == "SGD" else math.sqrt(gain)
        return dataclasses.replace(base, batch_size=size, learning_rate=base.learning_rate * factor)

    return carry


def rules_of(optimizer: OptimizerName, noise_scale: float) -> dict[str, Rule]:
    """Return the studied rules, by name."""
    common = {"none": scaled("none"), "linear": scaled("linear"), "gain of the noise": gained(noise_scale)}
    if optimizer == "SGD":
        return {**common, "sqrt": scaled("sqrt"), "linear, momentum ** kappa": scaled("linear", "samples")}
    return {**common, "sqrt, betas kept": scaled("sqrt", "steps"), "sqrt, betas ** kappa": scaled("sqrt")}


def setting_of(name: str, optimizer: OptimizerName, size: int, rate: float, seed: int) -> Setting:
    """Return a run of the grid."""
    return Setting(
        task=name,
        optimizer=optimizer,
        batch_size=size,
        learning_rate=rate,
        betas=BETAS[optimizer],
        eps=EPS[optimizer],
        seed=seed,
    )


class Study:
    """One recipe with one optimizer.

    Args:
        name: name of the recipe.
        optimizer: name of the optimizer.
        runs: all finished runs.
    """

    def __init__(self, name: str, optimizer: OptimizerName, runs: Runs) -> None:
        self.name = name
        self.optimizer = optimizer
        self.task: Task = task_of(name)
        self._runs = runs
        self._noise: float | None = None

    def grid(self) -> Iterator[Setting]:
        """Yield all runs of the grid."""
        for seed, rate, size in itertools.product(SEEDS, self.task.rates[self.optimizer], self.task.batch_sizes):
            yield setting_of(self.name, self.optimizer, size, rate, seed)

    def carried(self) -> Iterator[Setting]:
        """Yield the runs that the rules make."""
        for seed, rule, size in itertools.product(SEEDS, self.rules().values(), self.task.batch_sizes):
            yield rule(dataclasses.replace(self.base(), seed=seed), size)

    def losses(self, setting: Setting) -> list[float]:
        """Return the held-out loss of each seed."""
        return [self._runs(dataclasses.replace(setting, seed=seed)).held_out for seed in SEEDS]

    def best(self, size: int) -> Setting:
        """Return the grid's run with the lowest mean loss at a batch size."""
        at_size = [setting_of(self.name, self.optimizer, size, rate, 0) for rate in self.task.rates[self.optimizer]]
        return min(at_size, key=lambda setting: statistics.fmean(self.losses(setting)))

    def base(self) -> Setting:
        """Return the best run at the smallest batch size."""
        return self.best(self.task.batch_sizes[0])

    def rules(self) -> dict[str, Rule]:
        """Return the rules by name."""
        if self._noise is None:
            self._noise = noise_scale_of(self.base())
        return rules_of(self.optimizer, self._noise)

    @property
    def noise(self) -> float:
        """The gradient noise scale in the middle of the base run, in samples."""
        self.rules()
        assert self._noise is not None
        return self._noise

    def limits(self, rule: Rule) -> tuple[int, int]:
        """Return the largest batch size at which a rule keeps the loss, and at which it is as good as tuned."""
        base = self.base()
        keeps = as_good = base.batch_size
        keeps_on = as_good_on = True
        for size in self.task.batch_sizes:
            losses = self.losses(rule(base, size))
            keeps_on = keeps_on and not is_worse(losses, self.losses(base))
            as_good_on = as_good_on and not is_worse(losses, self.losses(self.best(size)))
            keeps = size if keeps_on else keeps
            as_good = size if as_good_on else as_good
        return keeps, as_good

    def table(self) -> list[str]:
        """Return the tables of this study."""
        sizes, base = self.task.batch_sizes, self.base()
        lines = [
            "",
            f"## {self.name}, {self.optimizer}",
            "",
            (
                f"{self.task.num_samples:,} samples a run; base: batch {base.batch_size}, rate {base.learning_rate:g}; "
                f"gradient noise scale in the middle of that run: {self.noise:.0f} samples."
            ),
            "",
            f"| held-out loss at rate | {' | '.join(f'batch {size}' for size in sizes)} |",
            f"|--:|{'--:|' * len(sizes)}",
        ]
        for rate in self.task.rates[self.optimizer]:
            row = [self.losses(setting_of(self.name, self.optimizer, size, rate, 0)) for size in sizes]
            lines.append(f"| {rate:g} | {' | '.join(map(mean_and_error, row))} |")
        lines += [
            "",
            f"| rule | {' | '.join(f'batch {size}' for size in sizes)} | keeps the loss to | as good as tuned to |",
            f"|---|{'--:|' * len(sizes)}--:|--:|",
        ]
        for name, rule in self.rules().items():
            row = [self.losses(rule(base, size)) for size in sizes]
            keeps, as_good = self.limits(rule)
            lines.append(f"| {name} | {' | '.join(map(mean_and_error, row))} | {keeps} | {as_good} |")
        tuned = [self.losses(self.best(size)) for size in sizes]
        lines.append(f"| best of the grid | {' | '.join(map(mean_and_error, tuned))} | | |")
        return lines


def is_worse(losses: list[float], others: list[float]) -> bool:
    """Return whether losses are higher than others of the same seeds, beyond chance."""
    if not all(map(math.isfinite, losses)):
        return True
    differences = [one - other for one, other in zip(losses, others, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > STUDENT_95 * error


def mean_and_error(losses: list[float]) -> str:
    """Return a mean with its standard error, or the number of diverged runs."""
    lost = sum(not math.isfinite(loss) or loss > 100 for loss in losses)
    if lost:
        return f"{lost} of {len(losses)} diverged"
    return f"{statistics.fmean(losses):.3f} ± {statistics.stdev(losses) / math.sqrt(len(losses)):.3f}"


def noise_scale_of(setting: Setting, *, num_samples: int = 512) -> float:
    """Return tr(Sigma) / |G|^2 half-way through a run, from separate gradients of some samples.

    Unbiased in numerator and denominator (McCandlish et al. 2018, arXiv 1812.06162, appendix A).
    """
    task, model = task_of(setting.task), new_model(setting)
    with engine_of(setting, model) as engine:
        steps = list(batches_of(setting))
        for ids in steps[: len(steps) // 2]:
            engine.step(taken(task.train, ids))
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    squares = 0.0
    for row in torch.arange(num_samples):
        gradients = torch.autograd.grad(task.loss.function(model, taken(task.train, row[None])), parameters)
        squares += sum(float(gradient.double().square().sum()) for gradient in gradients)
        for one, gradient in zip(total, gradients, strict=True):
            one.add_(gradient)
    whole = sum(float(one.square().sum()) for one in total)
    signal = (whole - squares) / (num_samples**2 - num_samples)
    noise = squares / num_samples - signal
    return noise / max(signal, 1e-30)


def draw(studies: list[Study], path: Path) -> None:
    """Draw the heat maps of losses, with a line for each rule."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (only where a figure is asked for)

    figure = Figure(figsize=(11.5, 9.5), layout="constrained")
    for axes, study in zip(figure.subplots(2, 2).flat, studies, strict=True):
        sizes, rates = study.task.batch_sizes, study.task.rates[study.optimizer]
        values = [
            [statistics.fmean(study.losses(setting_of(study.name, study.optimizer, size, rate, 0))) for size in sizes]
            for rate in rates
        ]
        lowest = min(itertools.chain(*values))
        shown = [[min(value, 3 * lowest) if math.isfinite(value) else math.nan for value in row] for row in values]
        axes.set_facecolor("#f2c6c0")  # runs that diverged
        mesh = axes.pcolormesh(range(len(sizes)), range(len(rates)), shown, cmap="Greys", shading="nearest")
        figure.colorbar(mesh, ax=axes, label="held-out loss")
        for (name, rule), colour in zip(study.rules().items(), COLOURS, strict=True):
            line = [math.log2(rule(study.base(), size).learning_rate / rates[0]) for size in sizes]
            axes.plot(range(len(sizes)), line, color="white", linewidth=4.5)
            axes.plot(range(len(sizes)), line, color=colour, linewidth=2.2, label=name)
        best = [rates.index(study.best(size).learning_rate) for size in sizes]
        axes.plot(range(len(sizes)), best, "o", color="white", markeredgecolor="black", label="best of the grid")
        axes.set(
            title=f"{study.name}, {study.optimizer}",
            xlabel="effective batch size",
            ylabel="learning rate",
            xticks=range(len(sizes)),
            yticks=range(len(rates)),
            ylim=(-0.5, len(rates) - 0.5),
            xticklabels=sizes,
            yticklabels=[f"{rate:g}" for rate in rates],
        )
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the missing runs, print the tables and draw the figure."""
    torch.set_num_threads(1)
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="file that keeps runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, to be continued")
    parser.add_argument("--figure", type=Path, help="draw the heat maps")
    given = parser.parse_args()
    runs, begin = Runs(given.runs), time.monotonic()
    studies = [Study(name, optimizer, runs) for name in TASKS for optimizer in OPTIMIZERS]
    for study in studies:
        for setting in itertools.chain(study.grid(), study.carried()):
            runs(setting)
            if time.monotonic() - begin > given.seconds:
                raise SystemExit(3)
    if given.figure is not None:
        draw(studies, given.figure)
    report.publish(
        list(itertools.chain.from_iterable(study.table() for study in studies))[1:],
        title="Learning rate by batch size: which rule holds, and how far",
        command="python benchmarks/learning_rate_rules.py --runs FILE --figure docs/learning_rates.png",
        setting=f"both recipes shrunk, {len(SEEDS)} seeds, held-out loss as mean ± standard error",
        out=given.out,
    )


if __name__ == "__main__":
    main()
