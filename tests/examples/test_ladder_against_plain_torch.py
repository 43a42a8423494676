"""The ladder's programs match plain torch on the un-split batch, and their wrong ways are wrong as documented.

After some training steps they have the parameters of the plain loop.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anybatch as ab
from tests.engine.cases import Batch, InMemory
from tests.examples.ladder import (
    EXACT,
    add_up,
    adder,
    classify,
    distance,
    parameters_of,
    predict,
    program,
    rows_of_numbers,
)
from tests.ranks_fixture import Ranks

NUM_STEPS = 5


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the gradient of a loss as one vector."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def added_up(model: nn.Module, numbers: Tensor) -> Tensor:
    """Return the gradient of the mean over rows of numbers."""
    return gradient_of(model, add_up(model, {"numbers": numbers}).mean())


# One process


def test_plain_loop_averages_gradients() -> None:
    """The gradient of a batch is the mean of the gradients of its samples."""
    ladder = program(1)
    points, labels = ladder.spirals(7, seed=0)

    alone = [ladder.gradient(ladder.make_model(), points[k : k + 1], labels[k : k + 1]) for k in range(7)]

    assert distance(ladder.gradient(ladder.make_model(), points, labels), torch.stack(alone).mean(dim=0)) <= EXACT


@given(num_micro_batches=st.integers(1, 6), size=st.integers(1, 12), seed=st.integers(0, 99))
@pytest.mark.slow
def test_equal_micro_batches_are_exact(num_micro_batches: int, size: int, seed: int) -> None:
    """The accumulated gradient of equal micro-batches is the un-split batch's, for any number and size."""
    ladder = program(2)
    points, labels = ladder.spirals(num_micro_batches * size, seed)
    model = ladder.make_model()
    whole = gradient_of(model, classify(model, {"points": points, "labels": labels}))

    assert distance(ladder.gradient(model, points, labels, size), whole) <= EXACT


def test_kept_bytes_grow_with_the_micro_batch() -> None:
    """A forward saves the weights plus the same number of bytes per sample."""
    ladder = program(2)
    kept = [ladder.kept_bytes(ladder.make_model(), *ladder.spirals(size, seed=0)) for size in (16, 32, 48)]

    steps = [later - earlier for earlier, later in pairwise(kept)]
    assert steps[0] == steps[1]
    assert steps[0] >= 16 * 32 * 8  # 32 hidden values of 8 bytes for each of 16 more samples


@pytest.mark.slow
@given(num_samples=st.integers(1, 40), size=st.integers(1, 16), seed=st.integers(0, 99))
def test_ragged_tail(num_samples: int, size: int, seed: int) -> None:
    """Sums over the count are exact for any tail; a mean of means weights each sample by its micro-batch."""
    ladder = program(3)
    points, labels = ladder.spirals(num_samples, seed)
    model = ladder.make_model()
    sizes = [len(part) for part in points.split(size)]
    weights = torch.cat([torch.full((n,), 1 / (n * len(sizes)), dtype=torch.float64) for n in sizes])
    whole = gradient_of(model, classify(model, {"points": points, "labels": labels}))
    weighted = gradient_of(model, (cross_entropy(model(points), labels, reduction="none") * weights).sum())

    assert distance(ladder.gradient(model, points, labels, size, exact=True), whole) <= EXACT
    assert distance(ladder.gradient(model, points, labels, size, exact=False), weighted) <= EXACT


