"""Combinations of changes that make a step fit, and the limits of a plan."""

import dataclasses
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import anybatch as ab
from anybatch.cli.command import plain
from anybatch.diagnostics.memory_report import record_memory
from anybatch.engine import bf16_weights
from anybatch.engine.bf16_weights import Bf16Weights
from anybatch.errors import CannotPlanError, UserError
from anybatch.planner import fit
from anybatch.planner.budget import budget_of
from anybatch.planner.changes import (
    Change,
    all_changes,
    changed,
    named_change,
    optimizer_name,
)
from anybatch.planner.devices import DEVICES, devices_of
from anybatch.planner.fit import (
    Answer,
    Combination,
    PlanTarget,
    find_combination,
    simplest_of_the_fastest,
)
from anybatch.planner.plan import Plan, make_plan, values_of
from anybatch.planner.stand_ins import AdamW8bit, FourBitLinear, LoraLinear, adapter_lines, linear_layers
from anybatch.planner.step_spec import StepSpec, built
from anybatch.planner.step_time import StepSeconds
from anybatch.planner.step_trace import trace_step
from tests.planner.step_specs import step_spec

WIDTH, MIB = 32, 2**20


class Block(nn.Module):
    """Two layers and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(x)))
        return x + added


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def classes(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a mean over samples."""
    return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.int64))


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW([parameter for _, parameter in named])


def spec_of(make: Any = Net, **fields: Any) -> StepSpec:
    """Return a step of a small network."""
    given = {"optimizer": adamw, "loss": ab.mean_over_samples(classes), "sample": torch.zeros(1, WIDTH), **fields}
    return step_spec(make, **given)


def answer_for(device: str, size: int = 4096, **fields: Any) -> Answer:
    """Return the best combination for a device of this memory (including libraries)."""
    target = PlanTarget(budget=budget_of(device, headroom=0.0), effective_batch_size=size)
    return find_combination(spec_of(**fields), target, may_change_precision=False)


@pytest.mark.slow
def test_a_step_that_fits_is_not_changed() -> None:
    """If the step fits, only changes that compute the same step are tried, and the fastest that fits is the answer."""
    answer = answer_for("600MiB", 64)

    assert answer.best is not None
    assert answer.best.same_step
    assert all(one.same_step for one in answer.tried)
    fitting = [one.seconds for one in answer.tried if one.seconds is not None]
    assert answer.best.seconds is not None
    assert answer.best.seconds <= 1.03 * min(fitting)
    near = [one for one in answer.tried if one.seconds is not None and one.seconds <= 1.03 * min(fitting)]
    assert len(answer.best.changes) == min(len(one.changes) for one in near)
    assert [one.why for one in answer.tried if one.fits].count("") == 1


@pytest.mark.slow
def test_levels_are_tried_in_order() -> None:
    """If weights and state alone do not fit, 8-bit state is tried before adapters; each rejected one has a reason."""
    wide = partial(Net, 256)
    stays = 16 * sum(parameter.numel() for parameter in wide().parameters())
    device = f"{532 + (stays * 12 // 16) // MIB}MiB"

    answer = answer_for(device, 8, make=wide, sample=torch.zeros(1, 256))

    assert answer.best is not None
    assert answer.best.changes[0].name == "8-bit AdamW"
    assert not any("LoRA" in one.name for one in answer.tried)
    assert all(one.why for one in answer.tried if not one.fits)


def test_changes_without_gain_are_not_proposed() -> None:
    """Within 3% of the fastest, the combination with the fewest changes wins, then the one with the fewest lines."""
    short, long = (Change(name=name, how=how) for name, how in (("short", "a"), ("long", "a\nb")))
    made = partial(Combination, fit=None)
    both, few, other = made(changes=(short, long)), made(changes=(short,)), made(changes=(long,))

    def chosen(*seconds: float) -> Combination:
        timed = [
            dataclasses.replace(one, seconds=value) for one, value in zip((both, few, other), seconds, strict=True)
        ]
        return simplest_of_the_fastest(timed)

    assert chosen(1.0, 1.02, 1.01).changes == (short,)
    assert chosen(1.0, 1.04, 1.02).changes == (long,)
    assert chosen(1.0, 1.04, 1.05).changes == (short, long)


