"""`check_loop`: run a loop on the probe model, on one rank or two, and judge its optimizer steps."""

import dataclasses
import inspect
import itertools
import multiprocessing
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from anybatch.diagnostics.loop_check import sentences
from anybatch.diagnostics.loop_check.judge import LoopEvidence, judge
from anybatch.diagnostics.loop_check.loop_report import LoopFinding, LoopReport, LoopVerdict, Window
from anybatch.diagnostics.loop_check.loop_trace import LoopTrace, TableGradient
from anybatch.diagnostics.loop_check.own_process import Enclosure, in_own_process
from anybatch.diagnostics.loop_check.probe_model import NUM_ROWS, TARGET_KINDS, ProbeData, TargetKind, make_data
from anybatch.diagnostics.loop_check.recorder import LoopStopped, TimeLimit
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
from anybatch.diagnostics.loop_check.windows import is_close, near, parts_of, steps_of
from anybatch.errors import UserError
from anybatch.parallel.launchers import say_launched
from anybatch.testing.ranks import RankOutcome, RankPool, rank_context

IDS = range(NUM_ROWS - 1)
"""31 samples: on one rank and on two the last micro-batch is smaller than the others, and the last window shorter."""
MICRO_BATCH_SIZE, ACCUMULATION_STEPS, NUM_EPOCHS, NUM_RANKS = 4, 3, 2, 2
IMPORT_SECONDS, MAX_LIMITS = 60.0, 20
LOSS_SCALE = 1024.0
"""Of gradient scalers, to see whether what is clipped or stepped with is unscaled."""


def check_loop(
    function: LearningLoop,
    *,
    data: TargetKind | None = None,
    ranks: Literal[1, 2] | None = None,
    time_limit_seconds: float = 20.0,
) -> LoopReport:
    """Judge a training loop as it is: is the gradient of each optimizer step that of its un-split batch?

    The loop is a function of a model, a loader or data set, and mostly an optimizer and a number of accumulation
    steps; see `roles` for the names that parameters may have. It is run for two epochs on 31 samples in micro-batches
    of 4 and windows of 3, on a real model whose gradient says which samples made it and with what weights. A loop that
    uses torch.distributed is run by two processes, with gloo between them.

    It runs in a process of its own, in a folder that looks like the working folder and is gone afterwards: nothing of
    the user's is changed, and what it would change elsewhere is refused; see `own_process`.

    Args:
        function: the loop.
        data: what samples are like; "classes", "values" or "tokens". None judges it on all that it can run.
        ranks: on how many; None looks at what the function uses.
        time_limit_seconds: a run of the loop that takes longer is ended.

    Returns:
        The verdict, findings and steps.

    Raises:
        UserError: a parameter is not understood, or the loop itself raised; the message has its traceback.
    """
    return check_named_loop(partial(_itself, function), data=data, ranks=ranks, time_limit_seconds=time_limit_seconds)


def check_named_loop(
    find: Callable[[], LearningLoop],
    *,
    data: TargetKind | None = None,
    ranks: Literal[1, 2] | None = None,
    time_limit_seconds: float = 20.0,
) -> LoopReport:
    """Do what `check_loop` does with the loop that `find` returns, which imports it in the process of its own.

    Raises:
        UserError: as `check_loop`; or there is no such loop, or finding it takes longer than a minute.
    """
    work = partial(_judge, find=find, data=data, ranks=ranks, seconds=time_limit_seconds)
    # Three kinds of data, each with some dozen runs of at most that long, most of them much shorter.
    return in_own_process(work, most_seconds=IMPORT_SECONDS + MAX_LIMITS * time_limit_seconds)


def _itself(function: LearningLoop) -> LearningLoop:
    return function


