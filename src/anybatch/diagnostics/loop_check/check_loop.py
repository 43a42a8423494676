"""`check_loop`: run a loop on the probe (the test model), on one rank or two, and check its optimizer steps."""

import dataclasses
import itertools
import math
import multiprocessing
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from anybatch.diagnostics.loop_check.judge import LoopJudge
from anybatch.diagnostics.loop_check.judged_loop import JudgedLoop, prepare_process
from anybatch.diagnostics.loop_check.probe import TARGET_KINDS, LoopTrace, TargetKind
from anybatch.diagnostics.loop_check.report import LoopReport, LoopVerdict
from anybatch.diagnostics.loop_check.sandbox import run_in_sandbox
from anybatch.errors import LoopError
from anybatch.parallel.launchers import rank_context, set_launch_variables
from anybatch.testing.ranks import PRELOADED, RankPool

NUM_RANKS = 2
Loop = Callable[..., Any]


def check_loop(
    function: Loop,
    *,
    data: TargetKind | None = None,
    ranks: Literal[1, 2] | None = None,
    time_limit_seconds: float = 120.0,
    returns_loop: bool = False,
) -> LoopReport:
    """Check whether the steps of an unchanged training loop use the gradients of their unsplit batches.

    The loop is a function of a model, a loader or data set, and usually an optimizer and a number of accumulation
    steps; `judged_loop.ROLES` lists the accepted parameter names. The loop runs for two epochs on 31 samples, with 3
    micro-batches of 4 samples per step, on a model whose gradient shows the weight of each sample. A loop that uses
    torch.distributed runs on two processes with gloo. If it has several models, each trained one is checked. The loop
    runs in a subprocess, in a temporary copy of the working folder: see `sandbox`.

    Args:
        function: the loop.
        data: the kind of targets: "classes", "tokens", "values" or "scores" (0 and 1); None: all that the loop accepts.
        ranks: number of ranks; None: 2 if the loop uses torch.distributed, else 1.
        time_limit_seconds: a check that takes longer is stopped, and raises an error.
        returns_loop: the function imports the loop and returns it; it runs in the subprocess.

    Raises:
        LoopError: a parameter is unknown, or the loop raised an error, whose traceback is in the message.
    """
    work = partial(_judge, function, data, ranks, time_limit_seconds, returns_loop=returns_loop)
    return run_in_sandbox(work, timeout_seconds=time_limit_seconds)


def _judge(
    function: Loop, data: TargetKind | None, ranks: Literal[1, 2] | None, seconds: float, *, returns_loop: bool
) -> LoopReport:
    """Return the report on a loop; runs in the sandbox."""
    base_loop = JudgedLoop(function() if returns_loop else function)
    num_ranks = NUM_RANKS if (base_loop.uses_ranks if ranks is None else ranks > 1) else 1
    if num_ranks == 1:
        prepare_process(in_group=base_loop.uses_ranks)
    ran: dict[TargetKind, list[tuple[JudgedLoop, Sequence[LoopTrace]]]] = {}
    reports: list[tuple[TargetKind, LoopReport]] = []
    failures: dict[TargetKind, LoopError] = {}
    # Runs on several ranks come first, because forking processes after a backward is not safe everywhere.
    kinds = sorted(TARGET_KINDS, key=lambda kind: kind != "tokens") if base_loop.is_for_tokens else TARGET_KINDS
    for kind, dtype in itertools.product((data,) if data else kinds, (torch.float64, torch.float32)):
        # Other data often run too, with another meaning: skip them. Loops with float32 tensors need float32.
        if kind not in ran and not (ran and (kind in {"values", "scores"} or base_loop.is_for_tokens)):
            try:
                ran[kind] = _run_all(base_loop.changed(kind=kind, dtype=dtype), num_ranks, seconds)
            except LoopError as error:
                failures.setdefault(kind, error)
    if num_ranks > 1:
        prepare_process(in_group=base_loop.uses_ranks)
    for kind, runs in ran.items():
        try:
            reports += [(kind, LoopJudge(loop, traces).report()) for loop, traces in runs]
        except LoopError as error:
            failures[kind] = error
    if not reports:
        first = next(iter(failures))
        roles = ", ".join(f"{name}: {role.replace('_', ' ')}" for name, role in base_loop.roles.items())
        message = (
            f"{base_loop.name} failed on {' and '.join(failures)}; its arguments were {roles}.\n\n{failures[first]}"
        )
        raise LoopError(message, cause=failures[first].cause)
    return _merge_reports(reports)


def _run_all(loop: JudgedLoop, num_ranks: int, seconds: float) -> list[tuple[JudgedLoop, Sequence[LoopTrace]]]:
    """Run a loop once for each of its models, and return the runs whose model is trained, or else the first run."""
    runs = []
    for watched in range(len(loop.models)):
        loop = loop.changed(watched=watched)
        try:
            traces = _traces_of(loop, num_ranks, seconds)
        except LoopError as error:
            number = re.search(r"values to unpack \(expected (\d+)", str(error))
            if number is None or loop.num_outputs > 1:
                raise
            loop = loop.changed(num_outputs=int(number[1]))  # the model may return several values
            traces = _traces_of(loop, num_ranks, seconds)
        runs.append((loop, traces))
    return [run for run in runs if run[1][0].steps] or runs[:1]


def _traces_of(loop: JudgedLoop, num_ranks: int, seconds: float) -> Sequence[LoopTrace]:
    if num_ranks == 1:
        return (loop.run(),)
    forks = multiprocessing.get_context("fork") if sys.platform == "linux" else rank_context(*PRELOADED)
    with RankPool(num_ranks, timeout_seconds=seconds / 4, context=forks) as pool:
        outcomes = pool.outcomes(run_on_rank, loop)
    if lost := [outcome.error for outcome in outcomes if outcome.error is not None]:
        raise LoopError(lost[0])
    results = [pickle.loads(outcome.value) for outcome in outcomes]  # noqa: S301 (from `run_on_rank`)
    if errors := [result for result in results if isinstance(result, LoopError)]:
        raise errors[0]
    return results


def run_on_rank(loop: JudgedLoop) -> bytes:
    """Run a loop on this rank: its loader has only the rank's part of the samples, but a data set has all samples."""
    rank, num_ranks, ids = dist.get_rank(), dist.get_world_size(), loop.ids
    set_launch_variables(rank, num_ranks)
    prepare_process(in_group=True)
    share = math.ceil(len(ids) / num_ranks)
    try:
        result: object = loop.run(ids[rank * share : (rank + 1) * share] if "loader" in loop.needed else ids)
    except LoopError as error:
        result = error
    return pickle.dumps(result)  # as bytes, because tensors in shared memory would be freed with this process


def _merge_reports(reports: Sequence[tuple[TargetKind, LoopReport]]) -> LoopReport:
    """Return the report with the worst verdict, with the findings on all kinds of data and for all models."""
    worst, report = max(reports, key=lambda pair: list(LoopVerdict).index(pair[1].verdict))
    findings = {finding.code: finding for _, each in (*reports, (worst, report)) for finding in each.findings}
    if findings.keys() == report.codes and len({each.verdict for _, each in reports}) == 1:
        return report
    verdicts = "; ".join(f"on {kind} {each.verdict}" for kind, each in reports)
    remark = f"Checked on each accepted kind of data: {verdicts}. The table is for {worst}; choose a kind with --data."
    return dataclasses.replace(
        report,
        findings=tuple(sorted(findings.values(), key=lambda finding: not finding.in_gradient)),
        remarks=(*report.remarks, remark),
    )
