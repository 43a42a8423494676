"""rng="per_sample": dropout masks belong to samples, so the gradient equals the full batch's, masks included."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.per_sample_dropout import PerSample, SampleRandomness
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.strategy import Turn
from anybatch.testing import relative_error
from tests.engine.cases import (
    NUM_CLASSES,
    NUM_FEATURES,
    STRATEGIES,
    Batch,
    InMemory,
    classify,
    plain_gradients,
    vectors,
)
from tests.engine.dropped import (
    MICRO_BATCH_SIZES,
    NUM_SAMPLES,
    SEED,
    TOLERANCE,
    WAYS,
    ByHand,
    Functional,
    Network,
    P,
    make_engine,
)
from tests.engine.masks_by_hand import mask
from tests.ranks_fixture import Ranks


def gradient_errors(strategies: tuple[str, ...]) -> dict[tuple[str, str, int | None], float]:
    """Run on every rank: return errors against one plain backward over all samples with masks by hand.

    Ranks start with different random states.
    """
    world = ab.World.from_environment()
    torch.manual_seed(100 + world.rank)
    batch, errors = vectors(NUM_SAMPLES), {}
    for name, way in WAYS.items():
        plain = Network(way, ByHand(way, NUM_SAMPLES))
        expected = plain_gradients(plain, classify(plain, batch))
        for strategy in strategies:
            for size in MICRO_BATCH_SIZES:
                network = Network(way, way.drop())
                with make_engine(
                    network, micro_batch_size=size, rng=way.rng, strategy=STRATEGIES[strategy](), world=world
                ) as engine:
                    found = engine.gradients(InMemory(batch, seed=SEED))
                errors[name, strategy, size] = relative_error(found, expected)
    world.close()
    return errors


def test_gradients_are_those_of_the_unsplit_batch(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Every kind of dropout, for any cut on 1 and 2 ranks, has the gradient of one plain backward with its masks."""
    found = one_rank.run(gradient_errors, ("single",))
    found += two_ranks.run(gradient_errors, ("all_reduce",))
    assert len(found[1]) == len(found[0]) == len(WAYS) * len(MICRO_BATCH_SIZES)
    for errors in found:
        assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}


def test_keyed_by_micro_batch_it_is_not() -> None:
    """Counter-example: with rng="micro_batch" two cuts of the same batch differ by more than 0.1."""
    way = WAYS["Dropout"]
    found = []
    for size in (3, 7):
        with make_engine(Network(way, way.drop()), micro_batch_size=size, rng="micro_batch") as engine:
            found.append(engine.gradients(InMemory(vectors(NUM_SAMPLES), seed=SEED)))
    assert relative_error(found[0], found[1]) > 0.1


