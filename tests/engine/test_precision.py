"""Low precision: float32 sums, reported updates, and autocast and fp16 scaling equal to handwritten loops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, Batch, Gradients, InMemory, cut, num_samples, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks

NUM_MICRO_BATCHES = 512


def narrow_model() -> nn.Module:
    """Return a bf16 model."""
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()


def narrow_batch() -> Batch:
    """Return samples whose gradients have the same sign, so that a bf16 sum stalls."""
    batch = vectors(NUM_MICRO_BATCHES)
    return {"x": (batch["x"].abs() + 1).bfloat16(), "y": torch.zeros_like(batch["y"])}


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def sum_of_narrow_gradients() -> tuple[Gradients, Gradients]:
    """Return the sum of the bf16 gradients of all micro-batches, in float64 and in bf16."""
    model, batch = narrow_model(), narrow_batch()
    wide = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    narrow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number in range(NUM_MICRO_BATCHES):
        loss = classify(model, cut(batch, number, number + 1)) / NUM_MICRO_BATCHES
        for name, gradient in zip(wide, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            wide[name] += gradient
            narrow[name] += gradient
    return {**wide}, {**narrow}


def narrow_gradients(strategy: str) -> Gradients:
    """Run on every rank: return the engine's gradient of the bf16 model, and check its dtype."""
    model = narrow_model()
    world = ab.World.from_environment()
    with ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        ab.mean_over_samples(classify),
        micro_batch_size=1,
        strategy=STRATEGIES[strategy](),
        world=world,
    ) as engine:
        found = engine.gradients(InMemory(narrow_batch()))
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in found.values())
    return found


def test_bf16_gradients_add_up_in_float32(one_rank: Ranks, two_ranks: Ranks) -> None:
    """512 bf16 gradients are summed to float32 accuracy, also over ranks; a bf16 sum is off by more than 10%."""
    wide, narrow = sum_of_narrow_gradients()

    assert relative_error(narrow, wide) > 0.1
    assert relative_error(one_rank.run(narrow_gradients, "single")[0], wide) <= 1e-6
    for strategy in ("all_reduce", "all_reduce, after"):
        for found in two_ranks.run(narrow_gradients, strategy):
            assert relative_error(found, wide) <= 1e-6


class OneWeight(nn.Module):
    """A bf16 weight whose gradient is 1 in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum(1)


def step_one_weight(optimizer: Callable[[nn.Module], Any], number: int) -> tuple[nn.Module, ab.StepReport]:
    """Make steps with a learning rate far below bf16's spacing around 1; return model and last report."""
    model = OneWeight()
    batch = {"x": torch.ones(6, 4, dtype=torch.bfloat16)}
    loss = ab.mean_over_samples(lambda model, batch: model(batch["x"]))
    with ab.Engine(model, optimizer(model), loss, micro_batch_size=2, world=ab.World()) as engine:
        report = engine.step(batch)
        for _ in range(number - 1):
            report = engine.step(batch)
    return model, report


@sees(
    "master weights are not copied to the model",
    "src/anybatch/engine/precision.py",
    """
                    parameter.copy_(master)
""",
    """
                    pass
""",
)
@pytest.mark.slow
def test_master_weights_take_small_steps() -> None:
    """With an optimizer function, float32 master weights keep 64 steps of 2**-12, as reported."""
    model, report = step_one_weight(lambda _: lambda named: torch.optim.SGD(named, lr=2**-12), 64)

    assert report.update == "master_weights"
    assert torch.equal(model.get_parameter("weight").detach(), torch.full((4,), 1 - 2**-6, dtype=torch.bfloat16))


@sees(
    "the summed gradient is rounded twice",
    "src/anybatch/engine/precision.py",
    "gradient.to(parameter.dtype)",
    "gradient.to(torch.float8_e5m2).to(parameter.dtype)",
)
@pytest.mark.slow
def test_cast_gradients_are_rounded_once() -> None:
    """An optimizer over bf16 parameters gets the float32 sum rounded once, not a sum of rounded gradients."""
    wide, _ = sum_of_narrow_gradients()
    model = narrow_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), micro_batch_size=1, world=ab.World()) as engine:
        engine.step(InMemory(narrow_batch()))
    for name, parameter in model.named_parameters():
        gradient = wide[name]
        assert gradient is not None
        assert torch.equal(parameter.detach(), before[name] - gradient.bfloat16())


@sees(
    "autocast is off",
    "src/anybatch/engine/precision.py",
    "return lambda *_: torch.autocast(device.type, dtype)",
    "return _nothing",
)
def test_bf16_autocast_equals_the_handwritten_loop() -> None:
    """precision='bf16' is bitwise equal to forwards under autocast and backwards outside of it."""
    batch = {name: v.float() if v.is_floating_point() else v for name, v in vectors(29).items()}
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))
    for start in range(0, 29, 7):
        with torch.autocast("cpu", torch.bfloat16):
            piece = cut(batch, start, start + 7)
            loss = classify(model, piece)
        (loss * (num_samples(piece) / 29)).backward()
    by_hand = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    options: dict[str, Any] = {"micro_batch_size": 7, "world": ab.World()}

    def by_engine(precision: Any) -> Gradients:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Engine(model, optimizer, ab.mean_over_samples(classify), precision=precision, **options) as engine:
            return engine.gradients(batch)

    found = by_engine("bf16")
    assert len(by_hand) == 4
    assert all(torch.equal(found[name], value) for name, value in by_hand.items())  # type: ignore[arg-type]
    assert relative_error(by_engine("fp32"), by_hand) > 1e-4


