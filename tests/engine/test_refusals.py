"""Invalid input is refused with the fault, both values and the fix, and nothing changes."""

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.parallel.all_reduce import AllReduce
from tests.engine.cases import sgd_engine
from tests.engine.refusals import ON_ONE_RANK, ON_TWO_RANKS, Refusal, one_model_per_rank, told, told_on_ranks
from tests.faults import sees
from tests.ranks_fixture import Ranks


def assert_said(refusal: Refusal, kind: str, message: str) -> None:
    """Fail unless an error of this class names the value, in full sentences."""
    assert kind == refusal.error.__name__
    assert refusal.says in message
    assert message.rstrip(")").endswith(".")


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_refused_on_one_rank(name: str) -> None:
    """Each invalid input has its own error, whose message names the value."""
    assert_said(ON_ONE_RANK[name], *told(name, ON_ONE_RANK))


@pytest.fixture(scope="module")
def said_on_ranks(two_ranks: Ranks) -> list[dict[str, tuple[str, str]]]:
    """Return the error class and message of each refused input on every rank."""
    return two_ranks.run(told_on_ranks)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_refused_on_all_ranks(name: str, said_on_ranks: list[dict[str, tuple[str, str]]]) -> None:
    """An inconsistency between ranks is refused on all of them, so that none waits for the others."""
    for said in said_on_ranks:
        assert_said(ON_TWO_RANKS[name], *said[name])


def align(initial: str) -> tuple[dict[str, str], list[torch.Tensor]]:
    """Run on every rank: build an engine over different replicas; return its decisions and the values."""
    model = one_model_per_rank()
    model.get_buffer("1.running_mean").fill_(float(ab.World.from_environment().rank))
    strategy = AllReduce(initial="verify" if initial == "verify" else "broadcast")
    with sgd_engine(model, strategy=strategy, world=ab.World.from_environment()) as engine:
        return dict(engine.decisions), list(model.state_dict().values())


@sees(
    "replicas are not made equal",
    "src/anybatch/parallel/replicas.py",
    """
            dist.broadcast(contiguous, src=0)
""",
    "",
    also=["tests/examples/test_ladder_against_engine.py::test_parameter_check"],
)
def test_replicas_that_differ_get_the_first_ranks_values(two_ranks: Ranks) -> None:
    """Different parameters and buffers are overwritten with rank 0's, and the engine's decisions name them."""
    (decisions, first), (others, second) = two_ranks.run(align, "broadcast")
    torch.manual_seed(0)
    rank_0 = nn.Linear(5, 4).double()

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(first[0], rank_0.weight)
    assert decisions["replicas"] == others["replicas"]
    assert "3 parameters and buffers differed" in decisions["replicas"]
    assert "'0.weight'" in decisions["replicas"]