@pytest.mark.slow
def test_the_lines_to_write_run() -> None:
    """The printed lines run unmodified: they keep the gradient and the planned memory."""
    change = named_change(spec_of(), "checkpointing")
    gradients, models = [], [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    exec(change.how, {"model": models[1], "torch": torch})  # noqa: S102 (our own lines)
    for model in models:
        model.double()
        classes(model, torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    def written() -> nn.Module:
        model = Net()
        exec(change.how, {"model": model, "torch": torch})  # noqa: S102 (our own lines)
        return model

    planned, by_hand = (trace_step(one, 64).steady for one in (changed(spec_of(), [change]), spec_of(written)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert planned.peak_bytes == by_hand.peak_bytes


def test_an_adapter_adds_a_product() -> None:
    """A LoRA adapter adds twice the product of its matrices to the layer, and initially adds nothing."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).double()
    adapter = LoraLinear(layer, 2, (6, 4)).double()
    x = torch.randn(3, 6, dtype=torch.float64)

    before = adapter(x)
    nn.init.normal_(adapter.up.weight)

    torch.testing.assert_close(before, layer(x), rtol=0, atol=0)
    expected = layer(x) + 2 * x @ adapter.down.weight.T @ adapter.up.weight.T
    torch.testing.assert_close(adapter(x), expected, rtol=1e-12, atol=1e-12)


def test_stand_ins_have_the_published_sizes() -> None:
    """8-bit state takes 2 bytes a value and two scales per 256 values; a 4-bit weight takes 4.127 bits."""
    weight = nn.Parameter(torch.zeros(1024, 64))
    weight.grad = torch.zeros_like(weight)
    optimizer = AdamW8bit([weight])
    optimizer.step()
    state = sum(value.nbytes for value in optimizer.state[weight].values())
    layer = FourBitLinear(nn.Linear(512, 512, bias=False))

    assert state == 2 * (weight.numel() + 4 * weight.numel() // 256)
    bits = 8 * sum(parameter.nbytes for parameter in layer.parameters()) / 512**2
    assert bits == pytest.approx(4.127, abs=0.001)


@pytest.mark.slow
def test_changes_do_not_modify_a_given_model() -> None:
    """Planning adapters or bf16 weights for an existing model changes none of its tensors, dtypes or flags."""
    model = Loaded()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    plan = ab.plan(
        model,
        adamw,
        ab.mean_over_samples(classes),
        torch.zeros(1, WIDTH),
        device="24GiB",
        effective_batch_size=8,
        changes=["LoRA of rank 4 on a base in 4 bits", "checkpointing"],
        proposals=False,
    )

    assert [one.name for one in plan.requested] == ["LoRA of rank 4 on a base in 4 bits", "checkpointing"]
    assert plan.precision == "bf16"  # float32 inputs meet bf16 layers
    assert plan.requested[0].engine == 'precision="bf16"'
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("micro", [None, 8])
@pytest.mark.slow
def test_given_batches_are_planned_to_the_byte(micro: int | None) -> None:
    """The planned peak on a CPU is exact, in one micro-batch and in eight."""
    size = 64
    loss = ab.mean_over_samples(classes)
    plan = ab.plan(
        Net,
        adamw,
        loss,
        torch.zeros(1, WIDTH),
        device="cpu:1GiB",
        effective_batch_size=size,
        micro_batch_size=micro,
        proposals=False,
    )
    model = Net()
    engine = ab.Engine(model, adamw, loss, micro_batch_size=plan.baseline.micro_batch_size, check_loss=False)
    batch = torch.zeros(size, WIDTH)
    engine.step(batch)
    with record_memory(engine) as recording:
        engine.step(batch)

    assert plan.baseline.micro_batch_size == (micro or size)
    # Each untraced micro-batch keeps its loss, a scalar, until the end of the step.
    untraced = max(0, plan.accumulation_steps - 2)
    assert plan.baseline.peak.num_bytes + 4 * untraced == recording.report.timeline.peak_bytes


@pytest.mark.parametrize("way", ["split", "stochastic"])
@pytest.mark.slow
def test_bf16_weights_match_the_plan(way: Bf16Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a step with bf16 weights and no float32 copies is exact, and below that with copies."""
    monkeypatch.setattr(bf16_weights, "PIECE_BYTES", 1)
    loss, sample = ab.mean_over_samples(classes), torch.zeros(1, 256, dtype=torch.bfloat16)
    name = {"split": "bf16 weights, split", "stochastic": "bf16 weights, rounded stochastically"}[way]
    spec = spec_of(partial(Net, 256), sample=sample, profile="cpu")
    planned, copied = (
        trace_step(changed(spec, [named_change(spec, one)]), 2).steady.peak_bytes for one in (name, "bf16 weights")
    )
    engine = ab.Engine(Net(256).bfloat16(), adamw, loss, micro_batch_size=2, bf16_weights=way, check_loss=False)
    batch = sample.expand(4, 256).clone()
    engine.step(batch)
    with record_memory(engine) as recording:
        engine.step(batch)

    assert planned == recording.report.timeline.peak_bytes
    assert planned < copied


class Loaded(Net):
    """A network whose library can load it in 4 bits."""


Loaded.__module__ = "transformers.models.loaded"


def level_names(precision: str) -> list[list[str]]:
    """Return the changes of each level, in order."""
    spec = spec_of(Loaded, precision=precision)
    found = fit._levels(spec, all_changes(spec), ())  # noqa: SLF001 (the order)
    return [[one.name for one in level] for levels in found for level in levels]


def test_bf16_weights_are_ordered_by_cost() -> None:
    """Under bf16: float32 weights in two halves, then 8-bit state, then stochastic rounding, then adapters."""
    assert level_names("bf16") == [
        [],
        ["bf16 weights, split"],
        ["8-bit AdamW"],
        ["bf16 weights, rounded stochastically"],
        ["bf16 weights, rounded stochastically", "8-bit AdamW"],
        ["bf16 weights, rounded stochastically", "Adafactor"],
        ["LoRA of rank 16"],
        ["LoRA of rank 16 on a base in 4 bits"],
    ]
    assert not any("bf16" in name for level in level_names("fp32") for name in level)


def written_layers(model: Any) -> list[str]:
    """Return the names of the layers that the written lines find in a model."""
    lines = adapter_lines(model, 2, {})
    names: dict[str, Any] = {"model": model, "torch": torch}
    exec("\n".join(lines[1:-2]), names)  # noqa: S102 (our own lines)
    assert "target_modules=layers" in lines[-2]
    found: list[str] = names["layers"]
    return found


class Attending(nn.Module):
    """A layer with torch's own attention, which reads a linear layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x, need_weights=False)[0]
        raised: Tensor = self.up(x + mixed)
        return raised


def test_adapters_only_for_called_layers() -> None:
    """Adapters are written only for layers that are called, not for one whose weight is only read."""
    spec = spec_of(
        lambda: nn.Sequential(*(Attending() for _ in range(3)), nn.Linear(WIDTH, 10)), sample=torch.zeros(1, 4, WIDTH)
    )
    change = named_change(spec, "LoRA of rank 2")

    ready, _ = built(changed(spec, [change]))
    adapters = [name for name, one in ready.trained.model.named_modules() if isinstance(one, LoraLinear)]  # type: ignore[union-attr]
    assert adapters == written_layers(built(spec)[0].trained.model) == ["0.up", "1.up", "2.up"]


class Deep(nn.Module):
    """A block whose linear layers have common names, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def test_written_layers_are_the_planned_ones() -> None:
    """The written lines find exactly the layers of the plan, also below a block, and no layer outside of the blocks."""
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList(Deep() for _ in range(3)), "head": nn.ModuleDict({"proj": nn.Linear(WIDTH, 4)})}
    )

    planned = {id(layer) for _, _, layer in linear_layers(model)}
    assert written_layers(model) == [name for name, one in model.named_modules() if id(one) in planned]
    assert len(planned) == 12


@pytest.mark.parametrize(("link", "added"), [(1e9, True), (1e15, False)])
def test_gathers_count_where_nothing_hides_them(link: float, added: bool) -> None:
    """FSDP's communication takes longer than the compute that hides it on a slow link, but not on a fast one."""
    device = dataclasses.replace(DEVICES[0], link_bytes_per_second=link)
    step = dataclasses.replace(spec_of(precision="bf16"), world_size=4)
    computing = StepSeconds(micro_batches=2e-3, per_step=0.0, reduction=0.0)
    two = SimpleNamespace(accumulation_steps=2)
    found = fit._gathering_seconds(step, two, computing, 4_000_000, device)  # type: ignore[arg-type]  # noqa: SLF001

    expected = 2 * (2 * 4e6 * 3 / 4 / link - 1e-3) if added else 0.0
    assert found == pytest.approx(expected)


class Grouped(nn.Module):
    """Multiplies each row by the matrix of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH, 16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.full((4,), len(x), dtype=torch.int32)
        return torch._grouped_mm(x, self.weight, offs=ends)  # noqa: SLF001 (its only name in some versions)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no product of groups")
def test_products_of_groups_are_planned() -> None:
    """A mixture of experts can be planned in float32 too, with grouped products and gradients of the right sizes."""
    trace = trace_step(spec_of(Grouped, profile="cpu"), 8)

    sizes = [one.num_bytes for one in trace.steady.allocations if "_grouped_mm" in one.operation]
    assert 8 * 16 * 4 in sizes
    assert 4 * WIDTH * 16 * 4 in sizes


class Picky(nn.Module):
    """Keeps some rows, depending on their values."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.nonzero(x[:, 0])
        return x[kept[:, 0]]


def test_a_refusal_names_module_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    """An error for a model that needs real data names the module and the line, and torch logs nothing."""
    with pytest.raises(CannotPlanError, match=r"in 1 \(Picky\) at test_combinations.py:\d+, `kept = torch.nonzero"):
        trace_step(spec_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Picky(), nn.Linear(WIDTH, 10))), 2)

    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_compiled_models_have_a_note() -> None:
    """A compiled model is planned with a note; others without."""

    def compiled() -> nn.Module:
        model = nn.Linear(WIDTH, 10)
        model._compiled_call_impl = model._call_impl  # noqa: SLF001 (as `compile` does)
        return model

    assert len(trace_step(spec_of(compiled), 2).notes) == 1
    assert trace_step(spec_of(), 2).notes == ()