def _judge(
    enclosure: Enclosure,
    *,
    find: Callable[[], LearningLoop],
    data: TargetKind | None,
    ranks: Literal[1, 2] | None,
    seconds: float,
) -> LoopReport:
    """Return the report of a loop, within its enclosure."""
    limit = TimeLimit(IMPORT_SECONDS)
    try:
        limit.start()
        function = find()
    except LoopStopped:
        message = (
            f"importing the loop was not done after {IMPORT_SECONDS:g} seconds and was ended. Does its file train when "
            'it is imported? Put that behind if __name__ == "__main__".'
        )
        raise UserError(message) from None
    finally:
        limit.cancel()
    needs = read_parameters(function)
    num_ranks = NUM_RANKS if (needs.ranks if ranks is None else ranks > 1) else 1
    kinds = TARGET_KINDS if data is None else (data,)
    runners: dict[TargetKind, _Runner] = {}
    traces: dict[TargetKind, tuple[LoopTrace, ...]] = {}
    failures: dict[TargetKind, str] = {}
    # On ranks first, for all kinds: they are forked, which a process that has run a backward cannot do everywhere.
    for kind, dtype in itertools.product(kinds, (torch.float64, torch.float32)):
        # A loss of classes takes values for soft labels, which is no news; and what runs in float64 is not run again.
        if kind in traces or (kind == "values" and traces):
            continue
        runners[kind] = _Runner(function, needs, kind, seconds, dtype)
        try:
            traces[kind] = runners[kind].traces(num_ranks)
        # A loop that fails on one kind of targets may have been written for another, and one that has numbers of its
        # own, such as class weights, for float32.
        except LoopFailedError as error:
            failures.setdefault(kind, str(error))
    reports = {}
    for kind, trace in traces.items():
        try:
            reports[kind] = runners[kind].judge(trace)
        except LoopFailedError as error:
            failures[kind] = str(error)
    if not reports:
        raise UserError(
            _failed(function, needs, {kind: failures[kind] for kind in kinds if kind in failures}, num_ranks)
        )
    return dataclasses.replace(_joined(reports), written=tuple(enclosure.written()))


def _failed(function: LearningLoop, needs: LoopParameters, failures: dict[TargetKind, str], num_ranks: int) -> str:
    kind, words = next(iter(failures.items()))
    others = ", ".join(list(failures)[1:])
    tried = f" (on {others} it failed too)" if others else ""
    joined = " Its ranks have joined a process group already." if num_ranks > 1 else ""
    return (
        f"{function.__name__} raised, given {kind}{tried}. It was called with {_described(needs)}; a batch is a pair "
        f"(inputs, targets) that also answers to names.{joined}\n\n{words}"
    )


def _joined(reports: dict[TargetKind, LoopReport]) -> LoopReport:
    """Return the report on the first kind of data, or on the first on which something else is wrong, with a remark."""
    order = [LoopVerdict.EXACT, LoopVerdict.CONSTANT_FACTOR, LoopVerdict.UNDECIDED, LoopVerdict.NOT_EQUAL]
    first = next(iter(reports.values()))
    worst = max(reports, key=lambda kind: order.index(reports[kind].verdict))
    found = reports[worst]
    if found.verdict == first.verdict and found.codes >= first.codes:
        found, worst = first, next(iter(reports))
    extra = [one for report in reports.values() for one in report.findings if one.code not in found.codes]
    merged = {one.code: one for one in (*extra, *found.findings)}
    if not extra and found is first:
        return found
    remark = (
        f"It runs on {' and '.join(reports)}, and was judged on each: "
        + "; ".join(f"on {kind} {report.verdict}" for kind, report in reports.items())
        + f". The table is that on {worst}; --data names the kind that it is meant for."
    )
    findings = sorted(merged.values(), key=lambda one: not one.in_gradient)
    return dataclasses.replace(found, findings=tuple(findings), remarks=(*found.remarks, remark))


