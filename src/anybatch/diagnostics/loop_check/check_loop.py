"""`check_loop`: run a loop on the probe model, on one rank or two, and judge its optimizer steps."""

import dataclasses
import itertools
import math
import multiprocessing
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from anybatch.diagnostics.loop_check.findings import LoopFinding
from anybatch.diagnostics.loop_check.judge import Evidence, judge
from anybatch.diagnostics.loop_check.judged_loop import (
    ACCUMULATION_STEPS,
    LOUD_GAIN,
    MICRO_BATCH_SIZE,
    NUM_EPOCHS,
    JudgedLoop,
    prepare_process,
)
from anybatch.diagnostics.loop_check.parameters import LoopParameters, read_parameters
from anybatch.diagnostics.loop_check.probe import TARGET_KINDS, TargetKind
from anybatch.diagnostics.loop_check.recorder import LoopStopped, LoopTrace, is_close, near, time_limit
from anybatch.diagnostics.loop_check.report import LoopReport, LoopVerdict, ranges
from anybatch.diagnostics.loop_check.sandbox import run_in_sandbox
from anybatch.diagnostics.loop_check.steps import micro_batches_of, steps_of
from anybatch.diagnostics.loop_check.unit_gradients import UnitGradients
from anybatch.errors import LoopError
from anybatch.parallel.launchers import say_launched
from anybatch.testing.ranks import RankOutcome, RankPool, rank_context

NUM_RANKS = 2
IMPORT_SECONDS, MAX_RUNS = 60.0, 20
LOSS_SCALE = 1024.0
Loop = Callable[..., Any]


def check_loop(
    function: Loop,
    *,
    data: TargetKind | None = None,
    ranks: Literal[1, 2] | None = None,
    time_limit_seconds: float = 20.0,
) -> LoopReport:
    """Judge an unchanged training loop: does each optimizer step use the gradient of its un-split batch?

    The loop is a function of a model, a loader or data set, and usually an optimizer and a number of accumulation
    steps; `parameters.ROLES` has the names that parameters may have. It runs for two epochs on 31 samples in
    micro-batches of 4 and windows of 3, on a model whose gradient shows the weight of each sample. A loop that uses
    torch.distributed runs on two processes with gloo.

    It runs in a subprocess, in a temporary copy of the working folder: see `sandbox`.

    Args:
        function: the loop.
        data: the kind of data; "classes", "values" or "tokens". None tries all that it can run on.
        ranks: number of ranks; None is 2 if it uses torch.distributed.
        time_limit_seconds: a run of the loop that takes longer is stopped.

    Returns:
        The verdict, findings and steps.

    Raises:
        LoopError: a parameter is unknown, or the loop itself raised; the message has its traceback.
    """
    return check_named_loop(partial(_same, function), data=data, ranks=ranks, time_limit_seconds=time_limit_seconds)


def check_named_loop(
    find: Callable[[], Loop],
    *,
    data: TargetKind | None = None,
    ranks: Literal[1, 2] | None = None,
    time_limit_seconds: float = 20.0,
) -> LoopReport:
    """Judge the loop that `find` returns, as `check_loop` does; `find` imports it in the subprocess.

    Raises:
        UserError: as `check_loop`; or there is no such loop, or finding it takes more than a minute.
    """
    work = partial(_judge, find, data, ranks, time_limit_seconds)
    result = run_in_sandbox(work, timeout_seconds=IMPORT_SECONDS + MAX_RUNS * time_limit_seconds)
    return dataclasses.replace(result.value, written=result.written, not_copied=result.not_copied)


def _same(function: Loop) -> Loop:
    return function


def _judge(
    find: Callable[[], Loop], data: TargetKind | None, ranks: Literal[1, 2] | None, seconds: float
) -> LoopReport:
    """Return the report on a loop, within the sandbox."""
    function = _imported(find)
    parameters = read_parameters(function)
    num_ranks = NUM_RANKS if (parameters.uses_ranks if ranks is None else ranks > 1) else 1
    if num_ranks == 1:
        prepare_process(in_group=parameters.uses_ranks)
    kinds = TARGET_KINDS if data is None else (data,)
    ran: dict[TargetKind, tuple[JudgedLoop, Sequence[LoopTrace]]] = {}
    reports: dict[TargetKind, LoopReport] = {}
    failures: dict[TargetKind, LoopError] = {}
    # Several ranks first, for all kinds: they are forked, which is not safe everywhere after a backward.
    for kind, dtype in itertools.product(kinds, (torch.float64, torch.float32)):
        # Losses for classes also accept values, as soft labels; float32 is for loops with float32 numbers, such as
        # class weights.
        if kind in ran or (kind == "values" and ran):
            continue
        loop = JudgedLoop(function, parameters, kind, dtype, seconds)
        try:
            ran[kind] = loop, traces_of(loop, num_ranks)
        except LoopError as error:
            failures.setdefault(kind, error)
    if num_ranks > 1:
        prepare_process(in_group=parameters.uses_ranks)
    for kind, (loop, traces) in ran.items():
        try:
            reports[kind] = _report(loop, traces)
        except LoopError as error:
            failures[kind] = error
    if not reports:
        raise _failure(function, parameters, failures)
    return _joined(reports)


