"""The ladder against plain computation: each right way is the un-split batch, each wrong way is wrong by as much as it says.

Then each program takes a few optimizer steps and ends where the plain loop and the engine end.
"""

import ast
import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
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
from anybatch.core.loss import Loss
from tests.engine.cases import InMemory
from tests.ranks_fixture import Ranks

LADDER = Path(__file__).parents[2] / "examples" / "from_scratch"
PROGRAMS = sorted(LADDER.glob("*.py"))
EXACT = 1e-12
NUM_STEPS = 5
Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]


def program(number: int) -> ModuleType:
    """Return a program as a module; its name begins with a digit, so it is found by its path."""
    (path,) = LADDER.glob(f"{number:02}_*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference."""
    return float((found - expected).norm() / expected.norm())


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the gradient of a loss by plain torch, all parameters in one row."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def parameters_of(model: nn.Module) -> Tensor:
    """Return all parameters in one row."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over points."""
    loss: Tensor = cross_entropy(model(batch["points"]), batch["labels"])
    return loss


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over targets."""
    loss: Tensor = cross_entropy(model(batch["tokens"]).mT, batch["labels"])
    return loss


def add_up(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over rows of numbers."""
    numbers = batch["numbers"]
    loss: Tensor = (model(numbers)[:, 0] - numbers.sum(dim=1)).square().mean()
    return loss


def make_adder(seed: int = 0) -> nn.Module:
    """Return the linear layer that learns to add."""
    torch.manual_seed(seed)
    return nn.Linear(8, 1).double()


def make_numbers(num_rows: int, seed: int = 0) -> Tensor:
    """Return rows of eight numbers to be added."""
    return torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed)).double()


# One process.


def test_plain_loop_averages_gradients() -> None:
    """The gradient of a batch is the average of the gradients of its samples, each taken alone."""
    ladder = program(1)
    points, labels = ladder.spirals(7, seed=0)

    alone = [ladder.gradient(ladder.make_model(), points[k : k + 1], labels[k : k + 1]) for k in range(7)]

    assert distance(ladder.gradient(ladder.make_model(), points, labels), torch.stack(alone).mean(dim=0)) <= EXACT


@given(num_micro_batches=st.integers(1, 6), size=st.integers(1, 12), seed=st.integers(0, 99))
def test_equal_micro_batches_are_exact(num_micro_batches: int, size: int, seed: int) -> None:
    """However many micro-batches of one size: their accumulated gradient is that of the un-split batch."""
    ladder = program(2)
    points, labels = ladder.spirals(num_micro_batches * size, seed)
    model = ladder.make_model()
    whole = gradient_of(model, classify(model, {"points": points, "labels": labels}))

    assert distance(ladder.gradient(model, points, labels, size), whole) <= EXACT


def test_kept_bytes_grow_with_the_micro_batch() -> None:
    """What a forward keeps is the weights and the same number of bytes for each sample."""
    ladder = program(2)
    kept = [ladder.kept_bytes(ladder.make_model(), *ladder.spirals(size, seed=0)) for size in (16, 32, 48)]

    steps = [later - earlier for earlier, later in pairwise(kept)]
    assert steps[0] == steps[1]
    assert steps[0] >= 16 * 32 * 8  # 32 hidden numbers of 8 bytes for each of 16 more samples


@given(num_samples=st.integers(1, 40), size=st.integers(1, 16), seed=st.integers(0, 99))
def test_ragged_tail(num_samples: int, size: int, seed: int) -> None:
    """Sums over the count are exact for any tail; a mean of means weighs a sample by its micro-batch, no more no less."""
    ladder = program(3)
    points, labels = ladder.spirals(num_samples, seed)
    model = ladder.make_model()
    losses = cross_entropy(model(points), labels, reduction="none")
    whole = gradient_of(model, losses.mean())
    sizes = [len(part) for part in points.split(size)]
    weights = torch.cat([torch.full((length,), 1 / (length * len(sizes))) for length in sizes]).double()
    weights /= weights.sum()  # they were made in float32
    weighted = gradient_of(model, (cross_entropy(model(points), labels, reduction="none") * weights).sum())

    assert distance(ladder.gradient(model, points, labels, size, exact=True), whole) <= EXACT
    assert distance(ladder.gradient(model, points, labels, size, exact=False), weighted) <= 1e-6


