"""Micro-batches cut by a token budget: exact gradients on any ranks, padded and packed, and exact resume."""

import itertools
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.core.token_budget import SampleLengths
from anybatch.data import Packed, Padded
from anybatch.engine.micro_batch_size.budget_trials import micro_batches_to_time
from anybatch.errors import BatchSizeError, CompositionError, DataError, LossError
from anybatch.metrics import OverWholeSet
from anybatch.norms import Ghost
from anybatch.testing import out_of_memory_at, relative_error
from tests.engine.cases import CASES, InMemory, plain_gradients, sgd_engine
from tests.engine.length_cases import (
    DECLARED,
    LENGTHS,
    Language,
    Sentences,
    evaluated,
    expected_gradients,
    gradient_errors,
    ids_of_run,
    loss,
)
from tests.raising import raises
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
BUDGETS = (17, 40, 1000)
COLLATES = ("padded", "padded left", "packed")


def engine_of(model: Language, tokens: int = 40, **settings: Any) -> ab.Engine:
    """Return an engine that cuts by length."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine(model, optimizer, DECLARED, micro_batch_size=ab.token_budget(tokens), **settings)


def test_the_gradient_equals_the_unsplit_batch(ranks: Ranks) -> None:
    """Padded and packed micro-batches give the full-batch gradient for any budget on 1, 2 and 3 ranks."""
    strategies = ("single",) if ranks.world_size == 1 else ("all_reduce", "ddp")
    cases = [*itertools.product(COLLATES, strategies, BUDGETS), ("padded to 8", strategies[0], 40)]
    for errors in ranks.run(gradient_errors, cases):
        assert max(errors.values()) <= TOLERANCE, errors


def test_sharded_ranks_in_lockstep(two_ranks: Ranks) -> None:
    """Under FSDP2, where all ranks run equally many micro-batches, the gradient is exact too."""
    for errors in two_ranks.run(gradient_errors, [("padded", "fsdp", 17), ("packed", "fsdp", 40)]):
        assert max(errors.values()) <= TOLERANCE, errors


def test_a_run_resumes_exactly_at_another_world_size(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> None:
    """A run on one rank equals the same run on two ranks resumed on three, in sample ids and parameters."""
    ((whole, _, expected),) = one_rank.run(ids_of_run, 9)
    first, position, state = two_ranks.run(ids_of_run, 5)[0]
    rest, _, found = three_ranks.run(ids_of_run, 4, position, state)[0]

    assert first + rest == whole
    found, expected = (
        {name: torch.tensor(values, dtype=torch.float64) for name, values in state.items()}
        for state in (found, expected)
    )
    assert relative_error(found, expected) <= TOLERANCE


def test_out_of_memory_halves_the_budget() -> None:
    """A step that does not fit is retried with half the tokens, and gives the same update."""
    dataset = Sentences()
    states = []
    for fails in (False, True):
        model = Language()
        batches = ab.batches(dataset, effective_batch_size=25, lengths=dataset.lengths, collate=Padded())
        with engine_of(model, check_loss=False) as engine:
            batch = next(iter(batches))
            if fails:
                with out_of_memory_at(1, phase="backward"):
                    engine.step(batch)
                assert "at most 20 tokens, because" in engine.decisions["micro_batch_size"]
            else:
                engine.step(batch)
        states.append(dict(model.state_dict()))

    assert relative_error(states[1], states[0]) <= TOLERANCE


def test_incompatible_options_are_refused() -> None:
    """A loader's padded batches, ghost groups, accumulation steps and batches without lengths are refused."""
    model = Language()
    with engine_of(model, check_loss=False) as engine:
        with pytest.raises(CompositionError):
            engine.step(Padded()([Sentences()[0], Sentences()[1]]))
        with pytest.raises(DataError):
            engine.step(next(iter(ab.batches(Sentences(), effective_batch_size=4, collate=Padded()))))
    with raises(BatchSizeError, "budget_and_steps"):
        engine_of(model, accumulation_steps=4)
    with pytest.raises(CompositionError):
        engine_of(model, norms=Ghost(2))
    with pytest.raises(DataError):
        ab.batches(Sentences(), effective_batch_size=4, lengths=[1, 2, 3])
    with (
        pytest.raises(BatchSizeError),
        engine_of(model, 16) as engine,
    ):
        engine.step(next(iter(ab.batches(Sentences(), effective_batch_size=25, lengths=LENGTHS, collate=Padded()))))


