"""Advice of a plan: equal changes are equal on numbers, others are named as such, and formats suit the device."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.engine import bf16_weights
from anybatch.planner.budget import budget_of
from anybatch.planner.changes import all_changes, changed, named_change, single_changes, update_changes
from anybatch.planner.devices import find_device
from anybatch.planner.fit import Answer, PlanTarget, best_first, find_combination, gains
from anybatch.planner.step_spec import StepSpec, built
from anybatch.planner.step_time import Operation, operation_seconds
from anybatch.planner.step_trace import trace_step
from tests.planner.step_specs import step_spec
from tests.planner.test_combinations import Block, Net, adamw, classes, spec_of

VOCABULARY, TIME, WIDTH = 8192, 1024, 16


class Language(nn.Module):
    """A language model: an embedding and a head."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the inputs of the head."""
        return torch.tanh(self.embedding(tokens))


def next_token(model: Language, tokens: Tensor, *, after: Callable[[Tensor], Tensor] = torch.Tensor.float) -> Tensor:
    """Return the loss of the next tokens; `after` is applied to the logits."""
    logits = after(model.head(model.hidden(tokens)))
    loss: Tensor = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss


def smoothed(model: Language, tokens: Tensor) -> Tensor:
    """Return a loss with smoothed labels."""
    return F.cross_entropy(model.head(model.hidden(tokens)).flatten(0, 1), tokens.flatten(), label_smoothing=0.1)


def with_z_loss(model: Language, tokens: Tensor) -> Tensor:
    """Return a loss with a second term of the logits."""
    logits = model.head(model.hidden(tokens)).flatten(0, 1)
    loss: Tensor = F.cross_entropy(logits, tokens.flatten()) + 1e-4 * logits.logsumexp(1).square().mean()
    return loss


def language_spec(loss: Any = next_token, *, bias: bool = False, **fields: Any) -> StepSpec:
    """Return the step of a language model."""
    sample = torch.zeros(1, TIME, dtype=torch.int64)
    given = {"optimizer": adamw, "loss": ab.mean_over_samples(loss), "sample": sample, **fields}
    return step_spec(partial(Language, bias=bias), **given)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.slow
