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
from anybatch.errors import CompositionError
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
from tests.raising import raises
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
                    network, micro_batch_size=size, strategy=STRATEGIES[strategy](), world=world
                ) as engine:
                    found = engine.gradients(InMemory(batch, seed=SEED))
                errors[name, strategy, size] = relative_error(found, expected)
    world.close()
    return errors


def test_gradients_equal_the_unsplit_batch(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Every kind of dropout, for any cut on 1 and 2 ranks, has the gradient of one plain backward with its masks."""
    found = one_rank.run(gradient_errors, ("single",))
    found += two_ranks.run(gradient_errors, ("all_reduce",))
    assert len(found[1]) == len(found[0]) == len(WAYS) * len(MICRO_BATCH_SIZES)
    for errors in found:
        assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}


def test_keys_by_micro_batch_depend_on_the_cut() -> None:
    """Counter-example: with rng="micro_batch" two cuts of the same batch differ by more than 0.1."""
    way = WAYS["Dropout"]
    found = []
    for size in (3, 7):
        with make_engine(Network(way, way.drop()), micro_batch_size=size, rng="micro_batch") as engine:
            found.append(engine.gradients(InMemory(vectors(NUM_SAMPLES), seed=SEED)))
    assert relative_error(found[0], found[1]) > 0.1


class Attentive(nn.Module):
    """Attention over three positions with two heads, by torch's layer or written out with masks by hand."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.by_hand = by_hand
        self.first, self.out = nn.Linear(NUM_FEATURES, 3 * 4), nn.Linear(3 * 4, NUM_CLASSES)
        self.attention = nn.MultiheadAttention(4, 2, dropout=P, batch_first=True)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).view(-1, 3, 4)
        found = self.written_out(hidden) if self.by_hand else self.attention(hidden, hidden, hidden)[0]
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


def test_attention_with_weights_is_keyed() -> None:
    """Attention weights that torch's layer returns are dropped by sample and head, for any cut."""
    batch = vectors(NUM_SAMPLES)
    plain = Attentive(by_hand=True)
    expected = plain_gradients(plain, classify(plain, batch))
    for size in MICRO_BATCH_SIZES:
        with make_engine(Attentive(by_hand=False), micro_batch_size=size) as engine:
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


@pytest.mark.parametrize("fails", [False, True], ids=["after a step", "after an error"])
def test_the_callers_random_state_is_restored(fails: bool) -> None:
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
    "fused attention": (attention, ("scaled_dot_product_attention draws", "F.dropout(scores.softmax(-1)) @ value")),
    "a recurrent layer": (recurrent, ("gru draws",)),
    "packed input": (packed, ("dropout drops elements of a tensor (6, 4)", "packed", "3 samples")),
    "another axis": (lambda hidden: F.dropout(hidden.t()).t(), ("(4, 3) whose axis 0", "3 samples")),
    "either axis": (
        lambda hidden: F.dropout(hidden.expand(6, 3, -1))[0],
        ("(6, 3, 4)", "axis 0 or axis 1", "samples first"),
    ),
    "no axis for samples": (F.dropout1d, ("dropout1d", "(3, 4)", "without a sample axis")),
    "a parameter": (
        lambda hidden: hidden @ F.dropout(nn.Parameter(torch.ones(6, 4, dtype=torch.float64)))[:4],
        ("parameter", "belong to no sample"),
    ),
    "alpha dropout": (lambda hidden: F.alpha_dropout(hidden, 0.5, True), ("alpha_dropout draws", "F.dropout")),
    "noise": (lambda hidden: hidden + torch.randn_like(hidden), ("randn_like draws", "with the data")),
    "later on": (
        lambda hidden: hidden if len(hidden) == 3 else hidden * torch.rand(1),
        ("numbers were drawn outside dropout", "with the data"),
    ),
    "a seed": (
        lambda hidden: (torch.default_generator.manual_seed(3), F.dropout(hidden))[1],
        ("seeds torch", "manual_seed"),
    ),
    "now and then": (sometimes, ("called 1 times in one micro-batch of a step and 0 times in another",)),
    "a checkpoint without random state": (unpreserved, ("activation checkpointing", "preserve_rng_state=True")),
}


@pytest.mark.parametrize("name", REFUSED_WHILE_RUNNING)
def test_operations_without_keys_are_refused_by_name(name: str) -> None:
    """The first step raises an error that names the operation and the fix; nothing has changed."""
    function, words = REFUSED_WHILE_RUNNING[name]
    network = Inside(function)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with make_engine(network, micro_batch_size=3) as engine, pytest.raises(CompositionError) as caught:
        engine.step(vectors(5))
    message = str(caught.value)
    assert [word for word in (*words, "rng='micro_batch'") if word not in message] == [], message
    assert relative_error(network.state_dict(), before) == 0.0
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("layer", [nn.GRU(4, 4), nn.LSTM(4, 4, 2, dropout=0.1, batch_first=True)])
def test_layers_without_keys_are_refused(layer: nn.Module) -> None:
    """Layers with samples in the second axis, and recurrent layers with dropout, are refused before the first step."""
    with raises(CompositionError, "not_keyed_by_sample"):
        make_engine(Inside(torch.tanh, layer=layer))


def test_a_compiled_model_is_refused() -> None:
    """torch.compile is refused even if no layer drops, because its dropout functions could not be keyed."""
    network: Any = torch.compile(Inside(F.dropout), backend="eager")
    with pytest.raises(CompositionError):
        make_engine(network)


class LateDropout(nn.Module):
    """Drops with a function that is not keyed, at a rate that rises from 0, before dropout that is keyed."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function, self.rate = function, 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Drop twice."""
        return F.dropout(self.function(self.linear(values), self.rate, True), 0.1)


@pytest.mark.parametrize("function", [torch.dropout, F.alpha_dropout])
def test_unkeyed_draws_are_refused_in_any_step(function: Callable[..., torch.Tensor]) -> None:
    """A function that draws from a later step on is refused there, although keyed dropout follows it."""
    model = LateDropout(function)
    loss = ab.mean_over_samples(lambda net, batch: net(batch).square().flatten(1).mean())
    with ab.Engine(
        model, torch.optim.SGD(model.parameters(), 0.1), loss, micro_batch_size=2, rng="per_sample", seed=1
    ) as engine:
        engine.step(torch.ones(8, 3, 4))
        model.rate = 0.3
        with raises(CompositionError, "not_keyed_by_sample"):
            engine.step(torch.ones(8, 3, 4))
