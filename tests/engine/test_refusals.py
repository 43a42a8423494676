"""Invalid input is refused with the fault, both values and the fix, and nothing changes."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.errors import AnyBatchError, NonFiniteError
from anybatch.parallel.all_reduce import AllReduce
from tests.engine.cases import STRATEGIES, Batch, InMemory, classify, classify_each, classify_weighted, vectors
from tests.engine.refusals import ON_ONE_RANK, ON_TWO_RANKS, Refusal, one_model_per_rank, told, told_on_ranks
from tests.faults import sees
from tests.ranks_fixture import Ranks


def assert_said(refusal: Refusal, kind: str, message: str) -> None:
    """Fail unless an error of this class contains these words, in full sentences."""
    assert kind == refusal.error.__name__
    assert [word for word in refusal.words if word not in message] == [], message
    assert message.rstrip(")").endswith(".")


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_refused_on_one_rank(name: str) -> None:
    """Each invalid input has its own error, whose message names the fault, both values and the fix."""
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


def poisoned(kind: str) -> Batch:
    """Return a batch in whose last micro-batch the loss or the gradient is not finite."""
    batch = vectors(29)
    batch["x"][28] = {"loss": float("nan"), "gradient": 0.0}[kind]
    return batch


def rooted(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return losses whose gradient is infinite for a zero input, and NaN in earlier layers."""
    first = model.get_submodule("0")
    roots: torch.Tensor = (first(batch["x"]) - first.get_parameter("bias")).abs().sqrt().sum(1)
    return classify_each(model, batch) + roots


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of all state that an update changes."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *held)]


def changed_by_poison(strategy: str, kind: str) -> tuple[bool, bool, bool]:
    """Run on every rank: make a good step, a step on a poisoned batch, and another good step.

    Returns: whether NonFiniteError was raised, whether the state was unchanged then, and whether the last step equals
    the same step without the poisoned one.
    """

    def train(*, poison: bool) -> tuple[list[torch.Tensor], bool, bool]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = ab.mean_over_samples(rooted if kind == "gradient" else classify)
        world = ab.World.from_environment()
        options: dict[str, Any] = {"micro_batch_size": 3, "strategy": STRATEGIES[strategy](), "world": world}
        raised = unchanged = True
        with ab.Engine(model, optimizer, loss, **options) as engine:
            engine.step(InMemory(vectors(29), end=Position(0, 29)))
            if poison:
                before = [*state_of(model, optimizer), torch.get_rng_state()]
                try:
                    engine.step(InMemory(poisoned(kind), end=Position(0, 58)))
                    raised = False
                except NonFiniteError:
                    pass
                after = [*state_of(model, optimizer), torch.get_rng_state()]
                unchanged = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
                unchanged &= engine.position == Position(0, 29) and engine.num_steps == 1
            engine.step(InMemory(vectors(29)))
        return state_of(model, optimizer), raised, unchanged

    clean, _, _ = train(poison=False)
    found, raised, unchanged = train(poison=True)
    return raised, unchanged, all(torch.equal(one, other) for one, other in zip(clean, found, strict=True))


@sees(
    "a gradient that is not finite is not looked at",
    "src/anybatch/engine/update/updater.py",
    "sum(contributions.tolist()) + (0.0 if norm is None else norm.item())",
    "sum(contributions.tolist())",
    cases=["single-gradient"],
    also=["tests/engine/test_refusals.py::test_refused_on_one_rank[a gradient of NaN]"],
)
@sees(
    "a loss that is not finite is updated with",
    "src/anybatch/engine/update/updater.py",
    """
                raise self._error(step, (contributions.sum(), norm), late=False)
""",
    """
                pass
""",
    cases=["all_reduce-loss"],
)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("strategy", ["single", "all_reduce", "ddp"])
def test_what_is_not_finite_changes_nothing(strategy: str, kind: str, one_rank: Ranks, two_ranks: Ranks) -> None:
    """A NaN in one sample of one rank is refused on all ranks, and the run continues as without that step."""
    pool = one_rank if strategy == "single" else two_ranks
    for raised, unchanged, goes_on in pool.run(changed_by_poison, strategy, kind):
        assert raised
        assert unchanged
        assert goes_on


def changed_by_refusal() -> dict[str, list[str]]:
    """Return, for losses refused in the middle of a step, the state that they changed."""
    found: dict[str, list[str]] = {}

    def last_fails(model: nn.Module, batch: Batch) -> Any:
        return classify(model, batch) if len(batch["x"]) == 3 else None

    losses: Mapping[str, Any] = {
        "a loss that fails late": ab.mean_over_samples(last_fails),
        "undeclared": classify_weighted,
        "wrongly declared": ab.mean_over_samples(classify_weighted),
    }
    for name, loss in losses.items():
        torch.manual_seed(0)
        model = nn.Linear(5, 4).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with ab.Engine(model, optimizer, loss, micro_batch_size=3, world=ab.World()) as engine:
            before = state_of(model, optimizer)
            with pytest.raises(AnyBatchError):
                engine.step(vectors(29))
            after = state_of(model, optimizer)
            found[name] = [
                *["values"] * (not all(torch.equal(*pair) for pair in zip(before, after, strict=True))),
                *["gradients"] * any(parameter.grad is not None for parameter in model.parameters()),
                *["progress"] * ((engine.position, engine.num_steps) != (Position(), 0)),
            ]
    return found


def test_a_refused_step_leaves_nothing_behind() -> None:
    """A loss that fails in the last of ten micro-batches leaves no gradient, update or progress."""
    assert changed_by_refusal() == {"a loss that fails late": [], "undeclared": [], "wrongly declared": []}


def align(initial: str) -> tuple[dict[str, str], list[torch.Tensor]]:
    """Run on every rank: build an engine over different replicas; return its decisions and the values."""
    model = one_model_per_rank()
    model.get_buffer("1.running_mean").fill_(float(ab.World.from_environment().rank))
    strategy = AllReduce(initial="verify" if initial == "verify" else "broadcast")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = ab.mean_over_samples(classify)
    with ab.Engine(model, optimizer, loss, strategy=strategy, world=ab.World.from_environment()) as engine:
        return dict(engine.decisions), list(model.state_dict().values())


@sees(
    "replicas are not made equal",
    "src/anybatch/parallel/replicas.py",
    """
        _broadcast(local_part(tensors[name]), world)
""",
    """
        pass
""",
    also=["tests/examples/test_ladder_against_engine.py::test_parameter_check"],
)
def test_replicas_that_differ_take_the_first_ranks_values(two_ranks: Ranks) -> None:
    """Different parameters and buffers are overwritten with rank 0's, and the engine's decisions name them."""
    (decisions, first), (others, second) = two_ranks.run(align, "broadcast")
    torch.manual_seed(0)
    rank_0 = nn.Linear(5, 4).double()

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(first[0], rank_0.weight)
    assert decisions["replicas"] == others["replicas"]
    assert "3 parameters and buffers differed" in decisions["replicas"]
    assert "'0.weight'" in decisions["replicas"]