def _described(needs: LoopParameters) -> str:
    return ", ".join(f"{name}: {role.replace('_', ' ')}" for name, role in needs.roles.items())


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs one loop on samples of one kind."""

    function: LearningLoop
    needs: LoopParameters
    kind: TargetKind  # and not the data: a tensor that is sent to ranks starts a thread that stays
    time_limit_seconds: float
    dtype: torch.dtype

    @property
    def data(self) -> ProbeData:
        """The samples."""
        return make_data(self.kind, is_padded=not self.needs.is_stream, dtype=self.dtype)

    @property
    def ids(self) -> range:
        """Those of an epoch: a stream has full windows only."""
        window = MICRO_BATCH_SIZE * ACCUMULATION_STEPS
        return range(len(IDS) // window * window) if self.needs.is_stream else IDS

    def run(
        self,
        ids: Sequence[int] | None = None,
        *,
        size: int = MICRO_BATCH_SIZE,
        steps: int = ACCUMULATION_STEPS,
        epochs: int = NUM_EPOCHS,
        **choices: Any,  # noqa: ANN401 (those of LoopSettings)
    ) -> LoopTrace:
        settings = LoopSettings(
            data=self.data,
            ids=self.ids if ids is None else ids,
            micro_batch_size=size,
            accumulation_steps=steps,
            num_epochs=epochs,
            time_limit_seconds=self.time_limit_seconds,
            **choices,
        )
        return run_loop(self.function, self.needs, settings)

    def traces(self, num_ranks: int) -> tuple[LoopTrace, ...]:
        """Return what the loop does on so many ranks."""
        if num_ranks == 1:
            with self._group():
                return (self.run(),)
        forks = multiprocessing.get_context("fork") if sys.platform == "linux" else rank_context()
        with RankPool(num_ranks, timeout_seconds=2 * self.time_limit_seconds, context=forks) as pool:
            return tuple(map(_opened, pool.outcomes(run_on_rank, self)))

    def judge(self, traces: tuple[LoopTrace, ...]) -> LoopReport:
        """Return the report of what the loop did.

        The expected gradients are measured on one rank in any case.
        """
        with self._group():
            if traces[0].has_more_passes and not traces[0].steps:
                message = (
                    f"{self.function.__name__} made no step in {len(traces[0].forwards)} micro-batches, after which it "
                    f"was ended. Let it have a parameter accumulation_steps, which is {ACCUMULATION_STEPS} then, or "
                    "accumulate over fewer."
                )
                raise UserError(message)
            loud, scaled = None, []
            if len(traces) == 1:
                # Clipping shows as a difference between small and large gradients.
                loud = self.run(gain=LOUD_GAIN)
                # Small ones are not clipped, so they show steps with scaled gradients; large ones show what is clipped.
                if "scaler" in self.needs or any("scaler" in word.lower() for word in self.needs.words):
                    scaled = [(traces[0], self.run(loss_scale=LOSS_SCALE))]
                    scaled.append((loud, self.run(gain=LOUD_GAIN, loss_scale=LOSS_SCALE)))
            evidence = self._evidence(traces, loud, scaled, self._units(traces[0]))
            windows, findings = judge(evidence)
            has_loss = len(traces) == 1 and {"accumulation_steps", "loader"} <= set(self.needs.roles.values())
            if has_loss and traces[0].ended:
                findings += self._about_loss()
        return self._report(evidence, windows, findings)

    def _group(self) -> AbstractContextManager[None]:
        # A loop for several ranks is also run alone, to measure unit gradients, and may ask for its rank then.
        if not self.needs.ranks:
            return nullcontext()
        say_launched(0, 1)
        return group_of_one()

    def _draws(self, trace: LoopTrace) -> bool:
        """Return whether the loop does something else from another seed."""
        again = self.run(seed=1)
        pairs = zip(trace.steps, again.steps, strict=False)
        return any(not is_close(one.gradient, other.gradient) for one, other in pairs)

    def _units(self, trace: LoopTrace) -> UnitGradients:
        """Return how to measure weights.

        A loader can be given one whole batch. What a loop makes of a data set is measured on micro-batches of one size
        instead, with accumulation steps of one, as if the loss were a mean over samples.
        """
        has_steps, shape = "accumulation_steps" in self.needs, self.data.outputs.shape
        # A loader can be given one batch of everything; what becomes of a data set is up to the loop, and is looked at.
        whole = bool({"loader", "batch_function", "micro_batch_size"} & self.needs.all_roles)
        has_loader = "loader" in self.needs or "batch_function" in self.needs
        rows = rows_by_size(trace if has_loader else self.run(range(NUM_ROWS), steps=1, epochs=1), shape)

        def unsplit(ids: tuple[int, ...]) -> tuple[TableGradient, bool] | None:
            trace = self.run(ids, size=len(ids), steps=1, epochs=1) if whole else None
            is_one = trace is not None and bool(trace.forwards) and len(trace.forwards[0].ids) == len(ids)
            gradient = gradient_of(trace, ids, shape) if trace is not None and (is_one or has_loader) else None
            if gradient is not None:
                return gradient, has_steps
            return _only(rows, ids) / len(ids), has_steps and not has_loader

        return UnitGradients(self.data, unsplit)

    def _evidence(
        self,
        traces: Sequence[LoopTrace],
        loud: LoopTrace | None,
        scaled: Sequence[tuple[LoopTrace, LoopTrace]],
        units: UnitGradients,
    ) -> LoopEvidence:
        # Ranks differ by one sample at most, and the last one's epoch ends with a smaller micro-batch.
        share = -(-len(self.ids) // len(traces))
        num_batches = -(-share // MICRO_BATCH_SIZE)
        # A loop that counts steps may end anywhere.
        num_epochs = 0 if "max_steps" in self.needs and "epochs" not in self.needs else NUM_EPOCHS
        parts = [parts_of(trace, rank, num_epochs, num_batches) for rank, trace in enumerate(traces)]
        steps = steps_of(traces, parts)
        sizes = Counter(step.num_micro_batches for step in steps)
        knows_steps = "accumulation_steps" in self.needs
        # Called for its effect: measuring all samples decides whether the scale is known.
        units.of(self.ids)
        return LoopEvidence(
            traces=traces,
            parts=parts,
            steps=steps,
            loud=loud,
            scaled=scaled,
            draws=len(traces) == 1 and self._draws(traces[0]),
            units=units,
            ids=self.ids,
            accumulation_steps=ACCUMULATION_STEPS
            if knows_steps or not sizes
            else max(sizes, key=lambda n: (sizes[n], n)),
            knows_steps=knows_steps,
            micro_batch_size=MICRO_BATCH_SIZE,
            file=inspect.getsourcefile(inspect.unwrap(self.function)),
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
        name = inspect.unwrap(self.function).__code__.co_firstlineno
        file = inspect.getsourcefile(inspect.unwrap(self.function))
        where = "the loop" if file is None else f"{file.rpartition('/')[2]}:{name}"
        return (sentences.logs_last_loss(found, window, where),)

    def _report(
        self, evidence: LoopEvidence, windows: tuple[Window, ...], findings: tuple[LoopFinding, ...]
    ) -> LoopReport:
        remarks = []
        if evidence.traces[0].has_more_passes:
            remarks.append(f"It would have gone on: {NUM_EPOCHS} passes over the data were judged.")
        if self.needs.is_stream:
            remarks.append(
                "It asks for one batch after the other, so all had one size and no padding: what it does with a last "
                "smaller one was not seen."
            )
        if guesses := evidence.traces[0].guesses:
            given = ", ".join(f"{name}={value!r}" for name, value in guesses.items())
            remarks.append(f"Settings that it asked for, and what it was given: {given}.")
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
    wrong = {finding.code for finding in findings if finding.in_gradient and not finding.is_undecided}
    if not wrong and any(finding.is_undecided for finding in findings):
        return LoopVerdict.UNDECIDED
    if wrong == {"constant_factor"}:
        return LoopVerdict.CONSTANT_FACTOR
    return LoopVerdict.NOT_EQUAL if wrong else LoopVerdict.EXACT


def _only(rows: TableGradient, ids: Sequence[int]) -> TableGradient:
    found = torch.zeros_like(rows)
    found[list(ids)] = rows[list(ids)]
    return found


def run_on_rank(runner: _Runner) -> bytes:
    """Run on every rank: return, as bytes, what the loop did. A loader holds the rank's share, a data set all."""
    rank, num_ranks, ids = dist.get_rank(), dist.get_world_size(), runner.ids
    say_launched(rank, num_ranks)
    share = -(-len(ids) // num_ranks)
    trace = runner.run(ids[rank * share : (rank + 1) * share] if "loader" in runner.needs else ids)
    return pickle.dumps(trace)  # as bytes, since shared memory would end with this process


def _opened(outcome: RankOutcome) -> LoopTrace:
    if outcome.error is not None:
        # The rank's traceback ends with that of the loop, which is what the user needs.
        raise LoopFailedError(outcome.error.rpartition(f"{LoopFailedError.__name__}: ")[2].rstrip())
    trace: LoopTrace = pickle.loads(outcome.value)  # noqa: S301 (made by `run_on_rank`, in a process of ours)
    return trace