def test_long_samples_run_alone_or_truncated() -> None:
    """A sample above the budget may run alone, or `longest` may truncate it."""
    alone = ab.batches(Sentences(), effective_batch_size=25, lengths=LENGTHS, collate=Padded())
    short = ab.batches(Sentences(), effective_batch_size=25, lengths=LENGTHS, collate=Padded(longest=6))
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = ab.token_budget(12, longer="alone")
    with ab.Engine(model, optimizer, DECLARED, micro_batch_size=budget, check_loss=False) as engine:
        batch = next(iter(alone))
        assert relative_error(engine.gradients(batch), expected_gradients(batch.sample_ids)) <= TOLERANCE
    with engine_of(model, 12, check_loss=False) as engine:
        engine.step(next(iter(short)))


def test_a_checkpoint_keeps_the_budget(tmp_path: Any) -> None:
    """A budget reduced for memory stays reduced after a resume; a different budget overrides it."""
    dataset = Sentences()
    batches = ab.batches(dataset, effective_batch_size=25, epochs=2, lengths=dataset.lengths, collate=Padded())
    with engine_of(Language(), check_loss=False) as engine:
        with out_of_memory_at(1, phase="backward"):
            engine.step(next(iter(batches)))
        engine.save(tmp_path / "saved")
    with engine_of(Language(), check_loss=False) as engine:
        engine.load(tmp_path / "saved")
        assert "at most 20 tokens, as in the checkpoint" in engine.decisions["micro_batch_size"]
    with engine_of(Language(), 80, check_loss=False) as engine:
        engine.load(tmp_path / "saved")
        assert engine.decisions["resumed with changes"] == "budget_tokens 40 -> 80, micro_batch_tokens 40 -> 80"


class OfLengths(InMemory):
    """An in-memory batch with declared sample lengths."""

    @property
    def lengths(self) -> SampleLengths:
        """Arbitrary lengths."""
        return SampleLengths(tokens=[7 * place % 11 + 1 for place in self.sample_ids])


