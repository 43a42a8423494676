"""Run the programs of examples/cookbook/ on 1 and 2 ranks, and write their errors into the tables of cookbook.md.

python docs/write_cookbook.py
"""

import ast
import re
import runpy
from pathlib import Path
from typing import Self

import torch
from torch import nn

import anybatch as ab
from anybatch.core.loss import Loss, declared
from anybatch.core.loss_kinds import LossFunction
from anybatch.data import DatasetBatch
from anybatch.testing import RankPool, relative_error

PAGE = Path(__file__).parent / "cookbook.md"
FOLDER = Path(__file__).parents[1] / "examples" / "cookbook"
PROGRAMS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
LOSSES = (
    *("clip", "siglip", "moe_load_balance", "grpo", "dapo", "gspo", "preference_padded", "preference_packed"),
    *("distillation", "label_smoothing", "multi_token_prediction", "several_tasks", "focal", "detection", "ctc"),
)
ROW = re.compile(r"^\| \[(\w+)\]\(\S+\) \| (.+) \| (\d+) \| (\S*) \| (\S+) \| (\S+) \|$", flags=re.MULTILINE)


def error_of(name: str) -> float:
    """Return the relative error of a program's parameters in float64, compared with its loop over whole batches."""
    program, dtype = runpy.run_path(str(PROGRAMS[name])), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng():
            return relative_error(program["train"]().state_dict(), program["train_whole"]().state_dict())
    finally:
        torch.set_default_dtype(dtype)


class MeanOfMeans:
    """Stands in for `ab.Engine` with the usual loop by hand: the mean of the losses of the micro-batches."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss | LossFunction, *, micro_batch_size: int
    ) -> None:
        self.model, self.optimizer, self.loss, self.size = model, optimizer, declared(loss), micro_batch_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def step(self, batch: DatasetBatch) -> None:
        """Accumulate the gradients of the micro-batches, each divided by their number, and update."""
        self.optimizer.zero_grad()
        units = torch.arange(batch.num_samples).split(self.size)
        for micro_batch in batch.feed([unit.tolist() for unit in units]):
            encode = self.loss.kind.encode
            value = self.loss.function(self.model, encode(self.model, micro_batch) if encode else micro_batch)
            if isinstance(value, dict):
                value = sum(weight * value[name].nan_to_num() for name, weight in self.loss.weights.items())
            if isinstance(value, ab.LossSum):
                value = value.total / max(float(value.count), 1.0)
            (value.mean() / len(units)).backward()
        self.optimizer.step()


def error_by_hand(name: str) -> float:
    """Return the error of the loop with the mean of means, for a loss."""
    engine = ab.Engine
    ab.Engine = MeanOfMeans  # type: ignore[assignment,misc]  # programs look the name up when they train
    try:
        return error_of(name)
    finally:
        ab.Engine = engine  # type: ignore[misc]


def described(name: str) -> tuple[str, int]:
    """Return the first line of a program's docstring, and its number of lines."""
    source = PROGRAMS[name].read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.partition("\n")[0], len(source.splitlines())


def table(names: list[str], pool: RankPool) -> str:
    """Return the rows of programs."""
    lines = ["| program | what it shows | lines | error by hand | 1 rank | 2 ranks |", "|---|---|--:|--:|--:|--:|"]
    for name in names:
        text, num_lines = described(name)
        errors = [error_of(name), max(pool.run(error_of, name))]
        cells = [f"{error_by_hand(name):.0e}" if name in LOSSES else "", *(f"{error:.0e}" for error in errors)]
        lines.append(f"| [{name}](../examples/cookbook/{name}.py) | {text} | {num_lines} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the tables of the page, one after each of its two headings."""
    around = [name for name in PROGRAMS if name not in LOSSES]
    page = re.sub(r"^\|.*\n", "", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    with RankPool(2) as pool:
        for heading, names in (("Losses", list(LOSSES)), ("Around the loop", around)):
            page = page.replace(f"## {heading}\n\n", f"## {heading}\n\n{table(names, pool)}\n")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