class Attentive(nn.Module):
    """Attention over three positions with two heads, by torch's layer or written out with masks by hand."""

    def __init__(self, *, batch_first: bool, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.batch_first, self.by_hand = batch_first, by_hand
        self.first, self.out = nn.Linear(NUM_FEATURES, 3 * 4), nn.Linear(3 * 4, NUM_CLASSES)
        self.attention = nn.MultiheadAttention(4, 2, dropout=P, batch_first=batch_first)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).view(-1, 3, 4)
        if self.by_hand:
            found = self.written_out(hidden)
        elif self.batch_first:
            found = self.attention(hidden, hidden, hidden)[0]
        else:
            turned = hidden.transpose(0, 1)
            found = self.attention(turned, turned, turned)[0].transpose(0, 1)
        logits: torch.Tensor = self.out(found.flatten(1))
        return logits

    def written_out(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the attention in plain arithmetic."""
        layer = self.attention
        joined = F.linear(hidden, layer.in_proj_weight, layer.in_proj_bias)
        query, key, value = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in joined.chunk(3, -1))
        weights = (query @ key.transpose(-1, -2) / math.sqrt(2)).softmax(-1)
        kept = mask(BatchKey(SEED, 0, range(len(hidden))), 0, (2, 3, 3), P)
        heads = (weights * kept / (1 - P)) @ value
        found: torch.Tensor = layer.out_proj(heads.transpose(1, 2).flatten(2))
        return found


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_with_weights_is_keyed(batch_first: bool) -> None:
    """Attention weights that torch's layer returns are dropped by sample and head, for any cut and sample axis."""
    batch = vectors(NUM_SAMPLES)
    plain = Attentive(batch_first=batch_first, by_hand=True)
    expected = plain_gradients(plain, classify(plain, batch))
    for size in MICRO_BATCH_SIZES:
        rng = PerSample(sample_dims={} if batch_first else {"attention": 1})
        with make_engine(Attentive(batch_first=batch_first, by_hand=False), micro_batch_size=size, rng=rng) as engine:
            assert relative_error(engine.gradients(InMemory(batch, seed=SEED)), expected) <= TOLERANCE


def losses_of_ten_steps(size: int | None) -> list[float]:
    """Run on every rank: return the losses of ten steps on one batch."""
    way = WAYS["Dropout"]
    batch = InMemory(vectors(NUM_SAMPLES), seed=SEED)
    with make_engine(Network(way, way.drop()), micro_batch_size=size, world=ab.World.from_environment()) as engine:
        return [float(engine.step(batch).loss) for _ in range(10)]


def test_losses_of_a_run_do_not_depend_on_the_cut(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Ten steps have the losses of a plain loop with masks by hand, for any cut; masks differ between steps."""
    way, batch = WAYS["Dropout"], vectors(NUM_SAMPLES)
    drop = ByHand(way, NUM_SAMPLES)
    plain = Network(way, drop)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(10):
        drop.start(step)
        optimizer.zero_grad()
        loss = classify(plain, batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))

    for size in (1, 7):
        for found in one_rank.run(losses_of_ten_steps, size) + two_ranks.run(losses_of_ten_steps, size):
            assert found == pytest.approx(expected, rel=TOLERANCE)


def dropped(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Return a function's result for values that form one micro-batch."""
    randomness = SampleRandomness(PerSample(), nn.Identity(), torch.device("cpu"))
    unit = Unit(0, 0, len(values))
    micro_batch = MicroBatch(unit, (), Turn(first=True, last=True), 0, BatchKey(SEED, 0, range(len(values))))
    with randomness, randomness.micro_batch(micro_batch):
        return function(values)


@pytest.mark.parametrize("fails", [False, True], ids=["after a step", "after an error"])
def test_the_callers_random_state_is_as_before(fails: bool) -> None:
    """A step leaves torch's generator unchanged, also if it fails, and leaves no mode active."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        found = classify(model, batch)
        if fails:
            message = "in the middle"
            raise RuntimeError(message)
        return found

    way = WAYS["Dropout"]
    before = torch.get_rng_state()
    with make_engine(Network(way, way.drop()), loss=ab.mean_over_samples(loss), micro_batch_size=7) as engine:
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="in the middle") if fails else nullcontext():
            engine.step(vectors(NUM_SAMPLES))
    assert torch.equal(torch.get_rng_state(), before)
    drawn = F.dropout(torch.ones(3, 100))
    torch.set_rng_state(before)
    assert torch.equal(drawn, torch.dropout(torch.ones(3, 100), 0.5, train=True))


class Inside(nn.Module):
    """Applies a function to hidden values, under the name 'inside.odd'."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.inside = nn.ModuleDict({"odd": Functional(function), **modules})
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inside["odd"](self.first(x))
        return hidden


def attention(hidden: torch.Tensor) -> torch.Tensor:
    """Return fused attention with dropout."""
    return F.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None], dropout_p=0.1)[:, 0]