@pytest.mark.slow
@given(masked=st.lists(st.floats(0, 1), min_size=1, max_size=12), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_token_mean(masked: list[float], size: int, seed: int) -> None:
    """For any masking of targets, the sum over all targets matches the un-split mean."""
    ladder = program(4)
    tokens, labels = ladder.text(len(masked), seed)
    random = torch.Generator().manual_seed(seed)
    hidden = torch.rand(labels.shape, generator=random) < torch.tensor(masked)[:, None]
    hidden[0, 0] = False
    labels = labels.masked_fill(hidden, -100)
    model = ladder.make_model()
    whole = gradient_of(model, predict(model, {"tokens": tokens, "labels": labels}))

    assert distance(ladder.gradient(model, tokens, labels, size, exact=True), whole) <= EXACT


def test_micro_batch_without_targets() -> None:
    """A micro-batch without targets adds nothing to a sum, but counts fully in a mean of means."""
    ladder = program(4)
    tokens, labels = ladder.text(8, seed=0)
    labels[:4] = -100
    model = ladder.make_model()
    whole = gradient_of(model, predict(model, {"tokens": tokens, "labels": labels}))

    assert distance(ladder.gradient(model, tokens, labels, 4, exact=True), whole) <= EXACT
    assert distance(ladder.gradient(model, tokens, labels, 4, exact=False), whole / 2) <= EXACT


@pytest.mark.parametrize("number", [4, 9])
def test_text_ends_with_its_padding(number: int) -> None:
    """Labels are the next tokens up to a sentence's length, then masked; lengths differ."""
    tokens, labels = program(number).text(50, seed=0)
    lengths = (labels != -100).sum(dim=1)

    for sentence, targets, length in zip(tokens, labels, lengths.tolist(), strict=True):
        assert torch.equal(targets[: length - 1], sentence[1:length])
        assert bool((targets[length:] == -100).all())
    assert len(set(lengths.tolist())) > 10
    assert lengths.min() >= 1


def spirals(number: int, num_samples: int, step: int) -> Batch:
    """Return the batch of a step of a program on spirals."""
    points, labels = program(number).spirals(num_samples, seed=step)
    return {"points": points, "labels": labels}


def text(number: int, num_sentences: int, step: int) -> Batch:
    """Return the batch of a step of a program on text."""
    tokens, labels = program(number).text(num_sentences, seed=step)
    return {"tokens": tokens, "labels": labels}


@pytest.mark.parametrize(("number", "batch_size"), [(1, 96), (2, 96), (3, 33), (4, 32)])
def test_training_in_one_process(number: int, batch_size: int) -> None:
    """Programs 1 to 4 train like the plain loop on full batches; means of means do not."""
    ladder = program(number)
    arguments: dict[str, Any] = {1: {}, 2: {"micro_batch_size": 16}}.get(number, {"exact": True})
    make_batch, loss = (text, predict) if number == 4 else (spirals, classify)
    plain = ladder.make_model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.03)
    for step in range(NUM_STEPS):
        plain.zero_grad()
        loss(plain, make_batch(number, batch_size, step)).backward()
        optimizer.step()

    ladder.train(model := ladder.make_model(), NUM_STEPS, **arguments)

    assert distance(parameters_of(model), parameters_of(plain)) <= 1e-10
    if "exact" in arguments:
        ladder.train(wrong := ladder.make_model(), NUM_STEPS, exact=False)
        assert distance(parameters_of(wrong), parameters_of(plain)) > 1e-3


# One, two and three ranks


def summed(num_rows: int) -> tuple[float, float]:
    """Run on every rank: return the errors of both ways of program 5, relative to the un-split batch."""
    ladder = program(5)
    model, numbers = adder(), rows_of_numbers(num_rows)
    whole = added_up(model, numbers)
    ways = [ladder.gradient(model, numbers, exact=exact) for exact in (True, False)]
    return distance(ways[0], whole), distance(ways[1], whole)


@pytest.mark.parametrize("num_rows", [1, 6, 7, 31])
def test_all_reduce(ranks: Ranks, num_rows: int) -> None:
    """Sums over the count are exact for any shares, even empty ones; means of means only for equal shares."""
    for right, wrong in ranks.run(summed, num_rows):
        assert right <= EXACT
        if num_rows % ranks.world_size == 0:
            assert wrong <= EXACT
        else:
            assert not wrong <= 1e-3  # NaN if a share is empty