@pytest.mark.parametrize("case", ["ragged", "masked tokens", "two terms"])
def test_every_kind_of_loss_is_right_under_a_budget(case: str) -> None:
    """Losses over samples, over tokens and of several terms give the full-batch gradient."""
    model, batch = CASES[case].model(), CASES[case].batch()
    expected = plain_gradients(model, CASES[case].reference(model, batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = ab.token_budget(30)
    with ab.Engine(model, optimizer, CASES[case].loss, micro_batch_size=budget, check_loss=False) as engine:
        assert relative_error(engine.gradients(OfLengths(batch)), expected) <= TOLERANCE


def test_a_loss_across_samples_sees_the_batch_in_its_own_order() -> None:
    """Outputs return in batch order, so labels by position, as in a contrastive loss, stay right."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    batch = {"x": torch.randn(11, 3, dtype=torch.float64)}

    def encode(net: Any, part: Any) -> torch.Tensor:
        outputs: torch.Tensor = net(part["x"])
        return outputs

    def neighbours(_: Any, outputs: torch.Tensor) -> torch.Tensor:
        return (outputs[1:] * outputs[:-1]).sum().sigmoid()

    expected = plain_gradients(model, neighbours(model, encode(model, batch)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joint = ab.joint(encode, neighbours)
    with ab.Engine(model, optimizer, joint, micro_batch_size=ab.token_budget(20), check_loss=False) as engine:
        assert relative_error(engine.gradients(OfLengths(batch)), expected) <= TOLERANCE


def test_evaluation_gives_the_same_numbers_in_the_same_order() -> None:
    """Means, and metrics over the full set by row, equal an engine that cuts by number."""
    dataset, model = Sentences(), Language()

    def rows(_: Any, batch: Any) -> torch.Tensor:
        counted = (batch["labels"] != -100).sum(1)
        return torch.stack([batch["input_ids"][:, 0].double(), counted.double()], 1)

    def compute(outputs: Any) -> dict[str, float]:
        weights = torch.arange(len(outputs), dtype=torch.float64)
        return {"ordered": float((outputs.sum(1) * weights).sum())}

    found = []
    for lengths, size in ((dataset.lengths, ab.token_budget(40)), (None, 4), (None, ab.token_budget(40))):
        data = ab.batches(dataset, effective_batch_size=9, shuffle=False, lengths=lengths, collate=Padded())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Engine(model, optimizer, DECLARED, micro_batch_size=size) as engine:
            mean = engine.evaluate(data)
            ordered = engine.evaluate(data, OverWholeSet(rows, compute))
        found.append([*mean.values(), *ordered.values()])

    assert found[0] == pytest.approx(found[1], rel=TOLERANCE)
    assert found[2] == pytest.approx(found[1], rel=TOLERANCE)


def test_evaluation_on_ranks_is_within_the_budget(ranks: Ranks) -> None:
    """On 1, 2 and 3 ranks, padded, packed or sharded, evaluation gives the plain mean within the budget.

    One sample is longer than the smaller budget, and runs alone.
    """
    strategies = ("single",) if ranks.world_size == 1 else ("all_reduce", "ddp", "fsdp")
    cases = [*(("padded", name, 12) for name in strategies), *(("packed", name, 40) for name in strategies)]
    for found in ranks.run(evaluated, cases):
        for (_, _, tokens), (mean, plain, most) in zip(cases, found, strict=True):
            assert mean == pytest.approx(plain, rel=TOLERANCE)
            assert 0 < most <= max(tokens, *LENGTHS)


def test_a_loss_over_samples_is_refused_where_rows_are_others() -> None:
    """With packing, rows are not samples, so a mean over samples is refused."""
    model = Language()
    batches = ab.batches(Sentences(), effective_batch_size=9, lengths=LENGTHS, collate=Packed())
    with (
        sgd_engine(model, loss, micro_batch_size=ab.token_budget(40)) as engine,
        pytest.raises(LossError),
    ):
        engine.step(next(iter(batches)))


@pytest.mark.parametrize("lengths", [[200, 190, 180, 2] * 16, [2] + [200] * 63, [2] * 63 + [200]])
def test_micro_batches_of_different_size_are_timed(lengths: list[int]) -> None:
    """The fixed cost comes from the shortest sample and a micro-batch of about an eighth of the budget."""
    budget = ab.token_budget(1_600)
    pieces = micro_batches_to_time(SampleLengths(tokens=lengths), budget)

    assert pieces is not None
    shortest, several = ([lengths[place] for place in piece] for piece in pieces)
    assert shortest == [2]
    assert budget.tokens / 16 <= len(several) * max(several) <= budget.tokens / 8


def test_equal_samples_are_not_timed() -> None:
    """Without two micro-batches of sufficiently different size, no fixed cost is measured."""
    assert micro_batches_to_time(SampleLengths(tokens=[200] * 64), ab.token_budget(1_600)) is None


def test_the_fixed_cost_is_measured_once(tmp_path: Any) -> None:
    """The fixed cost is measured on the first batch, reported and saved; trials do not affect the model."""
    dataset = Sentences([200, 190, 180, 2] * 16)
    batches = ab.batches(dataset, effective_batch_size=64, epochs=2, lengths=dataset.lengths, collate=Padded())

    def large() -> Language:
        model = Language()
        model.positions = torch.nn.Embedding(20_000, 8).double()  # enough parameters to make a step worth timing
        return model

    with engine_of(large(), 1_600, check_loss=False) as engine:
        measured = engine.gradients(next(iter(batches)))
        engine.step(next(iter(batches)))
        said = engine.decisions["micro_batch_size"]
        engine.save(tmp_path / "saved")
    assert "per micro-batch, measured:" in said
    number = said.partition("; ")[2].partition(" ")[0]
    with engine_of(large(), 1_600, check_loss=False) as engine:
        engine.load(tmp_path / "saved")
        assert (
            f"the fixed cost of a micro-batch equals {number} tokens, as in the checkpoint"
            in engine.decisions["micro_batch_size"]
        )
    model = large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = ab.token_budget(1_600, fixed_tokens=10)
    with ab.Engine(model, optimizer, DECLARED, micro_batch_size=budget, check_loss=False) as engine:
        assert relative_error(engine.gradients(next(iter(batches))), measured) <= TOLERANCE