def recurrent(hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of a recurrent layer that the engine does not know."""
    layer = nn.GRU(
        NUM_CLASSES, NUM_CLASSES, 2, dropout=0.1, batch_first=True, dtype=torch.float64, device="meta"
    ).to_empty(device="cpu")
    found: torch.Tensor = layer(hidden[:, None])[0]
    return found[:, 0]


def stacked(hidden: torch.Tensor, dropout: float) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Return sequences of length two, and states and weights of a two-layer LSTM for them."""
    layer = nn.LSTM(NUM_CLASSES, NUM_CLASSES, 2, dropout=dropout, dtype=torch.float64, device="meta")
    weights = [torch.full_like(weight, 0.1, device="cpu") for weight in layer.parameters()]
    state = hidden.new_zeros(2, len(hidden), NUM_CLASSES)
    return hidden[:, None].expand(-1, 2, -1), (state, state), weights


def packed_lstm(hidden: torch.Tensor, dropout: float = 0.1) -> torch.Tensor:
    """Call torch's LSTM function for packed sequences, whose arguments differ from the padded form."""
    pairs, states, weights = stacked(hidden, dropout)
    sequence = pack_padded_sequence(pairs, torch.full((len(hidden),), 2), batch_first=True)
    found = torch.lstm(sequence.data, sequence.batch_sizes, states, weights, True, 2, dropout, True, False)[0]
    return pad_packed_sequence(sequence._replace(data=found), batch_first=True)[0][:, 0]


def lstm_by_keyword(hidden: torch.Tensor, dropout: float = 0.1) -> torch.Tensor:
    """Call torch's LSTM function with keyword arguments only."""
    pairs, states, weights = stacked(hidden, dropout)
    found: torch.Tensor = torch.lstm(
        input=pairs,
        hx=states,
        params=weights,
        has_biases=True,
        num_layers=2,
        dropout=dropout,
        train=True,
        bidirectional=False,
        batch_first=True,
    )[0]
    return found[:, 0]


def packed(hidden: torch.Tensor) -> torch.Tensor:
    """Apply dropout to packed values: three samples of length two."""
    pairs = hidden[:, None].expand(-1, 2, -1)
    sequence = pack_padded_sequence(pairs, torch.full((len(hidden),), 2), batch_first=True)
    return pad_packed_sequence(sequence._replace(data=F.dropout(sequence.data)), batch_first=True)[0][:, 0]


def sometimes(hidden: torch.Tensor) -> torch.Tensor:
    """Apply dropout in full micro-batches only."""
    return F.dropout(hidden) if len(hidden) == 3 else hidden


def unpreserved(hidden: torch.Tensor) -> torch.Tensor:
    """Apply dropout inside a checkpoint that does not preserve the random state."""
    found = checkpoint(
        lambda given: F.dropout(torch.tanh(given)).sin(), hidden, use_reentrant=False, preserve_rng_state=False
    )
    assert isinstance(found, torch.Tensor)
    return found


REFUSED_WHILE_RUNNING: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "fused attention": (attention, ("fused attention", "F.dropout(scores.softmax(-1)) @ value")),
    "a recurrent layer of packed input": (packed_lstm, ("recurrent layers", "nn.Dropout between")),
    "a recurrent layer by keyword": (lstm_by_keyword, ("recurrent layers", "nn.Dropout between")),
    "packed input": (packed, ("dropout drops elements of a tensor (6, 4)", "packed", "3 samples")),
    "another axis": (lambda hidden: F.dropout(hidden.t()).t(), ("(4, 3) whose axis 0", "3 samples", "sample_dims=")),
    "no axis for samples": (F.dropout1d, ("dropout1d", "(3, 4)", "without a sample axis")),
    "channels of one axis": (lambda hidden: torch.feature_dropout(hidden[:, 0], 0.1, True)[:, None], ("(3,)",)),
    "a parameter": (
        lambda hidden: hidden @ F.dropout(nn.Parameter(torch.ones(6, 4, dtype=torch.float64)))[:4],
        ("parameter", "belong to no sample"),
    ),
    "bernoulli": (lambda hidden: hidden * torch.bernoulli(torch.full_like(hidden, 0.5)), ("bernoulli draws",)),
    "rand": (lambda hidden: hidden * torch.rand(len(hidden), 1), ("rand draws", "with the data")),
    "noise": (lambda hidden: hidden + torch.randn_like(hidden), ("randn_like draws",)),
    "gumbel": (F.gumbel_softmax, ("draws", "with the data")),
    "later on": (
        lambda hidden: hidden if len(hidden) == 3 else hidden * torch.rand(1),
        ("numbers were drawn outside dropout", "with the data"),
    ),
    "a seed": (
        lambda hidden: (torch.default_generator.manual_seed(3), F.dropout(hidden))[1],
        ("seeds torch", "manual_seed"),
    ),
    "now and then": (sometimes, ("called 1 times in one micro-batch of a step and 0 times in another",)),
    "a checkpoint that forgets": (unpreserved, ("activation checkpointing", "preserve_rng_state=True")),
}


