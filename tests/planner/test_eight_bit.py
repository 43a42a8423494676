"""8-bit optimizers are proposed where they are installed, and planned with the states that they have."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import anybatch as ab
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.planner.budget import budget_of
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.plan import make_plan
from anybatch.planner.proposals import eight_bit as module
from anybatch.planner.proposals import ranking
from anybatch.planner.proposals.changes import possible_changes
from anybatch.planner.proposals.eight_bit import StatesByFormula, eight_bit
from anybatch.planner.proposals.ranking import PlanTarget, fit_of
from anybatch.planner.trace.step_trace import trace_step
from tests.planner.test_plan import Net, adamw, task_of_classes

BITSANDBYTES = '''
import torch

class AdamW8bit(torch.optim.Optimizer):
    """Keeps one byte per element, twice; takes what the real one takes."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {name: torch.zeros_like(p, dtype=torch.uint8) for name in ("state1", "state2")}
                p.add_(p.grad, alpha=-group["lr"])
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that puts stand-ins for libraries where they are found, in the place of real ones."""
    before = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in LIBRARIES}

    def put(**sources: str) -> None:
        monkeypatch.setattr(module, "_has_part", lambda package, part: part == "optim" and package in sources)
        for package, source in sources.items():
            (tmp_path / package / "optim").mkdir(parents=True)
            (tmp_path / package / "__init__.py").write_text("")
            (tmp_path / package / "optim" / "__init__.py").write_text(source)
        for name in before:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]:
        del sys.modules[name]
    sys.modules.update(before)


LIBRARIES = ("torchao", "bitsandbytes")


def names_of(make: OptimizerFunction = adamw) -> list[str]:
    """Return what is proposed in the place of an optimizer."""
    return [one.name for one in eight_bit(make)]


def bytes_of(optimizer: Optimizer) -> int:
    """Return what an optimizer's states hold; whatever shares memory counts once, and single numbers do not."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    parts = [part for value in tensors for part in plain_tensors(value)]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def plain_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a state consists of."""
    if isinstance(value, tuple | list):
        return [part for one in value for part in plain_tensors(one)]
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [value] if isinstance(value, torch.Tensor) and value.dim() else []


def test_nothing_is_installed(install: Callable[..., None]) -> None:
    """Without a library there is no proposal."""
    install()

    assert names_of() == []
    assert [one.name for one in possible_changes(task_of_classes()) if "8-bit" in one.name] == []


def test_what_is_installed(install: Callable[..., None]) -> None:
    """Each library that is there makes a proposal; what is planned by formula says so."""
    install(torchao="", bitsandbytes=BITSANDBYTES)

    assert names_of() == ["8-bit AdamW (torchao, state by formula)", "8-bit AdamW (bitsandbytes)"]
    assert [one.how.partition("(")[0] for one in eight_bit(adamw)] == [
        "torchao.optim.AdamW8bit",
        "bitsandbytes.optim.AdamW8bit",
    ]


def test_a_library_that_does_not_load(install: Callable[..., None]) -> None:
    """It is as good as none, and loggers are as they were."""
    install(bitsandbytes="raise RuntimeError('no such processor')")
    before = logging.getLogger("bitsandbytes").level

    assert names_of() == []
    assert logging.getLogger("bitsandbytes").level == before


@pytest.mark.parametrize(
    "make",
    [
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], amsgrad=True),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], maximize=True),
    ],
    ids=["SGD", "amsgrad", "maximize"],
)
def test_what_has_no_counterpart(install: Callable[..., None], make: OptimizerFunction) -> None:
    """Only for Adam and AdamW without further options there is something to propose."""
    install(torchao="", bitsandbytes=BITSANDBYTES)

    assert names_of(make) == []


def test_groups_are_kept(install: Callable[..., None]) -> None:
    """Learning rates, betas, eps and weight decay of every group are those of the optimizer that is replaced."""
    install(bitsandbytes=BITSANDBYTES)

    def grouped(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        first, *rest = [parameter for _, parameter in named]
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5, "weight_decay": 0.0}]
        groups += [{"params": rest}] if rest else []
        return torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.8, 0.9), eps=1e-6)

    made = eight_bit(grouped)[0].make(Net().named_parameters())

    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.01]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in made.param_groups)


def test_states_by_formula() -> None:
    """A byte per element, a scale per 256, and a table, twice; small and odd parameters keep float32."""
    sizes = [100, 4095, 4096, 4097, 8192, 256 * 1000]
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = StatesByFormula([{"params": parameters}])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    by_hand = sum(2 * (4 * n if n < 4096 or n % 256 else n + 4 * (n // 256) + 4 * 256) for n in sizes)
    assert bytes_of(optimizer) == by_hand


def test_it_is_planned_anew(install: Callable[..., None]) -> None:
    """Each proposal is planned with its own states, and more fits where states are what there is most of."""
    install(torchao="", bitsandbytes=BITSANDBYTES)
    spec, budget = task_of_classes(4, 128), budget_of("550MiB", headroom=0.0)
    num_elements = sum(parameter.numel() for parameter in Net(4, 128).parameters())
    target = PlanTarget(budget=budget, effective_batch_size=100_000)

    plain = fit_of(spec, find_envelopes(spec, budget.usable_bytes), target)
    changes = [change for change in possible_changes(spec) if change.smaller_state]
    fits = [fit_of(one.spec, find_envelopes(one.spec, budget.usable_bytes), target) for one in changes]

    assert len(fits) == 2
    assert plain.peak.by_category["optimizer"] == pytest.approx(8 * num_elements, rel=0.01)
    for fit in fits:
        assert fit.peak.by_category["optimizer"] == pytest.approx(2 * num_elements, rel=0.1)
        assert fit.largest > plain.largest > 0


def test_it_is_planned_where_states_alone_are_too_large(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what stays from step to step does not fit, it is the change that would let it, and is planned alone."""
    install(torchao="")
    monkeypatch.setattr(ranking, "_dealt", lambda *_, **__: [])  # which takes long

    plan = make_plan(task_of_classes(4, 256), budget_of("562MiB", headroom=0.0), 64)

    assert not plan.as_it_is.fits
    assert [fit.name for fit in plan.changes if fit.fits] == ["8-bit AdamW (torchao, state by formula)"]
    assert "change that would fit: 8-bit AdamW (torchao, state by formula)" in str(plan)
    assert len(plan.changes) == 1


REAL = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}"))
    for name in LIBRARIES
]


@pytest.mark.parametrize("library", REAL)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_the_real_ones_hold_what_is_planned(library: str) -> None:
    """After a step of the engine the library's own optimizer holds as many bytes as the plan says."""
    spec = task_of_classes(2, 128)
    planned = next(one for one in possible_changes(spec) if library in one.name)
    booked = trace_step(planned.spec, 2).steady.allocations
    states = sum(one.num_bytes for one in booked if one.category == "optimizer")

    kind = importlib.import_module(f"{library}.optim").AdamW8bit
    model = Net(2, 128)
    engine = ab.Engine(
        model,
        partial(made, kind),
        spec.loss,
        micro_batch_size=2,
        check_loss=False,
    )
    with engine, torch.compiler.set_stance("force_eager"):  # a compiler leaves threads and variables behind
        before = [parameter.clone() for parameter in model.parameters()]
        engine.step(torch.randn(4, 128))
        after = list(model.parameters())

    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert bytes_of(engine.optimizer) == states


def made(kind: Callable[..., Optimizer], named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return an optimizer of that kind."""
    return kind([parameter for _, parameter in named], lr=1e-3)
