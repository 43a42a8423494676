"""Cross-sample losses: the full-batch gradient with the activations of one micro-batch at a time."""

import dataclasses
import functools
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.randomness import joint_seed
from anybatch.errors import AnyBatchWarning, LossError
from anybatch.parallel.dtensors import gather
from anybatch.parallel.fsdp import FSDP
from anybatch.testing import relative_error
from tests.engine.cases import SPLITS, STRATEGIES, InMemory, arrive, combinations, plain_gradients
from tests.engine.two_pass_cases import (
    JOINT_CASES,
    Clip,
    Encoders,
    JointCase,
    Pair,
    all_modules,
    both,
    clip,
    engine_of,
    joined,
    pairs,
    plain_loss,
)
from tests.faults import sees
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
Errors = dict[tuple[str, str, str], "tuple[float, float] | str"]


def joint_errors(cases: list[str]) -> Errors:
    """Run on every rank: return errors of gradient and loss for each (case, split, strategy), or its traceback."""
    world = ab.World.from_environment()
    errors: Errors = {}
    for case_name in cases:
        case, batch = JOINT_CASES[case_name], pairs()
        for split_name, strategy in combinations(world.size):
            split = SPLITS[split_name]
            options = {
                "micro_batch_size": split.micro_batch_size,
                "accumulation_steps": split.accumulation_steps,
                "deal": split.deal,
                "strategy": STRATEGIES[strategy](),
                "seed": 0,  # as in `plain_loss`
            }
            try:
                with engine_of(case, world=world, **options) as engine:
                    found = engine.gradients(arrive(batch, split, world))
                    report = engine.step(arrive(batch, split, world))
                model, function = case.model(), case.loss()
                loss = plain_loss(case, model, function, batch, report.plan.units)
                expected = plain_gradients(all_modules(model, function), loss)
                errors[case_name, split_name, strategy] = (
                    relative_error(found, expected),
                    abs(report.loss / float(loss) - 1),
                )
            except Exception:  # noqa: BLE001 (reported by the test of this combination)
                errors[case_name, split_name, strategy] = traceback.format_exc()
    return errors


@pytest.fixture(scope="module")
def errors(ranks: Ranks) -> list[Errors]:
    """Return the errors of all combinations on every rank."""
    found: list[Errors] = ranks.run(joint_errors, list(JOINT_CASES))
    return found


@sees(
    "joint: parameters of the loss count on every rank",
    "src/anybatch/engine/two_pass.py",
    "gradient if exchange.reports_loss else torch.zeros_like(gradient)",
    "gradient",
)
@sees(
    "joint: every rank reports the loss",
    "src/anybatch/engine/two_pass.py",
    """
    if exchange.reports_loss:
""",
    """
    if True:
""",
)
@pytest.mark.parametrize("case", JOINT_CASES)
def test_gradient_equals_the_unsplit_batch(case: str, errors: list[Errors]) -> None:
    """On every rank, for every cut and strategy, gradient and loss equal one graph over all samples."""
    found = [item for rank in errors for item in rank.items() if item[0][0] == case]
    wrong = [f"{key[1:]}: {error}" for key, error in found if isinstance(error, str) or not max(error) <= TOLERANCE]

    assert len(found) == len(errors) * len(combinations(len(errors)))
    assert not wrong, f"{len(wrong)} of {len(found)} combinations:\n" + "\n".join(wrong)


class Counting(nn.Module):
    """A layer with a buffer that counts samples, is replaced in each forward, and affects the result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.num_seen: torch.Tensor
        self.register_buffer("num_seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen = self.num_seen + len(x)
        result: torch.Tensor = self.layer(x) * (1 + self.num_seen / 50)
        return result


class Counted(Encoders):
    """Encoders with buffers that change in each forward."""

    def __init__(self, layer: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.image.insert(0, Counting(layer(5)).double())  # type: ignore[operator]


@sees(
    "joint: buffers count samples twice",
    "src/anybatch/engine/two_pass.py",
    """
        after.restore()
""",
    """
        pass