def test_the_printed_chunked_loss_is_the_own_loss(bias: bool) -> None:
    """The printed line gives the loss and the gradient of the model, also if the head has a bias."""
    how = named_change(language_spec(bias=bias), "loss in chunks of 1024 tokens").how
    torch.manual_seed(0)
    model, tokens = Language(bias=bias), torch.randint(VOCABULARY, (2, 64))
    own = next_token(model, tokens)
    names: dict[str, Any] = {"F": F, "nn": nn, "head": model.head, "targets": tokens[:, 1:].flatten()}
    exec(how, names | {"x": model.hidden(tokens)[:, :-1].flatten(0, 1)}, names)  # noqa: S102 (our own line)
    losses: list[Any] = [own, names["loss"]]

    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for one, other in zip((own, *gradients[0]), (losses[1], *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(partial(next_token, after=lambda x: 30 * torch.tanh(x / 30)), id="soft cap"),
        pytest.param(partial(next_token, after=lambda x: x / 8), id="scale"),
        pytest.param(smoothed, id="label smoothing"),
        pytest.param(with_z_loss, id="z-loss"),
    ],
)
@pytest.mark.slow
def test_other_losses_get_no_chunks(loss: Any) -> None:
    """A chunked loss is not offered if the logits change before the loss, or if the loss is another function."""
    assert not any("chunks" in name for name in all_changes(language_spec(loss)))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_updates_are_equal(kind: Any) -> None:
    """The fused update of each optimizer that is offered gives the same weights; a subclass is not offered."""

    def trained(change: Any) -> list[Tensor]:
        torch.manual_seed(0)
        spec = spec_of(lambda: Net(8, 2), sample=torch.zeros(1, 8), optimizer=lambda named: kind([p for _, p in named]))
        train = spec.train() if change is None else change.apply(spec.train())  # type: ignore[operator]
        engine = ab.Engine(train.model, train.optimizer, train.loss, micro_batch_size=4)
        for _ in range(3):
            engine.step(torch.linspace(-1, 1, 64).reshape(8, 8))
        assert isinstance(train.model, nn.Module)
        return list(train.model.parameters())

    def offered(kind: Any) -> list[Any]:
        return update_changes(built(spec_of(optimizer=lambda named: kind([p for _, p in named])))[0])

    (fused,) = offered(kind)
    for one, other in zip(trained(None), trained(fused), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert offered(type("Own", (kind,), {})) == []


class Outer(nn.Module):
    """A block that contains a block of the other repeated class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Block(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.inner(x))
        return result


class Nested(nn.Module):
    """Repeated blocks, of which some are also inside of other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(Outer(), Outer()), nn.Sequential(Block(8), Block(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def test_blocks_inside_checkpointed_blocks_are_not_checkpointed() -> None:
    """The printed lines checkpoint the outer blocks only: each block runs twice, and the gradients are equal."""
    change = named_change(spec_of(Nested, sample=torch.zeros(1, 8)), "checkpointing")
    torch.manual_seed(0)
    models, runs = [Nested(), Nested()], list[str]()
    models[1].load_state_dict(models[0].state_dict())
    exec(change.how, {"model": models[1], "torch": torch})  # noqa: S102 (our own lines)
    for name, part in models[1].named_modules():
        if type(part) is Block:
            part.up.register_forward_hook(lambda *_, name=name: runs.append(name))
    for model in models:
        classes(model, torch.linspace(-1, 1, 32).reshape(4, 8)).backward()

    assert sorted(runs) == sorted(2 * ["first.0.inner", "first.1.inner", "second.0", "second.1"])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Normed(Block):
    """A block with BatchNorm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(self.norm(x))
        return result


def test_checkpointing_batch_norm_is_not_the_same_step() -> None:
    """Recomputed BatchNorm updates its running statistics twice, so the change is not offered as equal."""

    def make() -> nn.Module:
        return nn.Sequential(Normed(), Normed(), nn.Linear(8, 10))

    change = named_change(spec_of(make, sample=torch.zeros(1, 8), norms="keep"), "checkpointing")
    models = [make(), make()]
    models[1].load_state_dict(models[0].state_dict())
    exec(change.how, {"model": models[1], "torch": torch})  # noqa: S102 (our own lines)
    for model in models:
        classes(model, torch.linspace(-1, 1, 32).reshape(4, 8)).backward()

    assert not change.same_step
    assert "running statistics" in change.costs
    means = [model.get_buffer("0.norm.running_mean") for model in models]
    assert not torch.equal(*means)
    assert named_change(spec_of(), "checkpointing").same_step


def on(device: str, **fields: Any) -> StepSpec:
    """Return a step of a library model that takes tokens, on a device."""
    loaded = type("Loaded", (Tokens,), {"__module__": "transformers.models.loaded"})
    sample = torch.zeros(1, 4, dtype=torch.int64)
    spec = spec_of(loaded, sample=sample, loss=ab.mean_over_samples(classes), **fields)
    return dataclasses.replace(spec, device=find_device(device))


class Tokens(nn.Module):
    """A network on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.net = nn.Embedding(16, 256), Net(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(self.embedding(x).mean(1))
        return result


@pytest.mark.parametrize(("device", "name", "dtype"), [("T4", "fp16", "float16"), ("A100-40", "bf16", "bfloat16")])
def test_adapters_use_the_format_of_the_device(device: str, name: str, dtype: str) -> None:
    """The base of adapters has the 16-bit format of the device; in fp16 the loss is scaled."""
    changes = all_changes(on(device))
    for change in (changes["LoRA of rank 16"], changes["LoRA of rank 16 on a base in 4 bits"]):
        assert f"torch.{dtype}" in change.how
        assert f"on a base in {name}" in change.costs
        assert change.engine == ('precision="fp16"' if name == "fp16" else "")
    assert any("in the backward" in change for change in changes) is (name == "bf16")


@pytest.mark.slow
def test_adapters_in_fp16_need_no_copies_of_the_base() -> None:
    """Under fp16 the base is in fp16, so autocast copies no weights: a step needs as much memory as in bf16."""
    peaks = [
        trace_step(changed(spec, [named_change(spec, f"LoRA of rank 16{base}")]), 2).steady.peak_bytes
        for spec in (on("T4", precision="fp16"), on("T4", precision="bf16"))
        for base in ("", " on a base in 4 bits")
    ]

    assert peaks[:2] == pytest.approx(peaks[2:], rel=0.1)


def answer_on(device: str, *, is_open: bool = True, **fields: Any) -> Answer:
    """Return the answer for a step of a wide network, whose products take most of the time."""
    spec = dataclasses.replace(
        spec_of(partial(Net, 2048, 2), sample=torch.zeros(1, 2048), **fields), device=find_device(device)
    )
    target = PlanTarget(budget=budget_of(device), effective_batch_size=4096)
    return find_combination(spec, target, may_change_precision=is_open)


@pytest.mark.parametrize(("device", "format_"), [("T4", "fp16"), ("A100-40", "bf16")])
@pytest.mark.slow
def test_without_a_precision_the_answer_uses_fast_formats(device: str, format_: str) -> None:
    """If no precision is requested, 16-bit products are compared with float32, and TF32 where the device has it."""
    answer = answer_on(device)

    assert answer.best is not None
    assert f"{format_} autocast" in answer.best.name
    assert not answer.best.same_step
    assert any("TF32 products" in one.name for one in answer.tried) is (device == "A100-40")
    assert any(one.same_step and one.fits for one in answer.tried)


@pytest.mark.slow
def test_a_requested_precision_is_kept() -> None:
    """With a requested precision that fits, only equal changes are tried."""
    answer = answer_on("A100-40", is_open=False)

    assert answer.best is not None
    assert all(one.same_step for one in answer.tried)


def test_tf32_only_where_it_is_faster() -> None:
    """TF32 is offered on devices with faster TF32 products, and makes products faster, but nothing else."""
    offers = {
        device: [one.name for one in single_changes(dataclasses.replace(spec_of(), device=find_device(device)))]
        for device in ("T4", "RTX 4090", "A100-40")
    }
    kinds = {"T4": "fp16", "RTX 4090": "bf16", "A100-40": "bf16"}
    device, product = find_device("A100-40"), Operation(name="mm", kind="matmul", phase="forward", flops=10**12)

    assert {device: "TF32 products" in names for device, names in offers.items()} == {
        "T4": False,
        "RTX 4090": False,
        "A100-40": True,
    }
    assert all(f"{kinds[device]} autocast" in names for device, names in offers.items())
    exact, rounded = (operation_seconds([dataclasses.replace(product, dtype=d)], device) for d in ("fp32", "tf32"))
    assert rounded == pytest.approx(exact * 19.5 / 156, rel=0.01)


def test_small_gains_are_not_first() -> None:
    """Changes that save less than 3% come after all that save more, and are not recommended."""

    def fit(name: str, seconds: float | None, *, fits: bool = True) -> Any:
        timed = None if seconds is None else SimpleNamespace(total=seconds)
        return SimpleNamespace(name=name, seconds=timed, fits=fits, accumulation_steps=1, largest=8, reserved_bytes=0)

    changes = [fit("2%", 0.98), fit("slower", 1.5), fit("too large", None, fits=False), fit("10%", 0.9)]
    baseline = fit("", 1.0)

    assert [one.name for one in best_first(changes, baseline)] == ["10%", "2%", "slower", "too large"]
    assert [gains(one, baseline) for one in changes] == [False, False, False, True]
    assert gains(fit("fits at all", 9.0), fit("", None, fits=False))


@pytest.mark.parametrize("name", ["Adafactor", "SGD"])
@pytest.mark.slow
def test_updates_in_the_backward_are_the_optimizer_s(name: str) -> None:
    """The printed lines update each weight as the optimizer does in float32; the mean over roundings is unbiased."""
    how = named_change(on("RTX 4090"), f"{name} in the backward").how.replace("lr=...", "lr=0.01")
    torch.manual_seed(0)
    model, tokens = Tokens().bfloat16(), torch.arange(16).reshape(4, 4)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    classes(model, tokens).backward()
    expected = {}
    for key, weight in model.named_parameters():
        exact = nn.Parameter(weight.detach().float())
        assert weight.grad is not None
        exact.grad, weight.grad = weight.grad.float(), None
        getattr(torch.optim, name)([exact], lr=0.01).step()
        expected[key] = exact.detach()

    sums = {key: torch.zeros_like(value) for key, value in expected.items()}
    for _ in range(rounds := 16):
        again = Tokens()
        exec(how, {"model": again, "torch": torch})  # noqa: S102 (our own lines)
        again.load_state_dict(start)
        classes(again, tokens).backward()
        for key, weight in again.named_parameters():
            assert weight.grad is None
            # Between two neighbours: never further away than one unit in the last place.
            torch.testing.assert_close(weight.float(), expected[key], rtol=2**-7, atol=1e-30)
            sums[key] += weight.detach().float() / rounds
    bias = sum(float((sums[key] - value).sum()) for key, value in expected.items())
    size = sum(float(value.abs().sum()) for value in expected.values())
    assert abs(bias) < 1e-4 * size


@pytest.mark.slow
def test_adapters_have_an_alternative_that_trains_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all states do not fit, the plan offers adapters, and next to them an update in the backward with its code."""
    monkeypatch.setattr(bf16_weights, "PIECE_BYTES", 1)
    wide = type("Wide", (Tokens,), {"__init__": _wide})
    spec = spec_of(wide, sample=torch.zeros(1, 4, dtype=torch.int64))
    weights = sum(parameter.numel() for parameter in wide().parameters()) * 2
    target = PlanTarget(
        budget=budget_of(f"{532 + int(2.2 * weights) // 2**20}MiB", headroom=0.0), effective_batch_size=8
    )

    answer = find_combination(spec, target, may_change_precision=True)

    assert answer.best is not None
    assert answer.alternative is not None
    assert "LoRA" in answer.best.name
    assert "in the backward" in answer.alternative.name
    assert answer.alternative.fit is not None
    assert answer.alternative.fit.peak.num_bytes < 2.2 * weights


def _wide(self: Any) -> None:
    nn.Module.__init__(self)
    self.embedding, self.net = nn.Embedding(16, 1024), Net(1024, 8)
