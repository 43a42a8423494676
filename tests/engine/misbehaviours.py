"""The ways in which one rank misbehaves, each with the expected endings."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

import anybatch as ab
from tests.engine.misbehaving_ranks import Act, Misbehaviour, Program, step_in_thread, stop_for
from tests.engine.misbuilt_ranks import DIFFERS, other_builds, other_data, other_states

SLOW_SECONDS = 2.0
PLANTED = "ValueError: planted"
ENDED = r"RankFailedError: .*rank 1 has ended"
APART = (
    r"finished|RankFailedError: .*planted|RanksDifferError|ReplicaError|UpdateFailedError|WorldError: .*earlier error"
)
"""Endings of ranks whose loops survive errors: in step again, or refused with a reason."""

BEFORE = ("model", "optimizer function", "scheduler function")
"""Places in the construction of the engine."""
IN_STEP = (
    "loss",
    "end of loss",
    "forward",
    "backward",
    "autograd function",
    "dataset",
    "optimizer hook",
    "optimizer",
    "scheduler",
    "observer, micro-batch",
    "observer",
)
NOW_AND_THEN = {"between": 2, "state_dict": 1, "metric": 2, "evaluated data": 2, "load_state_dict": 3}
"""Places outside of steps, and the step before each of them."""


def fail(_: Program) -> None:
    """Raise the planted error."""
    message = "planted"
    raise ValueError(message)


def raising(error: BaseException) -> Act:
    """Return a function that raises an error."""

    def act(_: Program) -> None:
        raise error

    return act


def die(_: Program) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_: Program) -> None:
    """End this process without an error, as a library that calls exit() does."""
    os._exit(7)


def delay(_: Program) -> None:
    """Sleep."""
    time.sleep(SLOW_SECONDS)


def _odd_rank(place: str) -> int:
    """Return the rank that misbehaves at a place: some strategies save states from rank 0 only."""
    return 0 if place == "state_dict" else 1


def all_misbehaviours() -> dict[str, Misbehaviour]:
    """Return all misbehaviours by name."""
    sources = (raising_ranks, dying_ranks, slow_ranks, other_calls, other_builds, other_data, other_states)
    found = {case.name: case for source in sources for case in source()}
    assert len(found) == sum(len(list(source())) for source in sources), "a name comes twice"
    return found


def raising_ranks() -> Iterator[Misbehaviour]:
    """Yield ranks that raise."""
    steps = dict.fromkeys(IN_STEP, 2) | NOW_AND_THEN
    for place, step in steps.items():
        case = partial(Misbehaviour, place=place, act=fail, step=step, odd_rank=_odd_rank(place))
        known = (
            PLANTED if place != "between" else "rank 1 (has ended|closed)"
        )  # the engine does not see the user's loop
        yield case(name=f"raises in {place}, ends", own=PLANTED, peers=f"(RankFailed|RanksDiffer)Error: .*{known}")
        if place != "between":
            yield case(
                name=f"raises in {place}, lingers", own=PLANTED, peers=f"RankFailedError: .*{PLANTED}", mode="lingers"
            )
            yield case(name=f"raises in {place}, continues", own=APART, peers=APART, mode="continues")
    for place in BEFORE:
        case = partial(Misbehaviour, place=place, act=fail, own=PLANTED)
        known = PLANTED if place != "model" else "rank 1 (has ended|closed)"  # the engine does not see the user's code
        yield case(name=f"raises in {place}, ends", peers=f"(RankFailed|RanksDiffer)Error: .*{known}")
    yield Misbehaviour(
        name="raises in the first step", place="loss", step=0, act=fail, own=PLANTED, peers=f"RankFailed.*{PLANTED}"
    )
    yield Misbehaviour(
        name="one of three raises in backward, lingers",
        place="backward",
        act=fail,
        own=PLANTED,
        peers=f"RankFailedError: .*{PLANTED}",
        mode="lingers",
        num_ranks=3,
    )
    yield from _raising_others()


def _raising_others() -> Iterator[Misbehaviour]:
    """Yield ranks that raise other errors."""
    errors: dict[str, BaseException] = {
        "KeyboardInterrupt": KeyboardInterrupt("planted"),
        "SystemExit": SystemExit("planted"),
        "RuntimeError like gloo's": RuntimeError("Connection closed by peer: planted"),
        "OutOfMemoryError": torch.OutOfMemoryError("planted"),
    }
    for name, error in errors.items():
        for place in ("loss", "backward", "optimizer"):
            kind = type(error).__name__
            peers = f"RankFailedError: .*({kind}|planted)"
            if name == "OutOfMemoryError":  # where possible, all repeat the step in smaller micro-batches
                kind, peers = "finished|planted", "finished|RankFailedError: .*planted"
            yield Misbehaviour(name=f"{name} in {place}", place=place, act=raising(error), own=kind, peers=peers)


def dying_ranks() -> Iterator[Misbehaviour]:
    """Yield ranks that die without an error message."""
    for place, step in (dict.fromkeys(IN_STEP, 2) | NOW_AND_THEN).items():
        rank = _odd_rank(place)
        yield Misbehaviour(
            name=f"killed in {place}",
            place=place,
            act=die,
            step=step,
            odd_rank=rank,
            own="died -9",
            peers=ENDED.replace("rank 1", f"rank {rank}"),
        )
    for place in ("forward", "backward", "optimizer", "between"):
        yield Misbehaviour(name=f"exits in {place}", place=place, act=leave, own="died 7", peers=ENDED)
    for place in ("forward", "backward"):
        case = partial(Misbehaviour, place=place, act=die, own="died -9", num_ranks=3)
        yield case(name=f"one of three killed in {place}", peers=ENDED)
        yield case(name=f"rank 0 of three killed in {place}", odd_rank=0, peers=ENDED.replace("rank 1", "rank 0"))
    yield Misbehaviour(
        name="killed before the ranks meet",
        place="before meeting",
        act=die,
        own="died -9",
        peers="WorldError: .*rank 1",
        timeout_seconds=6.0,
    )
    yield Misbehaviour(
        name="killed before the engine is built", place="before engine", act=die, own="died -9", peers=ENDED
    )
    yield Misbehaviour(
        name="killed between meeting and connecting",
        place="before meeting",
        act=_die_while_connecting,
        own="died -9",
        peers=r"(RankFailed|World)Error: .*rank 1",
    )
    yield Misbehaviour(
        name="killed while a world is made",
        place="before meeting",
        act=_die_while_making_a_world,
        own="died -9",
        peers=r"(RankFailed|World)Error: .*rank 1",
    )


def _die_while_connecting(_: Program) -> None:
    torch.distributed.init_process_group = lambda *_, **__: die(_)  # type: ignore[arg-type]


def _die_while_making_a_world(_: Program) -> None:
    torch.distributed.new_group = lambda *_, **__: die(_)  # type: ignore[arg-type]


def slow_ranks() -> Iterator[Misbehaviour]:
    """Yield ranks that are slow."""
    places = {"loss": 2, "backward": 2, "dataset": 2, "optimizer": 2, "scheduler": 2, "before engine": 2, "model": 2}
    for place, step in (places | NOW_AND_THEN).items():
        yield Misbehaviour(name=f"slow in {place}", place=place, act=delay, step=step)
    yield Misbehaviour(name="slow to come", place="before meeting", act=delay)
    yield Misbehaviour(name="stopped by the system", place="loss", act=lambda _: stop_for(SLOW_SECONDS))
    for place in ("forward", "backward", "between"):
        yield Misbehaviour(
            name=f"slower than the time-out in {place}",
            place=place,
            act=lambda _: time.sleep(9.0),
            timeout_seconds=4.0,
            own=r"RankFailedError: .*rank 0.*waited|WorldError",
            peers=r"WorldError: .*rank 1 (has )?not",
        )
    yield Misbehaviour(
        name="slower than the time-out to save",
        place="save",
        step=1,
        act=lambda _: time.sleep(9.0),
        timeout_seconds=4.0,
        own=r"RankFailedError: .*rank 0.*waited|WorldError",
        peers=r"WorldError: .*rank 1 (has )?not",
    )


def other_calls() -> Iterator[Misbehaviour]:
    """Yield ranks that make other calls than their peers."""
    apart = partial(Misbehaviour, own=DIFFERS, peers=DIFFERS)
    loop = {"skips a step": "skip", "makes a step twice": "again"}
    for name, word in loop.items():
        yield apart(name=name, place="between", act=partial(_say, word))
    yield Misbehaviour(
        name="ends its loop", place="between", act=lambda _: "stop", peers=r".*rank 1 (has )?(ended|closed or dropped)"
    )
    calls: dict[str, Callable[[Program], object]] = {
        "saves": lambda p: p.engine.save(p.folder),
        "evaluates": lambda p: p.engine.evaluate(p.evaluated()),
        "loads": lambda p: p.engine.load(p.folder),
        "asks for gradients": lambda p: p.engine.gradients(p.batch),
    }
    for name, call in calls.items():
        yield apart(name=f"{name} alone", place="between", act=partial(_call, call), peers=DIFFERS, own=DIFFERS)
    for name in ("save", "evaluate", "load"):
        step = {"save": 1, "evaluate": 2, "load": 3}[name]
        yield apart(name=f"leaves out {name}", place=name, step=step, act=lambda _: "left out")
    yield Misbehaviour(
        name="saves alone after the last step",
        place="before close",
        step=5,
        act=partial(_call, calls["saves"]),
        own="(RankFailed|RanksDiffer)Error: .*rank 0 (has ended|closed or dropped)",
    )
    yield Misbehaviour(
        name="closes the engine",
        place="between",
        act=partial(_call, lambda p: p.engine.close()),
        own="UserError",
        peers=r".*rank 1 (has )?(ended|closed or dropped)|RankFailedError: .*closed",
    )
    yield apart(name="builds one more engine", place="between", act=_one_more_engine)
    yield apart(name="makes one more world", place="between", act=lambda _: _one_more_world())
    yield Misbehaviour(
        name="builds one more engine after the last step",
        place="before close",
        step=5,
        act=_one_more_engine,
        own="(RankFailed|RanksDiffer)Error: .*rank 0 (has ended|closed or dropped)",
    )
    yield from _calls_inside()


def _calls_inside() -> Iterator[Misbehaviour]:
    """Yield ranks that call the engine from within a call."""
    inside: dict[str, Act] = {
        "steps": partial(_call, lambda p: p.engine.step(p.batch)),
        "saves": partial(_call, lambda p: p.engine.save(p.folder)),
        "evaluates": partial(_call, lambda p: p.engine.evaluate(p.evaluated())),
        "steps in a thread": step_in_thread,
    }
    for name, act in inside.items():
        for place in ("loss", "backward"):
            yield Misbehaviour(
                name=f"{name}, in {place}", place=place, act=act, own="UserError", peers="RankFailedError: .*UserError"
            )


def _say(word: str, _: Program) -> str:
    return word


def _call(call: Callable[[Program], object], program: Program) -> None:
    call(program)


def _one_more_engine(program: Program) -> None:
    program.build(ab.World.from_environment(device="cpu"))


def _one_more_world() -> None:
    ab.World.from_environment(device="cpu")