@pytest.mark.parametrize("name", REFUSED_WHILE_RUNNING)
def test_what_cannot_be_keyed_is_refused_by_name(name: str) -> None:
    """The first step raises an error that names the operation, its module and the fix; nothing has changed."""
    function, words = REFUSED_WHILE_RUNNING[name]
    network = Inside(function)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with make_engine(network, micro_batch_size=3) as engine, pytest.raises(CompositionError) as caught:
        engine.step(vectors(5))
    message = str(caught.value)
    everywhere = () if name in ("later on", "now and then", "a checkpoint that forgets") else ("'inside.odd'",)
    assert [word for word in (*words, *everywhere, "rng='micro_batch'") if word not in message] == [], message
    assert relative_error(network.state_dict(), before) == 0.0
    assert all(parameter.grad is None for parameter in network.parameters())


class TimeFirst(nn.Module):
    """Applies dropout to values of shape (time, samples, width), as from torch's layers with batch_first=False."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.by_hand, self.first = by_hand, nn.Linear(NUM_FEATURES, 2 * 21 * 3)
        self.layer = nn.GRU(2, 2) if not by_hand else nn.Linear(2, 2)
        self.drop, self.out = nn.Dropout(P), nn.Linear(21 * 3 * 2, NUM_CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).view(-1, 21 * 3, 2).transpose(0, 1)
        found = self.layer(hidden) if self.by_hand else self.layer(hidden)[0]
        logits: torch.Tensor = self.out(self.drop(found).transpose(0, 1).flatten(1))
        return logits


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.slow
def test_samples_in_the_second_axis_are_asked_for(by_hand: bool) -> None:
    """If two axes fit the number of samples, the sample axis must be declared; then masks do not depend on the cut."""
    batch = InMemory(vectors(21), seed=SEED)
    for size in (3, 7):
        with (
            make_engine(TimeFirst(by_hand=by_hand), micro_batch_size=size, rng="per_sample") as engine,
            pytest.raises(CompositionError, match=r"axis 0 or axis 1: .*sample_dims=\{'': 0\}"),
        ):
            engine.gradients(batch)
    found = []
    for size in (3, 7):
        rng = PerSample(sample_dims={"": 1})
        with make_engine(TimeFirst(by_hand=by_hand), micro_batch_size=size, rng=rng) as engine:
            found.append(engine.gradients(batch))
    assert relative_error(found[0], found[1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("dims", "words"), [({"encodre": 1}, ("'encodre'", "'first'")), ({"first": -1}, ("'first'", "-1"))]
)
def test_wrong_declarations_are_refused(dims: dict[str, int], words: tuple[str, ...]) -> None:
    """A missing module and an invalid axis are refused by name."""
    with pytest.raises(UserError) as caught:
        make_engine(Inside(torch.tanh), rng=PerSample(sample_dims=dims))
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_compiled_model_is_refused() -> None:
    """torch.compile is refused even if no layer drops, because its dropout functions could not be keyed."""
    network: Any = torch.compile(Inside(F.dropout), backend="eager")
    with pytest.raises(CompositionError):
        make_engine(network)