class Spiky(nn.Module):
    """Overflows in fp16 for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.inside = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.inside(x)
        return score.squeeze(1).float()


class SpikyRun(NamedTuple):
    """The outcome of five steps, one by one, and the final parameters."""

    skipped: list[bool]
    moved: list[bool]
    scheduled: list[int]
    scales: list[float]
    parameters: list[torch.Tensor]


def spiky_batch(number: int) -> Batch:
    """Return the batch of a step; in the third, the first sample is large."""
    x = vectors(12)["x"].float()
    if number == 2:
        x[0] = 3e4
    return {"x": x}


def squared(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return one loss per sample."""
    scores: torch.Tensor = model(batch["x"])
    return scores.square()


def spiky_steps(strategy: str, clip: float | None = None) -> SpikyRun:
    """Run on every rank: make five fp16 steps; the third overflows in the first rank's share only."""
    model = Spiky()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run = SpikyRun([], [], [], [], list(model.parameters()))
    with ab.Engine(
        model,
        optimizer,
        ab.mean_over_samples(squared),
        micro_batch_size=3,
        strategy=STRATEGIES[strategy](),
        precision="fp16",
        clip=clip,
        scheduler=scheduler,
        world=ab.World.from_environment(),
    ) as engine:
        for number in range(5):
            before = [parameter.detach().clone() for parameter in run.parameters]
            report = engine.step(InMemory(spiky_batch(number)))
            run.skipped.append(report.skipped)
            run.moved.append(any(not torch.equal(*pair) for pair in zip(before, run.parameters, strict=True)))
            run.scheduled.append(scheduler.last_epoch)
            run.scales.append(engine._parts.updater.scaler.scaler.get_scale())  # noqa: SLF001 (no report contains it)
    return run._replace(parameters=[parameter.detach() for parameter in run.parameters])


@sees(
    "the scheduler is stepped in a skipped step",
    "src/anybatch/engine/updater.py",
    "if self.scheduler is None or updated.skipped:",
    "if self.scheduler is None:",
    cases=["single"],
    also=["tests/engine/test_precision.py::test_fp16_equals_the_handwritten_loop[unclipped]"],
)
@pytest.mark.parametrize("strategy", ["single", "all_reduce", "ddp"])
def test_fp16_overflow_skips_the_step_on_all_ranks(strategy: str, one_rank: Ranks, two_ranks: Ranks) -> None:
    """If one rank overflows, no rank updates, the scheduler waits, the scale halves, and training continues."""
    found: list[SpikyRun] = (one_rank if strategy == "single" else two_ranks).run(spiky_steps, strategy)

    for run in found:
        assert run.skipped == [False, False, True, False, False]
        assert run.moved == [True, True, False, True, True]
        assert run.scheduled == [1, 2, 2, 3, 4]
        assert run.scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15]
        assert all(torch.equal(*pair) for pair in zip(run.parameters, found[0].parameters, strict=True))


@sees(
    "fp16 gradients are clipped before they are unscaled",
    "src/anybatch/engine/updater.py",
    """
        if self.scaler.enabled:
            self.scaler.unscale()
""",
    "",
    cases=["clipped"],
    also=["tests/engine/test_compatibility.py::test_exact[fp16-clip_norm]"],
)
@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
def test_fp16_equals_the_handwritten_loop(clip: float | None, one_rank: Ranks) -> None:
    """precision='fp16' is bitwise equal to a handwritten loop with torch's GradScaler, also after an overflow.

    With clipping, gradients must be unscaled first; the limit is below every norm.
    """
    model = Spiky()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu")
    for number in range(5):
        batch = spiky_batch(number)
        for start in range(0, 12, 3):
            with torch.autocast("cpu", torch.float16):
                loss = squared(model, cut(batch, start, start + 3)).sum() * (1 / 12)
            scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        scaler.step(optimizer)
        scaler.update()
        if number != 2:
            scheduler.step()
        optimizer.zero_grad()

    (run,) = one_rank.run(spiky_steps, "single", clip)
    assert all(torch.equal(*pair) for pair in zip(run.parameters, model.parameters(), strict=True))


def step_with_an_idle_rank() -> float:
    """Run on every rank: make a first fp16 step with a single sample, and return its loss."""
    torch.manual_seed(8)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": vectors(1)["x"].float(), "y": vectors(1)["y"]}
    options: dict[str, Any] = {"precision": "fp16", "world": ab.World.from_environment()}
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **options) as engine:
        return engine.step(InMemory(batch)).loss


def test_fp16_with_an_idle_rank(two_ranks: Ranks) -> None:
    """In the first step, a rank without samples, which has scaled no loss, unscales and steps with the others."""
    first, second = two_ranks.run(step_with_an_idle_rank)
    assert first == second > 0
