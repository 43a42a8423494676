"""If one rank raises, dies, is late or differs, all ranks soon end with an error that names the cause."""

from multiprocessing.connection import Connection

import pytest

from anybatch.parallel.launchers import rank_context
from anybatch.testing.ranks import PRELOADED
from tests.engine.misbehaving_ranks import Strategy, Verdict, run_case
from tests.engine.misbehaviours import all_misbehaviours
from tests.ranks_fixture import selected

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CASES: dict[str, Strategy] = {
    "raises in backward, lingers": "fsdp",
    "raises in scheduler, lingers": "all_reduce",
    "raises in load_state_dict, continues": "all_reduce",
    "sets another position": "zero1",
    "raises in load_state_dict, lingers": "zero1",
    "raises in optimizer function, ends": "ddp",
    "rank 0 of three killed in backward": "all_reduce",
    "slower than the time-out in forward": "all_reduce",
    "ends its loop": "zero1",
    "saves alone after the last step": "all_reduce",
    "builds one more engine": "fsdp",
    "steps in a thread, in loss": "all_reduce",
    "built with another measure_gradient_norm": "fsdp",
    "built with a frozen block": "fsdp",
    "saves in another form, wait": "fsdp",
}


def judged(names: list[str], pipe: Connection) -> None:
    """Run in a fresh process: send the verdict of each case."""
    for name in names:
        pipe.send(run_case(all_misbehaviours()[name], CASES[name]))


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, Verdict]:
    """Return the verdict on each selected case."""
    names = selected(request, "name")
    context = rank_context(*PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=judged, args=(names, theirs))
    process.start()
    theirs.close()
    found = {name: ours.recv() for name in names}
    process.join()
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_the_cause(name: str, verdicts: dict[str, Verdict]) -> None:
    """No rank hangs, aborts, raises torch's own error or reports a wrong cause."""
    verdict = verdicts[name]
    assert verdict.kind == "right", [(one.text, round(one.seconds, 1)) for one in verdict.endings]