def kept_apart() -> tuple[list[list[str]], float, Tensor]:
    """Run on every rank: return digests, how the difference to rank 0 changed, and the final parameters."""
    ladder = program(6)
    model = adder(seed=dist.get_rank())
    digests = [ladder.digests(model)]
    gaps = []
    for act in (ladder.train, ladder.align, ladder.train):
        before = gap_to_first(model)
        act(model)
        gaps.append(float((gap_to_first(model) - before).norm()))
        digests.append(ladder.digests(model))
    return digests, gaps[0], parameters_of(model)


def gap_to_first(model: nn.Module) -> Tensor:
    """Return this rank's parameters minus rank 0's."""
    first = parameters_of(model)
    dist.broadcast(first, src=0)
    return parameters_of(model) - first


def test_replicas_keep_their_difference(three_ranks: Ranks) -> None:
    """Replicas keep their initial difference; once aligned they stay bitwise equal and learn to add."""
    results = three_ranks.run(kept_apart)

    for digests, change, parameters in results:
        assert [len(set(row)) for row in digests] == [3, 3, 1, 1]
        assert change <= EXACT
        assert torch.equal(parameters, results[0][2])
        assert digests == results[0][0]
    assert distance(results[0][2], torch.tensor([1.0] * 8 + [0.0])) <= 1e-6


def nudged() -> tuple[bool, bool]:
    """Run on every rank: return whether digests of twins agree, and whether they differ after a tiny change."""
    ladder = program(6)
    model, twin = adder(), adder()
    same = ladder.digests(model) == ladder.digests(twin)
    with torch.no_grad():
        twin.get_parameter("weight")[0, 3] = math.nextafter(float(twin.get_parameter("weight")[0, 3]), math.inf)
    return same, all(one != other for one, other in zip(ladder.digests(model), ladder.digests(twin), strict=True))


def test_a_digest_sees_one_bit(two_ranks: Ranks) -> None:
    """A change of one parameter's last bit changes the digest; equal models have equal digests."""
    assert two_ranks.run(nudged) == [(True, True)] * 2


def dealt(num_samples: int, batch_size: int) -> dict[str, Any]:
    """Run on every rank: return the rows of both deals of program 7, and each batch's gradient error."""
    ladder = program(7)
    numbers = rows_of_numbers(num_samples)
    batches = torch.arange(num_samples).split(batch_size)
    model = adder()
    found: dict[str, Any] = {}
    for deal in (ladder.exact, ladder.padded):
        shares = deal(num_samples, batch_size)
        ddp = nn.parallel.DistributedDataParallel(adder())
        errors = [
            distance(ladder.gradient(ddp, numbers[own]), added_up(model, numbers[rows]))
            for own, rows in zip(shares, batches, strict=True)
        ]
        found[deal.__name__] = ([rows.tolist() for rows in shares], errors)
    return found


@pytest.mark.parametrize(("num_samples", "batch_size"), [(25, 12), (31, 6)])
def test_ddp_with_sampler(ranks: Ranks, num_samples: int, batch_size: int) -> None:
    """Dealt exactly, every row runs once and gradients are right; padded, some run twice and the tail is wrong."""
    results = ranks.run(dealt, num_samples, batch_size)
    drawn = {
        name: sorted(row for result in results for share in result[name][0] for row in share)
        for name in ("exact", "padded")
    }
    extra = -num_samples % ranks.world_size

    assert drawn["exact"] == list(range(num_samples))
    assert drawn["padded"] == sorted([*range(num_samples), *range(extra)])
    for result in results:
        assert max(result["exact"][1]) <= EXACT
        assert max(result["padded"][1][:-1]) <= EXACT
        assert (result["padded"][1][-1] > 1e-3) == (extra > 0)


def sent_and_learnt() -> dict[str, tuple[list[int], float]]:
    """Run on every rank: return for each scope of no_sync the bytes of each reduction and the gradient's error."""
    ladder = program(8)
    model, numbers = adder(), rows_of_numbers(31)
    whole = added_up(model, numbers)
    found = {}
    for around in ("nothing", "backward", "forward", "forward and backward"):
        ddp = nn.parallel.DistributedDataParallel(adder())
        sent: list[int] = []
        ddp.register_comm_hook(sent, ladder.counting_hook)
        found[around] = (sent, distance(ladder.gradient(ddp, numbers, 4, around), whole))
    return found


