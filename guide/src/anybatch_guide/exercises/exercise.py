"""The six loops by name: module, wrong line, reason, and the checker's finding."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from anybatch.diagnostics.loop_check.check_loop import check_loop
from anybatch_guide.experiment import Data
from anybatch_guide.mistakes.mistake import MISTAKES, wrong_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A loop with a bug."""

    module: str  # its module; the loop is the function `train`
    hint: str  # its visible symptom
    why: str  # the reason
    cure: str  # the fix
    finding: str  # code of the finding of `anybatch check --loop`
    wrong: str | None = None  # a piece of the wrong line; None for lines that the correct loop lacks
    is_missing: bool = False  # whether the line is correct, but the next one is missing

    @property
    def loop(self) -> Callable[..., None]:
        """The loop."""
        train: Callable[..., None] = importlib.import_module(self.module).train
        return train

    @property
    def lines(self) -> list[str]:
        """Its source."""
        return inspect.getsource(self.loop).splitlines()

    @property
    def wrong_lines(self) -> list[int]:
        """Numbers of the wrong lines, from 1."""
        if self.wrong is None:
            return wrong_lines(self.module.rpartition(".")[2])
        return [number for number, line in enumerate(self.lines, start=1) if self.wrong in line]


def _of_mistake(name: str, hint: str) -> Exercise:
    mistake = MISTAKES[name]
    return Exercise(
        module=f"anybatch_guide.mistakes.{name}",
        hint=hint,
        why=mistake.effect,
        cure=mistake.cure,
        finding=mistake.finding,
    )


EXERCISES = (
    Exercise(
        module="anybatch_guide.exercises.from_scratch",
        hint="With plain SGD, training diverges if there are many micro-batches.",
        why="The means of N micro-batches are added but not divided, so the gradient is N times too large.",
        cure="Weight each mean by its share of the window: 1/N if all micro-batches are equal.",
        finding="not_divided",
        wrong="loss.backward()",
    ),
    _of_mistake("zero_each", "The model learns, but slowly. The larger N is, the more data goes unused."),
    _of_mistake("mean_of_means", "Tests with full batches pass, but gradients of real text are wrong."),
    _of_mistake("clip_each", "Everything is correct until gradients become large."),
    _of_mistake("schedule_each", "Learning stops long before the last step."),
    Exercise(
        module="anybatch_guide.exercises.with_ranks",
        hint="The first step is correct on every rank.",
        why="Gradients are never zeroed, so each step adds its gradients to the gradients of all earlier steps.",
        cure="Call optimizer.zero_grad() after optimizer.step().",
        finding="zero_grad_missing",
        wrong="optimizer.step()",
        is_missing=True,
    ),
)


def described(exercise: Exercise) -> Data:
    """Return the data of a loop for the page, including the checker's findings."""
    report = check_loop(exercise.loop)
    path = exercise.module.replace(".", "/")
    return {
        "name": exercise.module.rpartition(".")[2],
        "lines": exercise.lines,
        "wrong": exercise.wrong_lines,
        "is_missing": exercise.is_missing,
        "hint": exercise.hint,
        "why": exercise.why,
        "cure": exercise.cure,
        "findings": [
            {"code": finding.code, "what": finding.what, "found": finding.found, "expected": finding.expected}
            for finding in report.findings
        ],
        "command": f"anybatch check --loop guide/src/{path}.py:train",
    }