def test_ragged_tail_is_visible() -> None:
    """With micro-batches of 16, 16 and 1 the mean of means is far off; with 16 and 16 it is exact."""
    ladder = program(3)
    errors = []
    for num_samples in (33, 32):
        batch = ladder.spirals(num_samples, seed=0)
        whole = ladder.gradient(ladder.make_model(), *batch, num_samples, exact=True)
        errors.append(distance(ladder.gradient(ladder.make_model(), *batch, 16, exact=False), whole))

    assert errors[0] > 0.1
    assert errors[1] <= EXACT


@given(masked=st.lists(st.floats(0, 1), min_size=1, max_size=12), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_token_mean(masked: list[float], size: int, seed: int) -> None:
    """Whatever share of each sentence's targets is masked: the sum over all targets is the un-split mean."""
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
    """A micro-batch with nothing to learn adds nothing to a sum, and makes a mean of means NaN."""
    ladder = program(4)
    tokens, labels = ladder.text(8, seed=0)
    labels[:4] = -100
    model = ladder.make_model()
    whole = gradient_of(model, predict(model, {"tokens": tokens, "labels": labels}))

    assert distance(ladder.gradient(model, tokens, labels, 4, exact=True), whole) <= EXACT
    assert math.isnan(ladder.gradient(model, tokens, labels, 4, exact=False).sum())


@pytest.mark.parametrize("number", [4, 9])
def test_text_ends_with_its_padding(number: int) -> None:
    """Labels are the next tokens up to a sentence's length, and masked from there on; lengths differ."""
    tokens, labels = program(number).text(50, seed=0)
    lengths = (labels != -100).sum(dim=1)

    for sentence, targets, length in zip(tokens, labels, lengths.tolist(), strict=True):
        assert torch.equal(targets[: length - 1], sentence[1:length])
        assert bool((targets[length:] == -100).all())
    assert len(set(lengths.tolist())) > 10
    assert lengths.min() >= 1


def spirals(number: int, num_samples: int, step: int) -> Batch:
    """Return the batch that a program on spirals trains on in a step."""
    points, labels = program(number).spirals(num_samples, seed=step)
    return {"points": points, "labels": labels}


def text(number: int, num_sentences: int, step: int) -> Batch:
    """Return the batch that a program on text trains on in a step."""
    tokens, labels = program(number).text(num_sentences, seed=step)
    return {"tokens": tokens, "labels": labels}


def train_plainly(model: nn.Module, loss: LossFunction, batch: Callable[[int], Batch], num_steps: int) -> Tensor:
    """Return the parameters after whole batches under the programs' Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(num_steps):
        model.zero_grad()
        loss(model, batch(step)).backward()
        optimizer.step()
    return parameters_of(model)


def train_by_engine(model: nn.Module, declared: Loss, batch: Callable[[int], Any], num_steps: int, size: int) -> Tensor:
    """Return the parameters after the engine's steps under the same Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    with ab.Engine(model, optimizer, declared, micro_batch_size=size) as engine:
        for step in range(num_steps):
            engine.step(batch(step))
    return parameters_of(model)


@pytest.mark.parametrize(("number", "batch_size"), [(1, 96), (2, 96), (3, 33), (4, 32)])
def test_training_in_one_process(number: int, batch_size: int) -> None:
    """Programs 1 to 4 train as the plain loop and the engine do; means of means end elsewhere."""
    ladder = program(number)
    arguments: dict[str, Any] = {1: {}, 2: {"micro_batch_size": 16}}.get(number, {"exact": True})
    make_batch, loss = (text, predict) if number == 4 else (spirals, classify)
    declared = ab.mean_over_tokens(loss, shift=False) if number == 4 else ab.mean_over_samples(loss)

    def batch(step: int) -> Batch:
        return make_batch(number, batch_size, step)

    ladder.train(model := ladder.make_model(), NUM_STEPS, **arguments)
    by_hand = parameters_of(model)

    assert distance(by_hand, train_plainly(ladder.make_model(), loss, batch, NUM_STEPS)) <= 1e-10
    assert distance(by_hand, train_by_engine(ladder.make_model(), declared, batch, NUM_STEPS, size=7)) <= 1e-10
    if "exact" in arguments:
        ladder.train(wrong := ladder.make_model(), NUM_STEPS, exact=False)
        assert distance(by_hand, parameters_of(wrong)) > 1e-3


# Two and three ranks.


def summed(num_rows: int) -> tuple[float, float]:
    """Run on every rank: return how far both ways of program 5 are from the un-split batch."""
    ladder = program(5)
    model, numbers = make_adder(), make_numbers(num_rows)
    whole = gradient_of(model, add_up(model, {"numbers": numbers}))
    ways = [ladder.gradient(model, numbers, exact=exact) for exact in (True, False)]
    return distance(ways[0], whole), distance(ways[1], whole)


@pytest.mark.parametrize("num_rows", [1, 6, 7, 31])
def test_all_reduce(ranks: Ranks, num_rows: int) -> None:
    """Sums over the count are exact for any shares, empty ones too; means of means only where shares are equal."""
    for right, wrong in ranks.run(summed, num_rows):
        assert right <= EXACT
        if num_rows % ranks.world_size == 0:
            assert wrong <= EXACT
        else:
            assert not wrong <= 1e-3  # NaN where a share is empty


def kept_apart() -> tuple[list[list[str]], float, Tensor]:
    """Run on every rank: return digests, how constant the difference to rank 0 was, and the parameters at the end."""
    ladder = program(6)
    model = make_adder(seed=dist.get_rank())
    digests = [ladder.digests(model)]
    gaps = []
    for act in (ladder.train, ladder.align, ladder.train):
        before = gap_to_first(model)
        act(model)
        gaps.append(float((gap_to_first(model) - before).norm()))
        digests.append(ladder.digests(model))
    return digests, gaps[0], parameters_of(model)


def gap_to_first(model: nn.Module) -> Tensor:
    """Return this rank's parameters minus those of rank 0."""
    first = parameters_of(model)
    dist.broadcast(first, src=0)
    return parameters_of(model) - first


def test_parameter_check(ranks: Ranks) -> None:
    """Replicas keep the difference they begin with for ever; aligned they stay equal bit for bit."""
    results = ranks.run(kept_apart)

    for digests, change, parameters in results:
        assert [len(set(row)) for row in digests] == [ranks.world_size, ranks.world_size, 1, 1]
        assert change <= 1e-12
        assert torch.equal(parameters, results[0][2])
        assert all(row == other for row, other in zip(digests, results[0][0], strict=True))
    assert distance(results[0][2], torch.tensor([1.0] * 8 + [0.0])) <= 1e-6  # it has learnt to add


def test_digest_sees_one_bit(two_ranks: Ranks) -> None:
    """The last bit of one parameter changes the digest; nothing else does."""
    for same, other in two_ranks.run(nudged):
        assert same
        assert other


def nudged() -> tuple[bool, bool]:
    """Run on every rank: return whether digests of twins agree, and whether they differ after a nudge."""
    ladder = program(6)
    model, twin = make_adder(), make_adder()
    same = ladder.digests(model) == ladder.digests(twin)
    with torch.no_grad():
        twin.get_parameter("weight")[0, 3] = math.nextafter(float(twin.get_parameter("weight")[0, 3]), math.inf)
    return same, all(one != other for one, other in zip(ladder.digests(model), ladder.digests(twin), strict=True))


def dealt(num_samples: int, batch_size: int) -> dict[str, Any]:
    """Run on every rank: return the rows of both deals of program 7, and each batch's gradient error."""
    ladder = program(7)
    numbers = make_numbers(num_samples)
    batches = torch.arange(num_samples).split(batch_size)
    model = make_adder()
    found: dict[str, Any] = {}
    for deal in (ladder.exact, ladder.padded):
        shares = deal(num_samples, batch_size)
        ddp = nn.parallel.DistributedDataParallel(make_adder())
        errors = [
            distance(ladder.gradient(ddp, numbers[own]), gradient_of(model, add_up(model, {"numbers": numbers[rows]})))
            for own, rows in zip(shares, batches, strict=True)
        ]
        found[deal.__name__] = ([rows.tolist() for rows in shares], errors)
    return found


@pytest.mark.parametrize(("num_samples", "batch_size"), [(25, 12), (31, 6)])
def test_ddp_with_sampler(ranks: Ranks, num_samples: int, batch_size: int) -> None:
    """Dealt exactly every row runs once and every gradient is right; padded, some run twice, and the tail is wrong."""
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
    """Run on every rank: return for each place of no_sync the bytes of each reduction and the gradient's error."""
    ladder = program(8)
    model, numbers = make_adder(), make_numbers(31)
    whole = gradient_of(model, add_up(model, {"numbers": numbers}))
    found = {}
    for around in ("nothing", "backward", "forward", "forward and backward"):
        ddp = nn.parallel.DistributedDataParallel(make_adder())
        sent: list[int] = []
        ddp.register_comm_hook(sent, ladder.counting_hook)
        found[around] = (sent, distance(ladder.gradient(ddp, numbers, 4, around), whole))
    return found


def test_no_sync(ranks: Ranks) -> None:
    """Only around the forward does no_sync save reductions; the gradient is right in any place."""
    gradient_bytes = 9 * 8
    num_micro_batches = math.ceil(31 / ranks.world_size / 4)
    for found in ranks.run(sent_and_learnt):
        for around, (sent, error) in found.items():
            assert sent == [gradient_bytes] * (1 if "forward" in around else num_micro_batches)
            assert error <= EXACT


def all_together(size: int) -> tuple[float, int]:
    """Run on every rank: return how far program 9 is from the un-split batch, and how many reductions it took."""
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
    """One reduction, and the un-split gradient, whatever the micro-batch size and the number of ranks."""
    for error, num_reductions in ranks.run(all_together, size):
        assert error <= EXACT
        assert num_reductions == 1


def trained_adders() -> dict[str, Tensor]:
    """Run on every rank: return the adder's parameters after a few steps of programs 5, 7, 8 and of the engine."""
    five, seven, eight = program(5), program(7), program(8)
    share = slice(dist.get_rank(), None, dist.get_world_size())

    def train(model: nn.Module, leave_gradient: Callable[[nn.Module, Tensor], object]) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            leave_gradient(model, make_numbers(33, step))
            optimizer.step()
        return parameters_of(model)

    def wrapped() -> nn.Module:
        return nn.parallel.DistributedDataParallel(make_adder())

    model = make_adder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Engine(model, optimizer, ab.mean_over_samples(add_up), micro_batch_size=4) as engine:
        for step in range(NUM_STEPS):
            engine.step(InMemory({"numbers": make_numbers(33, step)}))
    return {
        "engine": parameters_of(model),
        "plain": train(make_adder(), lambda m, n: (m.zero_grad(), add_up(m, {"numbers": n}).backward())),
        "program 5": train(make_adder(), lambda m, n: five.gradient(m, n, exact=True)),
        "program 7": train(wrapped(), lambda m, n: seven.gradient(m, n[share])),
        "program 8": train(wrapped(), lambda m, n: eight.gradient(m, n, 4, "forward and backward")),
    }


def test_training_adders(ranks: Ranks) -> None:
    """Programs 5, 7 and 8 end where the plain loop and the engine end, on every rank."""
    for found in ranks.run(trained_adders):
        for parameters in found.values():
            assert distance(parameters, found["plain"]) <= 1e-10


def trained_aligned() -> tuple[Tensor, Tensor]:
    """Run on every rank: return the parameters that program 6 and the engine learn from unequal replicas."""
    ladder = program(6)
    model, twin = make_adder(seed=dist.get_rank()), make_adder(seed=dist.get_rank())
    ladder.align(model)
    ladder.train(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with ab.Engine(twin, optimizer, ab.mean_over_samples(add_up), micro_batch_size=5) as engine:
        for step in range(200):
            engine.step(InMemory({"numbers": make_numbers(33, step)}))
    return parameters_of(model), parameters_of(twin)


def test_training_aligned(two_ranks: Ranks) -> None:
    """From unequal replicas program 6 and the engine learn the same: both begin with what rank 0 has."""
    for by_hand, by_engine in two_ranks.run(trained_aligned):
        assert distance(by_hand, by_engine) <= 1e-10


def trained_together(way: str) -> Tensor:
    """Run on every rank: return the parameters after clipped and scheduled steps of program 9, plain torch or the engine."""
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
    """Program 9, the plain loop and the engine clip and schedule alike."""
    plain = ranks.run(trained_together, "plain")[0]
    for way in ("program 9", "engine"):
        for parameters in ranks.run(trained_together, way):
            assert distance(parameters, plain) <= 1e-10


# As a student meets them.


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_is_a_page(path: Path) -> None:
    """A program has at most 60 lines of 100 characters, begins with a short docstring, and stands on its own."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    opening = tree.body[0]
    imported = {name.partition(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", source, flags=re.MULTILINE)}

    assert len(source.splitlines()) <= 60
    assert max(map(len, source.splitlines())) <= 100
    assert ast.get_docstring(tree)
    assert 3 <= (opening.end_lineno or 0) <= 7
    assert imported <= {"torch", *sys.stdlib_module_names}


def readme_outputs() -> dict[str, list[str]]:
    """Return program -> the lines that the README says it prints."""
    page = (LADDER / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^\$ python (\w+\.py)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return {name: text.splitlines() for name, text in blocks}


def shape_and_numbers(lines: list[str]) -> tuple[list[str], list[float]]:
    """Return lines with a mark in the place of every number, and the numbers; digests and rounding count as nothing."""
    text = re.sub(r"\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{8}\b|\b\d{8}\b", "DIGEST", "\n".join(lines))
    numbers = [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]
    return re.sub(r" *" + NUMBER, " #", text).splitlines(), [0.0 if number < 1e-12 else number for number in numbers]


NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_readme_shows_what_programs_print(path: Path) -> None:
    """A program, started as a student starts it, ends well and prints what the README shows."""
    done = subprocess.run(  # noqa: S603 (a program of ours)
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    printed_text, printed = shape_and_numbers(done.stdout.splitlines())
    shown_text, shown = shape_and_numbers(readme_outputs()[path.name])

    assert printed_text == shown_text
    assert printed == pytest.approx(shown, rel=0.05)


def test_readme_comparison_sees_differences() -> None:
    """A word, a line or a number that differs is found; digests and rounding errors may differ."""
    shown = ["digests f1637ff9 a8724e8d, error 1.3e-16, 28,936 bytes"]

    assert shape_and_numbers(["digests 12345678 0a0b0c0d, error 9.9e-17, 28,936 bytes"]) == shape_and_numbers(shown)
    assert shape_and_numbers(["digests f1637ff9 a8724e8d, error 1.3e-02, 28,936 bytes"]) != shape_and_numbers(shown)
    assert shape_and_numbers(["digest f1637ff9 a8724e8d, error 1.3e-16, 28,936 bytes"]) != shape_and_numbers(shown)
    assert shape_and_numbers([*shown, ""]) != shape_and_numbers(shown)
