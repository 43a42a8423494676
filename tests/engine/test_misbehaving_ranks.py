"""One rank raises, dies, is late, or differs: all ranks end soon, with an error that names the cause."""

from multiprocessing.connection import Connection

import pytest

from anybatch.testing.ranks import rank_context
from tests.engine.misbehaving_ranks import Strategy, Verdict, run_case
from tests.engine.misbehaviours import all_misbehaviours
from tests.faults import sees
from tests.ranks_fixture import selected

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CASES: dict[str, Strategy] = {
    "raises in backward, lingers": "fsdp",
    "raises in scheduler, lingers": "all_reduce",
    "raises in load_state_dict, lingers": "zero1",
    "raises in optimizer function, ends": "ddp",
    "killed in forward": "fsdp",
    "rank 0 of three killed in backward": "all_reduce",
    "slower than the time-out in forward": "all_reduce",
    "ends its loop": "zero1",
    "saves alone behind the last step": "all_reduce",
    "builds one more engine": "fsdp",
    "steps in a thread, in loss": "all_reduce",
    "built with a sum": "all_reduce",
    "built with zero1": "all_reduce",
    "built with a frozen block": "fsdp",
    "built with another measure_gradient_norm": "fsdp",
    "saves in another form, wait": "ddp",
}


def judged(names: list[str], pipe: Connection) -> None:
    """Run in a process that has only imported: send the verdict of each case."""
    for name in names:
        pipe.send(run_case(all_misbehaviours()[name], CASES[name]))


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, Verdict]:
    """Return how the ranks of each selected case ended."""
    names = selected(request, "name")
    ours, theirs = rank_context().Pipe()
    process = rank_context().Process(target=judged, args=(names, theirs))
    process.start()
    theirs.close()
    found = {name: ours.recv() for name in names}
    process.join()
    return found


@sees(
    "fsdp waits in gloo's reduce-scatter",
    "src/anybatch/parallel/fsdp_collectives.py",
    "        if self._roll_call is None or async_op:\n            started",
    "        if True:\n            started",
    cases=["raises in backward, lingers"],
)
@sees(
    "a scheduler's error is not published",
    "src/anybatch/engine/parts.py",
    "            self.world.fail_between_calls(error, report.step)\n",
    "",
    cases=["raises in scheduler, lingers"],
)
@sees(
    "ranks do not restore together",
    "src/anybatch/engine/parts.py",
    "self.world.run_on_all_processes(lambda: restore(loaded.state, loaded.path))",
    "restore(loaded.state, loaded.path)",
    cases=["raises in load_state_dict, lingers"],
)
@sees(
    "a late rank is said to have ended",
    "src/anybatch/parallel/roll_call.py",
    "            if left_seconds <= 0:\n",
    "            if False:\n",
    cases=["slower than the time-out in forward"],
)
@sees(
    "a closed engine is not noticed",
    "src/anybatch/parallel/roll_call.py",
    "last.number < self.number",
    "False",
    cases=["saves alone behind the last step"],
)
@sees(
    "ranks do not compare what they build",
    "src/anybatch/engine/build.py",
    "        refuse_other_builds(spec, hardware, loss, modules, world)\n",
    "",
    cases=["built with a sum", "built with another measure_gradient_norm"],
)
@sees(
    "ranks do not compare how they save",
    "src/anybatch/engine/parts.py",
    "            refuse_other_forms(form, self.world)\n",
    "",
    cases=["saves in another form, wait"],
)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_the_cause(name: str, verdicts: dict[str, Verdict]) -> None:
    """No rank hangs, aborts, or gets torch's own error or a wrong reason."""
    verdict = verdicts[name]
    assert verdict.kind == "right", [(one.text, round(one.seconds, 1)) for one in verdict.endings]