""",
)
@sees(
    "joint: the second pass is recorded, too",
    "src/anybatch/engine/two_pass.py",
    """
counted.replay, exchange, record=record
""",
    """
counted.replay, exchange
""",
)
@pytest.mark.parametrize("size", [10, 29])
def test_buffers_equal_one_pass(size: int) -> None:
    """Buffers count each sample once per step, and running statistics equal one forward of all samples."""
    case = JointCase(model=Counted, encode=both, loss=lambda: clip)
    with engine_of(case, micro_batch_size=size) as engine:
        found = engine.gradients(pairs())
        assert int(engine.model.image[0].num_seen) == 0  # type: ignore[index, union-attr]
        engine.step(pairs())
        buffers = dict(engine.model.named_buffers())  # type: ignore[union-attr]
    model = Counted()
    pieces = [{name: value[start : start + size] for name, value in pairs().items()} for start in range(0, 29, size)]
    expected = plain_gradients(model, clip(model, joined([both(model, piece) for piece in pieces])))

    assert relative_error(found, expected) <= TOLERANCE
    assert int(buffers["image.0.num_seen"]) == 29
    whole = Counted()
    both(whole, pairs())
    for name, buffer in whole.named_buffers():
        if not name.endswith("num_seen"):
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-14)


def outputs_of_both_passes(kind: str) -> list[torch.Tensor]:
    """Run on every rank: return the outputs of a step: three micro-batches, then the first two again."""
    model: Any = Encoders(0.5)
    encode_image = torch.compile(model.image, backend="aot_eager") if kind == "compiled" else model.image
    seen: list[torch.Tensor] = []

    def encode(model: Encoders, batch: Any) -> Pair:
        if kind == "asks" and torch.is_grad_enabled():
            torch.rand(1)
        seen.append(encode_image(batch["image"]))
        return Pair(seen[-1], model.text(batch["text"]))

    torch.manual_seed(5)
    before = torch.get_rng_state()
    case = JointCase(model=lambda: model, encode=encode, loss=lambda: clip)
    with engine_of(case, micro_batch_size=10, check_loss=False) as engine:
        engine.step(pairs())
    assert torch.equal(before, torch.get_rng_state())
    if kind == "compiled":
        torch.compiler.reset()
    return [one.detach() for one in seen]


@sees(
    "joint: the second pass draws different random numbers",
    "src/anybatch/engine/two_pass.py",
    "        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(turn):",
    "        with context.strategy.micro_batch(turn):",
)
@pytest.mark.parametrize("kind", ["eager", "asks", "compiled"])
def test_both_passes_draw_the_same_numbers(kind: str, one_rank: Ranks) -> None:
    """With dropout the second pass gives bitwise the same outputs, also compiled or if `encode` checks grad mode."""
    (seen,) = one_rank.run(outputs_of_both_passes, kind)  # in a subprocess, because compiling leaves state

    assert [len(one) for one in seen] == [10, 10, 9, 10, 10]
    assert torch.equal(seen[0], seen[3])
    assert torch.equal(seen[1], seen[4])


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))],
    ids=["random", "np", "torch"],
)
def test_both_passes_scale_by_the_same_draw(draw: Callable[[], float]) -> None:
    """A number that `encode` draws from a global generator is the same in both passes; then the generators continue.

    The second pass runs the first micro-batch only: the graph of the last one is kept.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    drawn: list[float] = []

    def encode(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        drawn.append(draw())
        return cast("torch.Tensor", module(batch) * drawn[-1])

    def loss(_: nn.Module, z: torch.Tensor) -> torch.Tensor:
        return torch.cdist(z, z).square().mean() + (z @ z.T).logsumexp(1).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)  # these draws depend on the split
        make = functools.partial(torch.optim.SGD, lr=0.1)
        with ab.Engine(model, make, ab.joint(encode, loss), micro_batch_size=4, check_loss=False) as engine:
            found = engine.gradients(x)
    first, last, again = drawn
    z = torch.cat([model(x[:4]) * first, model(x[4:]) * last])
    expected = torch.autograd.grad(loss(model, z), list(model.parameters()))
    assert again == first
    assert draw() not in drawn
    for (name, _), one in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], one, rtol=1e-12, atol=0)


