"""`check_loop`: run a loop on the probe model, on one rank or two, and judge its optimizer steps."""

import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from anybatch.diagnostics.loop_check import sentences
from anybatch.diagnostics.loop_check.judge import Evidence, judge
from anybatch.diagnostics.loop_check.loop_report import LoopFinding, LoopReport, LoopVerdict, Window
from anybatch.diagnostics.loop_check.loop_trace import LoopTrace, TableGradient
from anybatch.diagnostics.loop_check.probe_model import NUM_ROWS, TARGET_KINDS, ProbeData, TargetKind, make_data
from anybatch.diagnostics.loop_check.roles import LoopParameters, read_parameters
from anybatch.diagnostics.loop_check.run_loop import (
    LOUD_GAIN,
    LearningLoop,
    LoopFailedError,
    LoopSettings,
    group_of_one,
    run_loop,
)
from anybatch.diagnostics.loop_check.unit_gradients import UnitGradients, gradient_of, rows_by_size
from anybatch.diagnostics.loop_check.windows import near, parts_of, steps_of
from anybatch.errors import UserError
from anybatch.testing.ranks import RankOutcome, run_ranks

IDS = range(NUM_ROWS - 1)
"""31 samples: on one rank and on two the last micro-batch is smaller than the others, and the last window shorter."""
MICRO_BATCH_SIZE, ACCUMULATION_STEPS, NUM_EPOCHS, NUM_RANKS = 4, 3, 2, 2


class RankRunner(Protocol):
    """Ranks that run already, such as `anybatch.testing.RankPool`."""

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[RankOutcome]:  # noqa: ANN401 (the function's)
        """Run a function on each and return how that ended.

        Args:
            function: at the top of a module, so that ranks can import it.
            *args: of the function; they are pickled.
        """
        ...


def check_loop(
    function: LearningLoop,
    *,
    data: TargetKind | None = None,
    ranks: Literal[1, 2] | None = None,
    time_limit_seconds: float = 20.0,
    pool: RankRunner | None = None,
) -> LoopReport:
    """Judge a training loop as it is: is the gradient of each optimizer step that of its un-split batch?

    The loop is a function of a model, a loader or data set, and mostly an optimizer and a number of accumulation
    steps; see `roles` for the names that parameters may have. It is run for two epochs on 31 samples in micro-batches
    of 4 and windows of 3, on a real model whose gradient says which samples made it and with what weights. Nothing of
    the user's is changed. A loop that uses torch.distributed is run by two processes, with gloo between them.

    Args:
        function: the loop; at the top of a module where it needs ranks, so that they can import it.
        data: what samples are like; "classes", "values" or "tokens". None tries them in that order.
        ranks: on how many; None looks at what the function uses.
        time_limit_seconds: a run of the loop that takes longer is ended.
        pool: ranks that run already; None starts them.

    Returns:
        The verdict, findings and steps.

    Raises:
        UserError: a parameter is not understood, or the loop itself raised; the message has its traceback.
    """
    needs = read_parameters(function)
    on_ranks = needs.ranks if ranks is None else ranks > 1
    failures = []
    for kind in TARGET_KINDS if data is None else (data,):
        runner = _Runner(function, needs, kind, time_limit_seconds)
        try:
            return runner.judge(NUM_RANKS if on_ranks else 1, pool)
        # A loop that fails on one kind of targets may have been written for another.
        except LoopFailedError as error:
            failures.append((kind, str(error)))
    kind, words = failures[0]
    tried = f" (on {', '.join(each for each, _ in failures[1:])} it failed too)" if len(failures) > 1 else ""
    joined = " Its ranks have joined a process group already." if on_ranks else ""
    message = (
        f"{function.__name__} raised, given {kind}{tried}. It was called with {_described(needs)}; a batch is a pair "
        f"(inputs, targets) that also answers to names.{joined}\n\n{words}"
    )
    raise UserError(message)