def test_no_sync(ranks: Ranks) -> None:
    """no_sync saves reductions only around the forward; the gradient is right for every scope."""
    gradient_bytes = 9 * 8
    num_micro_batches = math.ceil(31 / ranks.world_size / 4)
    for found in ranks.run(sent_and_learnt):
        for around, (sent, error) in found.items():
            assert sent == [gradient_bytes] * (1 if "forward" in around else num_micro_batches)
            assert error <= EXACT


def all_together(size: int) -> tuple[float, int]:
    """Run on every rank: return program 9's error relative to the un-split batch, and its number of reductions."""
    ladder = program(9)
    model = program(4).make_model()
    tokens, labels = ladder.text(10, seed=1)
    whole = gradient_of(model, predict(model, {"tokens": tokens, "labels": labels}))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        row = ladder.gradient(model, tokens, labels, size)
    left = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(left, row)
    return distance(row, whole), counted.call_count


@pytest.mark.parametrize("size", [1, 3, 10])
def test_all_together(ranks: Ranks, size: int) -> None:
    """One reduction gives the un-split gradient for any micro-batch size and number of ranks."""
    for error, num_reductions in ranks.run(all_together, size):
        assert error <= EXACT
        assert num_reductions == 1


def trained_adders() -> dict[str, Tensor]:
    """Run on every rank: return the adder's parameters after some steps of programs 5, 7, 8 and of plain torch."""
    five, seven, eight = program(5), program(7), program(8)
    share = slice(dist.get_rank(), None, dist.get_world_size())

    def train(model: nn.Module, leave_gradient: Callable[[nn.Module, Tensor], object]) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            leave_gradient(model, rows_of_numbers(33, step))
            optimizer.step()
        return parameters_of(model)

    def leave_plainly(model: nn.Module, numbers: Tensor) -> None:
        model.zero_grad()
        add_up(model, {"numbers": numbers}).mean().backward()

    def wrapped() -> nn.Module:
        return nn.parallel.DistributedDataParallel(adder())

    return {
        "plain": train(adder(), leave_plainly),
        "program 5": train(adder(), lambda m, n: five.gradient(m, n, exact=True)),
        "program 7": train(wrapped(), lambda m, n: seven.gradient(m, n[share])),
        "program 8": train(wrapped(), lambda m, n: eight.gradient(m, n, 4, "forward and backward")),
    }


def test_training_adders(ranks: Ranks) -> None:
    """Programs 5, 7 and 8 train the parameters of the plain loop, on every rank."""
    for found in ranks.run(trained_adders):
        for parameters in found.values():
            assert distance(parameters, found["plain"]) <= 1e-10


def trained_together(way: str) -> Tensor:
    """Run on every rank: return the parameters after clipped, scheduled steps of program 9, torch or the engine."""
    ladder = program(9)
    model = program(4).make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    if way == "engine":
        declared = ab.mean_over_tokens(predict, shift=False)
        with ab.Engine(model, optimizer, declared, micro_batch_size=4, clip=0.1, scheduler=scheduler) as engine:
            for step in range(NUM_STEPS):
                engine.step(InMemory(text(9, 33, step)))
        return parameters_of(model)
    for step in range(NUM_STEPS):
        batch = text(9, 33, step)
        if way == "program 9":
            ladder.gradient(model, batch["tokens"], batch["labels"], 4)
        else:
            model.zero_grad()
            predict(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return parameters_of(model)


def test_training_together(ranks: Ranks) -> None:
    """Program 9, the plain loop and the engine give the same parameters with clipping and a scheduler."""
    plain = ranks.run(trained_together, "plain")[0]
    for way in ("program 9", "engine"):
        for parameters in ranks.run(trained_together, way):
            assert distance(parameters, plain) <= 1e-10