def peak_of_saved(run: Callable[[], object]) -> int:
    """Return the peak of bytes saved for backward."""
    alive, peak = 0, 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal alive, peak
            self.tensor = tensor.detach()  # an output would keep its own graph alive
            alive += tensor.nbytes
            peak = max(peak, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        run()
    return peak


def wide_network() -> nn.Module:
    """Return a network whose activations are larger than its parameters and outputs."""
    torch.manual_seed(23)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, 32), *layers, nn.Linear(32, 2)).double()


def encode_wide(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the vectors of a batch."""
    vectors: torch.Tensor = model(batch["image"])
    return vectors


def spread(_model: nn.Module, vectors: torch.Tensor) -> torch.Tensor:
    """Return a loss of the covariance matrix."""
    return (vectors.T.cov() - torch.eye(vectors.shape[1], dtype=vectors.dtype)).square().sum()


def peak_of_step(num_samples: int, size: int | None) -> int:
    """Return the peak of bytes saved for backward in a step."""
    case = JointCase(model=wide_network, encode=encode_wide, loss=lambda: spread)
    with engine_of(case, micro_batch_size=size) as engine:
        return peak_of_saved(lambda: engine.step(pairs(num_samples)))


def test_activations_of_one_micro_batch_at_a_time() -> None:
    """A step of many micro-batches saves the activations of one, plus the outputs."""
    one, many = peak_of_step(16, None), peak_of_step(256, 16)
    outputs_bytes = 256 * 2 * 8

    assert one > 16 * 32 * 8 * 5
    assert many <= one + 8 * outputs_bytes < peak_of_step(256, None) / 6


@pytest.mark.parametrize("size", [None, 3])
def test_parameters_in_encoder_and_loss(size: int | None) -> None:
    """A parameter used by encoder and loss gets both gradients; a head inside the loss trains on the full batch."""

    def encode(model: Encoders, batch: Any) -> Any:
        return {"vector": model.image(batch["image"]), "label": batch["label"]}

    def loss(model: Encoders, outputs: Any) -> torch.Tensor:
        prototypes = model.image[3].weight[:, :5]  # type: ignore[index]
        logits = outputs["vector"] @ prototypes + model.text[3].bias.sum()  # type: ignore[index]
        return nn.functional.cross_entropy(logits * logits.std(0), outputs["label"])

    case = JointCase(model=Encoders, encode=encode, loss=lambda: loss)
    with engine_of(case, micro_batch_size=size) as engine:
        found = engine.gradients(pairs())
    model = Encoders()
    expected = plain_gradients(model, loss(model, encode(model, pairs())))
    assert expected["image.3.weight"] is not None
    assert relative_error(found, expected) <= TOLERANCE


@sees(
    "joint: random numbers of the loss are not keyed",
    "src/anybatch/engine/two_pass.py",
    """
    context.randomness.seed_effective_batch(seed)
""",
    "",
)
def test_draws_of_the_loss_are_keyed() -> None:
    """Dropout inside the loss function depends on seed and step, not on the cut."""
    case = JointCase(
        model=Encoders,
        encode=both,
        loss=lambda: lambda model, views: clip(model, Pair(nn.functional.dropout(views.one, 0.5), views.other)),
    )
    found = []
    for size in (3, 10, None):
        with engine_of(case, micro_batch_size=size) as engine:
            found.append(engine.gradients(InMemory(pairs())))
    model = Encoders()
    torch.default_generator.manual_seed(joint_seed(0, 0))
    expected = plain_gradients(model, case.loss()(model, both(model, pairs())))

    assert max(relative_error(one, expected) for one in found) <= TOLERANCE


def evaluated(size: int | None, strategy: str) -> float:
    """Run on every rank: return the loss of two batches, the second one smaller than the number of ranks."""
    world = ab.World.from_environment()
    case = JOINT_CASES["clip, dropout"]
    with engine_of(case, world=world, micro_batch_size=size, strategy=STRATEGIES[strategy]()) as engine:
        return engine.evaluate([InMemory(pairs()), InMemory(pairs(2))])["loss"]


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_evaluation_uses_whole_batches(strategy: str, ranks: Ranks) -> None:
    """A cross-sample loss is evaluated over each full effective batch, for any micro-batch and world size."""
    model = Encoders()
    losses = [float(clip(model, both(model, pairs(number))).detach()) for number in (29, 2)]
    for size in (3, None):
        for found in ranks.run(evaluated, size, strategy):
            assert found == pytest.approx((29 * losses[0] + 2 * losses[1]) / 31, rel=1e-12)


WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "no tensor": (lambda _model, _batch: {"size": 3}, clip, "returned no tensor"),
    "other rows": (lambda model, batch: both(model, batch).one[:-1], clip, "shape (9, 4) for a micro-batch of 10"),
    "another length": (lambda model, batch: model.image(batch["image"])[:, : 1 + len(batch["image"]) % 3], clip, "pad"),
    "a loss for each": (both, lambda _, views: views.one.sum(1), "shape (29,); it must return one number"),
    "no loss": (both, lambda _model, _views: None, "NoneType; it must return one number"),
    "detached": (both, lambda _, views: views.one.detach().sum(), "does not depend on any output"),
    "an encoder that is not trained": (
        lambda model, batch: model.image(batch["image"]).detach(),
        lambda model, vectors: vectors.sum() * model.logit_scale,
        "does not depend on any output",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions_are_refused(name: str) -> None:
    """Invalid results of encode and the loss function are refused with the result and the fix."""
    encode, function, words = WRONG[name]
    case = JointCase(model=Encoders, encode=encode, loss=lambda: function)
    with engine_of(case, micro_batch_size=10) as engine, pytest.raises(LossError) as caught:
        engine.step(pairs())
    assert words in str(caught.value)


def refused_between_ranks() -> str:
    """Run on every rank: encode to a different length on each, and return the error."""
    world = ab.World.from_environment()
    encode = lambda model, batch: model.image(batch["image"])[:, : 1 + world.rank]  # noqa: E731
    with engine_of(JointCase(model=Encoders, encode=encode, loss=lambda: clip), world=world) as engine:
        try:
            engine.step(InMemory(pairs()))
        except LossError as error:
            return str(error)
    return "nothing was refused"


def test_ranks_that_encode_differently_are_refused(two_ranks: Ranks) -> None:
    """Outputs with a different shape on another rank are refused on both."""
    for message in two_ranks.run(refused_between_ranks):
        assert (
            "('samples', 1) of torch.float64 and ('samples', 2) of torch.float64 on one rank and on another" in message
        )


class Scaled(Clip):
    """The same loss with a temperature that can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))