def _described(needs: LoopParameters) -> str:
    return ", ".join(f"{name}: {role.replace('_', ' ')}" for name, role in needs.roles.items())


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs one loop on samples of one kind."""

    function: LearningLoop
    needs: LoopParameters
    kind: TargetKind  # and not the data: a tensor that is sent to ranks starts a thread that stays
    time_limit_seconds: float

    @property
    def data(self) -> ProbeData:
        """The samples."""
        return make_data(self.kind)

    def run(
        self,
        ids: Sequence[int] = IDS,
        *,
        size: int = MICRO_BATCH_SIZE,
        steps: int = ACCUMULATION_STEPS,
        epochs: int = NUM_EPOCHS,
        **choices: Any,  # noqa: ANN401 (those of LoopSettings)
    ) -> LoopTrace:
        settings = LoopSettings(
            data=self.data,
            ids=ids,
            micro_batch_size=size,
            accumulation_steps=steps,
            num_epochs=epochs,
            time_limit_seconds=self.time_limit_seconds,
            **choices,
        )
        return run_loop(self.function, self.needs, settings)

    def judge(self, num_ranks: int, pool: RankRunner | None) -> LoopReport:
        """Return the report of the loop on so many ranks.

        The expected gradients are measured on one rank in any case.
        """
        traces, loud = self._traces_on_ranks(pool) if num_ranks > 1 else (), None
        # A loop for several ranks is also run alone, to measure unit gradients, and may ask for its rank then.
        with group_of_one() if self.needs.ranks else nullcontext():
            if num_ranks == 1:
                # Run twice: clipping shows as a difference between small and large gradients.
                traces, loud = (self.run(),), self.run(gain=LOUD_GAIN)
            evidence = self._evidence(traces, loud, self._units(traces[0]))
            windows, findings = judge(evidence)
            has_loss = num_ranks == 1 and {"accumulation_steps", "loader"} <= set(self.needs.roles.values())
            if has_loss and traces[0].ended:
                findings += self._about_loss()
        return self._report(evidence, windows, findings)

    def _traces_on_ranks(self, pool: RankRunner | None) -> tuple[LoopTrace, ...]:
        outcomes = run_ranks(NUM_RANKS, run_on_rank, self) if pool is None else pool.outcomes(run_on_rank, self)
        return tuple(map(_opened, outcomes))

    def _units(self, trace: LoopTrace) -> UnitGradients:
        """Return how to measure weights.

        A loader can be given one whole batch. What a loop makes of a data set is measured on micro-batches of one size
        instead, with accumulation steps of one, as if the loss were a mean over samples.
        """
        has_steps, shape = "accumulation_steps" in self.needs, self.data.outputs.shape
        # Only a loader can be given one batch of everything; what becomes of a data set is up to the loop.
        whole = "loader" in self.needs
        rows = rows_by_size(trace if whole else self.run(range(NUM_ROWS), steps=1, epochs=1), shape)

        def unsplit(ids: tuple[int, ...]) -> tuple[TableGradient, bool] | None:
            gradient = gradient_of(self.run(ids, size=len(ids), steps=1, epochs=1), ids, shape) if whole else None
            if gradient is not None:
                return gradient, has_steps
            return _only(rows, ids) / len(ids), has_steps and not whole

        return UnitGradients(self.data, unsplit)

    def _evidence(self, traces: Sequence[LoopTrace], loud: LoopTrace | None, units: UnitGradients) -> Evidence:
        # Ranks differ by one sample at most, and the last one's epoch ends with a smaller micro-batch.
        share = -(-len(IDS) // len(traces))
        num_batches = -(-share // MICRO_BATCH_SIZE)
        parts = [parts_of(trace, rank, NUM_EPOCHS, num_batches) for rank, trace in enumerate(traces)]
        steps = steps_of(traces, parts)
        sizes = Counter(step.num_micro_batches for step in steps)
        knows_steps = "accumulation_steps" in self.needs
        # Called for its effect: measuring all samples decides whether the scale is known.
        units.of(IDS)
        return Evidence(
            traces=traces,
            parts=parts,
            steps=steps,
            loud=loud,
            units=units,
            ids=IDS,
            accumulation_steps=ACCUMULATION_STEPS
            if knows_steps or not sizes
            else max(sizes, key=lambda n: (sizes[n], n)),
            knows_steps=knows_steps,
            micro_batch_size=MICRO_BATCH_SIZE,
            file=inspect.getsourcefile(self.function),
        )

    def _about_loss(self) -> tuple[LoopFinding, ...]:
        """Return whether the loss that one window returns is that of its last micro-batch."""
        ids = range(MICRO_BATCH_SIZE * ACCUMULATION_STEPS)
        last = ids[-MICRO_BATCH_SIZE:]
        # Three runs whose losses differ: the window in micro-batches, as a whole, and its last micro-batch alone.
        split = self.run(ids, epochs=1)
        reported = split.returned
        whole = self.run(ids, size=len(ids), steps=1, epochs=1).returned
        alone = self.run(last, steps=1, epochs=1).returned
        if any(values is None or len(values) != 1 for values in (reported, whole, alone)):
            return ()
        assert reported is not None
        assert whole is not None
        assert alone is not None
        found, window, micro_batch = reported[0], whole[0], alone[0]
        # The last loss may be returned as it is, or as it was divided for accumulation.
        if near(found, window) or not any(near(found, micro_batch / by) for by in (1, ACCUMULATION_STEPS)):
            return ()
        name = self.function.__code__.co_firstlineno
        file = inspect.getsourcefile(self.function)
        where = "the loop" if file is None else f"{file.rpartition('/')[2]}:{name}"
        return (sentences.logs_last_loss(found, window, where),)

    def _report(self, evidence: Evidence, windows: tuple[Window, ...], findings: tuple[LoopFinding, ...]) -> LoopReport:
        remarks = []
        if not evidence.units.scale_is_known:
            remarks.append(
                "The loop has no parameter for accumulation steps and its loss is none of the usual ones, so a factor "
                "that all gradients have in common cannot be seen."
            )
        return LoopReport(
            loop=self.function.__name__,
            verdict=_verdict(findings),
            findings=findings,
            windows=windows,
            accumulation_steps=evidence.accumulation_steps,
            num_ranks=len(evidence.traces),
            remarks=tuple(remarks),
        )


def _verdict(findings: Sequence[LoopFinding]) -> LoopVerdict:
    """Return the verdict; a gradient that is wrong for no known reason is a finding too."""
    wrong = {finding.code for finding in findings if finding.in_gradient}
    if wrong == {"constant_factor"}:
        return LoopVerdict.CONSTANT_FACTOR
    return LoopVerdict.NOT_EQUAL if wrong else LoopVerdict.EXACT


def _only(rows: TableGradient, ids: Sequence[int]) -> TableGradient:
    found = torch.zeros_like(rows)
    found[list(ids)] = rows[list(ids)]
    return found


def run_on_rank(runner: _Runner) -> bytes:
    """Run on every rank: return, as bytes, what the loop did. A loader holds the rank's share, a data set all."""
    rank, share = dist.get_rank(), -(-len(IDS) // dist.get_world_size())
    trace = runner.run(IDS[rank * share : (rank + 1) * share] if "loader" in runner.needs else IDS)
    return pickle.dumps(trace)  # as bytes, since shared memory would end with this process


def _opened(outcome: RankOutcome) -> LoopTrace:
    if outcome.error is not None:
        # The rank's traceback ends with that of the loop, which is what the user needs.
        raise LoopFailedError(outcome.error.rpartition(f"{LoopFailedError.__name__}: ")[2].rstrip())
    trace: LoopTrace = pickle.loads(outcome.value)  # noqa: S301 (made by `run_on_rank`, in a process of ours)
    return trace