def _imported(find: Callable[[], Loop]) -> Loop:
    try:
        with time_limit(IMPORT_SECONDS):
            return find()
    except LoopStopped:
        message = (
            f"importing the loop took more than {IMPORT_SECONDS:g} seconds and was stopped. If its file trains when "
            'imported, put that under if __name__ == "__main__".'
        )
        raise LoopError(message) from None


def traces_of(loop: JudgedLoop, num_ranks: int) -> Sequence[LoopTrace]:
    """Return the traces of a loop on each rank."""
    if num_ranks == 1:
        return (loop.run(),)
    forks = multiprocessing.get_context("fork") if sys.platform == "linux" else rank_context()
    with RankPool(num_ranks, timeout_seconds=2 * loop.time_limit_seconds, context=forks) as pool:
        return tuple(map(_opened, pool.outcomes(run_on_rank, loop)))


def run_on_rank(loop: JudgedLoop) -> bytes:
    """Run a loop on every rank: a loader has the rank's share, a data set has all samples."""
    rank, num_ranks, ids = dist.get_rank(), dist.get_world_size(), loop.ids
    say_launched(rank, num_ranks)
    prepare_process(in_group=True)
    share = -(-len(ids) // num_ranks)
    trace = loop.run(ids[rank * share : (rank + 1) * share] if "loader" in loop.parameters.needed else ids)
    return pickle.dumps(trace)  # as bytes: shared memory would end with this process


def _opened(outcome: RankOutcome) -> LoopTrace:
    if outcome.error is not None:  # the rank's traceback ends with the traceback of the loop
        raise LoopError(outcome.error.rpartition(f"{LoopError.__name__}: ")[2].rstrip(), cause="RankFailed")
    trace: LoopTrace = pickle.loads(outcome.value)  # noqa: S301 (from `run_on_rank`)
    return trace


def _report(loop: JudgedLoop, traces: Sequence[LoopTrace]) -> LoopReport:
    """Return the report on one kind of data. Expected gradients are measured on one rank in any case."""
    if traces[0].has_more_passes and not traces[0].steps:
        message = (
            f"{loop.name} made no step in {len(traces[0].forwards)} micro-batches, and was stopped. Give it a "
            f"parameter accumulation_steps (it will be {ACCUMULATION_STEPS}), or accumulate over fewer micro-batches."
        )
        raise LoopError(message)
    evidence = _evidence(loop, traces)
    windows, findings = judge(evidence)
    if len(traces) == 1 and traces[0].ended and loop.knows_steps and "loader" in loop.parameters.roles.values():
        findings += _about_loss(evidence)
    return LoopReport(
        loop=loop.name,
        verdict=_verdict(findings),
        findings=findings,
        windows=windows,
        accumulation_steps=evidence.accumulation_steps,
        num_ranks=len(traces),
        remarks=tuple(_remarks(evidence)),
    )


def _evidence(loop: JudgedLoop, traces: Sequence[LoopTrace]) -> Evidence:
    """Run the loop under other settings, and return everything recorded about it."""
    loud, scaled, is_random = None, [], False
    if len(traces) == 1:
        loud, again = loop.run(gain=LOUD_GAIN), loop.run(seed=1)
        pairs = zip(traces[0].steps, again.steps, strict=False)
        is_random = any(not is_close(one.gradient, other.gradient) for one, other in pairs)
        if loop.parameters.uses_scaler:
            scaled = [(traces[0], loop.run(loss_scale=LOSS_SCALE))]
            scaled.append((loud, loop.run(gain=LOUD_GAIN, loss_scale=LOSS_SCALE)))
    # Shares of ranks differ by one sample at most.
    batches_per_epoch = math.ceil(math.ceil(len(loop.ids) / len(traces)) / MICRO_BATCH_SIZE)
    # A loop that counts steps may end anywhere.
    num_epochs = 0 if {"max_steps"} == {"max_steps", "epochs"} & loop.parameters.needed else NUM_EPOCHS
    micro_batches = [micro_batches_of(trace, rank, num_epochs, batches_per_epoch) for rank, trace in enumerate(traces)]
    steps = steps_of(traces, micro_batches)
    sizes = Counter(step.size for step in steps)
    most_common = max(sizes, key=lambda size: (sizes[size], size), default=ACCUMULATION_STEPS)
    return Evidence(
        loop=loop,
        traces=traces,
        loud=loud,
        scaled=scaled,
        is_random=is_random,
        micro_batches=micro_batches,
        steps=steps,
        units=UnitGradients(loop, traces[0]),
        accumulation_steps=ACCUMULATION_STEPS if loop.knows_steps else most_common,
    )


def _about_loss(evidence: Evidence) -> tuple[LoopFinding, ...]:
    """Return whether the returned loss of one window is the loss of its last micro-batch."""
    loop, window = evidence.loop, range(MICRO_BATCH_SIZE * ACCUMULATION_STEPS)
    returned = loop.run(window, epochs=1).returned_loss
    expected = loop.run(window, size=len(window), steps=1, epochs=1).returned_loss
    last = loop.run(window[-MICRO_BATCH_SIZE:], steps=1, epochs=1).returned_loss
    if returned is None or expected is None or last is None or near(returned, expected):
        return ()
    # The last loss may be returned unchanged, or divided for accumulation.
    if not any(near(returned, last / divisor) for divisor in (1, ACCUMULATION_STEPS)):
        return ()
    return (evidence.finding("logs_last_loss", f"{returned:.4g}", f"{expected:.4g}", loop.first_line),)


def _remarks(evidence: Evidence) -> Sequence[str]:
    remarks = []
    trace = evidence.traces[0]
    if trace.has_more_passes:
        remarks.append(f"The loop was stopped after {NUM_EPOCHS} passes over the data.")
    if evidence.loop.parameters.is_stream:
        remarks.append(
            "The loop asks for one batch at a time, so all batches had the same size and no padding: a smaller last "
            "batch was not tested."
        )
    if trace.guesses:
        guesses = ", ".join(f"{name}={value!r}" for name, value in trace.guesses.items())
        remarks.append(f"Unknown settings, with the values that the loop got: {guesses}.")
    if not evidence.units.scale_is_known:
        remarks.append(
            "The loop has no parameter for accumulation steps and an uncommon loss, so a factor that all gradients "
            "share cannot be detected."
        )
    hidden = [sample for sample in evidence.loop.ids if evidence.units.is_hidden(sample)]
    if hidden:
        remarks.append(f"Samples without a gradient (masked, or with loss zero) have no weight: {ranges(hidden)}.")
    return remarks


def _verdict(findings: Sequence[LoopFinding]) -> LoopVerdict:
    wrong = {finding.code for finding in findings if finding.in_gradient}
    if wrong == {"draws_random_numbers"}:
        return LoopVerdict.UNDECIDED
    if wrong == {"constant_factor"}:
        return LoopVerdict.CONSTANT_FACTOR
    return LoopVerdict.NOT_EQUAL if wrong else LoopVerdict.EXACT


def _joined(reports: Mapping[TargetKind, LoopReport]) -> LoopReport:
    """Return the report on the first kind of data, or on the first with the worst verdict, with all findings."""
    first, *_ = reports
    worst = max(reports, key=lambda kind: list(LoopVerdict).index(reports[kind].verdict))
    if reports[worst].verdict == reports[first].verdict and reports[worst].codes <= reports[first].codes:
        worst = first
    report = reports[worst]
    findings = {finding.code: finding for each in reports.values() for finding in each.findings}
    findings |= {finding.code: finding for finding in report.findings}
    if worst == first and findings.keys() == report.codes:
        return report
    verdicts = "; ".join(f"on {kind} {each.verdict}" for kind, each in reports.items())
    remark = f"Judged on all data it can run on: {verdicts}. The table is for {worst}; choose the data with --data."
    return dataclasses.replace(
        report,
        findings=tuple(sorted(findings.values(), key=lambda finding: not finding.in_gradient)),
        remarks=(*report.remarks, remark),
    )


def _failure(function: Loop, parameters: LoopParameters, failures: Mapping[TargetKind, LoopError]) -> LoopError:
    """Return the error of a loop that raised on all kinds of data."""
    first, *others = failures
    also = f" (and on {', '.join(others)})" if others else ""
    roles = ", ".join(f"{name}: {role.replace('_', ' ')}" for name, role in parameters.roles.items())
    message = (
        f"{getattr(function, '__name__', 'the loop')} raised an error on {first}{also}. Its arguments were {roles}; a "
        f"batch is a pair (inputs, targets), or a dict.\n\n{failures[first]}"
    )
    return LoopError(message, cause=failures[first].cause)