def sharded_errors() -> list[float]:
    """Run on every rank: return the errors under FSDP2, where ranks run in lockstep."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    world, errors = ab.World.from_environment(), []
    modules = JOINT_CASES["clip, a module"]
    runs = [(JOINT_CASES["clip"], 3, "last_micro_batch", 29), (modules, None, "every_micro_batch", 29)]
    runs += [(dataclasses.replace(modules, loss=Scaled), 3, "every_micro_batch", number) for number in (29, 7, 1)]
    for case, size, reduction, number in runs:
        strategy = FSDP(reduction=reduction)  # type: ignore[arg-type]
        with engine_of(case, world=world, micro_batch_size=size, strategy=strategy) as engine:
            found = engine.gradients(InMemory(pairs(number)))
            whole = {name: None if one is None else gather(one) for name, one in found.items()}
            units = engine.step(InMemory(pairs(number))).plan.units
        model, function = case.model(), case.loss()
        loss = plain_loss(case, model, function, pairs(number), units)
        errors.append(relative_error(whole, plain_gradients(all_modules(model, function), loss)))
    return errors


def test_sharded_parameters_of_model_and_loss(two_ranks: Ranks) -> None:
    """Under FSDP2, gathered in both passes, gradients are the full batch's, even if a rank has no samples."""
    for errors in two_ranks.run(sharded_errors):
        assert max(errors) <= TOLERANCE
