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
    """A loop with a bug.

    Attributes:
        module: its module; the loop is the function `train`.
        hint: its visible symptom.
        why: the reason.
        cure: the fix.
        finding: code of the finding of `anybatch check --loop`.
        wrong: a piece of the wrong line; None for lines that the correct loop lacks.
        is_missing: whether the line is correct, but the next one is missing.
    """

    module: str
    hint: str
    why: str
    cure: str
    finding: str
    wrong: str | None = None
    is_missing: bool = False

    @property
    def loop(self) -> Callable[..., None]:
        """The loop."""
        found: Callable[..., None] = importlib.import_module(self.module).train
        return found

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
    found = MISTAKES[name]
    return Exercise(
        module=f"anybatch_guide.mistakes.{name}", hint=hint, why=found.effect, cure=found.cure, finding=found.finding
    )


EXERCISES = (
    Exercise(
        module="anybatch_guide.exercises.from_scratch",
        hint="With plain SGD it diverges when there are many micro-batches.",
        why="Means of micro-batches are added and not divided: N of them give N times the gradient.",
        cure="Weigh each mean by its share of the window; if all are equal, that is one over N.",
        finding="not_divided",
        wrong="loss.backward()",
    ),
    _of_mistake("zero_each", "It learns, only worse, and the larger N is, the less of the data it uses."),
    _of_mistake("mean_of_means", "It is right in a test with full batches, and wrong on real text."),
    _of_mistake("clip_each", "It is right until gradients become long."),
    _of_mistake("schedule_each", "It stops learning long before the end."),
    Exercise(
        module="anybatch_guide.exercises.with_ranks",
        hint="The first step is right, on every rank.",
        why="Gradients are never zeroed: each step adds its own to those of all steps before it.",
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
            {"code": one.code, "what": one.what, "found": one.found, "expected": one.expected}
            for one in report.findings
        ],
        "command": f"anybatch check --loop guide/src/{path}.py:train",
    }