def _by_shape(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    parameters = [parameter for _, parameter in named]
    groups = [[one for one in parameters if (one.dim() > 1) is wide] for wide in (True, False)]
    assert all(groups), "a matrix and a vector are both there"
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


def test_optimizers_that_filter_get_all_parameters() -> None:
    """An optimizer function that filters parameters gets all parameters of the model; the lines name its class."""
    ready, _ = built(spec_of(optimizer=_by_shape))
    fused = named_change(spec_of(optimizer=_by_shape), "fused optimizer")

    assert optimizer_name(ready.trained) == "SGD"
    assert "torch.optim.SGD" in fused.how


def test_unknown_changes_are_refused() -> None:
    """An unknown change raises."""
    with pytest.raises(UserError):
        named_change(spec_of(), "magic")


def planned(device: str = "H100") -> Plan:
    """Return a plan with its answer."""
    return make_plan(spec_of(), budget_of(device), 64, name="net", fit=True)


@pytest.mark.slow
def test_a_plan_is_json() -> None:
    """A plan with its answer can be written as JSON, which agrees with its text."""
    plan = planned()

    value = json.loads(json.dumps(plain(values_of(plan))))

    assert value["fits"] is True
    assert value["answer"]["micro_batch_size"] == plan.baseline.micro_batch_size
    assert value["answer"]["how"] in "\n".join(line[2:] for line in str(plan).splitlines())
    assert {one["why_not"] for one in value["tried"]} >= {None}


def test_own_devices_come_from_a_file(tmp_path: Path) -> None:
    """Devices are read from a file, with missing rates taken from those in 32 bits; an invalid row raises."""
    file = tmp_path / "devices.json"
    row = {"name": "Mine", "memory": "24GiB", "teraflops": {"fp32": 30}, "gigabytes_per_second": 900}
    file.write_text(json.dumps([row]))

    (device,) = devices_of(file)

    assert (device.name, device.memory_bytes, device.peak("bf16")) == ("Mine", 24 * 2**30, 30e12)
    assert budget_of(device).device is device
    file.write_text(json.dumps([{"name": "Mine"}]))
    with pytest.raises(UserError):
        devices_of(file)


class Caching(nn.Module):
    """Stores a mask, sums and its outputs in attributes, a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(WIDTH, 10), nn.BatchNorm1d(10), nn.Dropout(0.1)
        self.mask: Tensor | None = None
        self.seen: list[Tensor] = []
        self.last: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = (torch.arange(WIDTH) % 3 > 0).to(x.dtype)
        self.seen.append(x.detach().sum())
        out: Tensor = self.drop(self.norm(self.layer(x * self.mask)))
        self.last["out"] = out  # with its graph, like a key-value cache
        return out


@pytest.mark.slow
def test_plans_do_not_change_training() -> None:
    """Training gives bitwise the same weights if plans are made before, between and after its steps."""

    def trained(*, plans: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Caching()
        engine = ab.Engine(model, adamw, ab.mean_over_samples(classes), micro_batch_size=4, norms="keep")
        batch = torch.randn(8, WIDTH)
        for number in range(3):
            if plans and number != 1:
                sample = torch.zeros(1, WIDTH)
                options: dict[str, Any] = {"device": "24GiB", "effective_batch_size": 8, "proposals": False}
                ab.plan(model, adamw, ab.mean_over_samples(classes), sample, **options)
            engine.step(batch)
        return [*model.state_dict().values(), *model.seen, *model.last.values()]

    for one, other in zip(trained(plans=False), trained(plans=True), strict=True):
        assert torch.equal(one, other)


class TiedBlock(nn.Module):
    """A block that holds one layer under two names, and another block-wide layer once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)


def test_a_layer_with_two_names_gets_one_adapter() -> None:
    """A layer that its block holds twice is listed once, so that its adapter is not counted twice."""
    blocks = nn.ModuleList(TiedBlock() for _ in range(3))

    assert [path for _, path, _ in linear_layers(blocks)] == 3 * ["first", "other"]
