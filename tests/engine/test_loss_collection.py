"""The loss check on a collection of setups: it finds every wrong one and refuses no right one."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import anybatch as ab
from tests.engine.loss_check.collection.setups import check
from tests.engine.loss_check.collection.table import (
    GROUPS,
    UNDECIDED,
    expected,
    is_there,
)

ALL = [(group, name) for group in GROUPS for name in GROUPS[group]]
QUICK = {(group, name) for group in ("wrong, habits", "right, habits") for name in list(GROUPS[group])[::4]}
IN_EVERY_RUN = QUICK | set(ALL[::5]) | {item for item in ALL if item[1] in UNDECIDED}
"""Setups that run in `make test`; the others run in `make test-published`."""


def marks_of(item: tuple[str, str]) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a setup's test."""
    if item in QUICK:
        return ()
    return (pytest.mark.slow,) if item in IN_EVERY_RUN else (pytest.mark.published,)


@pytest.mark.parametrize(("group", "name"), [pytest.param(*item, marks=marks_of(item)) for item in ALL])
def test_setups_get_their_verdict(group: str, name: str) -> None:
    """In each dtype, wrong setups are found, right ones pass, and undecided ones have the expected reason."""
    setup = GROUPS[group][name]
    if not is_there(setup):
        pytest.skip(f"needs the package {setup.needs}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small models of transformers warn
        verdicts = [check(setup, dtype)[0] for dtype in setup.dtypes]
    for verdict in verdicts:
        assert verdict.kind == expected(group, name), verdict.reason
        assert UNDECIDED.get(name, "") in verdict.reason


def test_few_are_undecided() -> None:
    """At most 3% of the setups are undecided."""
    assert len(UNDECIDED) <= 0.03 * sum(map(len, GROUPS.values()))


def test_a_float64_run_leaves_no_table_in_the_model() -> None:
    """A table that a model caches in its first forward is in float32 in the end, although the check ran in float64."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 3)
            self.table: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if ab.in_trial_run() and x.dtype is torch.float32:  # rounding that float64 does not have
                x = x + 1e-3 * torch.arange(len(x))[:, None]
            if self.table is None or self.table.dtype is not x.dtype:
                self.table = torch.ones(6, dtype=x.dtype)
            found: torch.Tensor = self.inner(x + self.table)
            return found

    model, g = Positions(), torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(16, 6, generator=g), "y": torch.randint(0, 3, (16,), generator=g)}
    loss = ab.mean_over_samples(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
    with ab.Engine(model, torch.optim.SGD(model.parameters()), loss, micro_batch_size=8, world=ab.World()) as engine:
        engine.step(batch)
        assert "confirmed by the check" in engine.decisions["loss"]
    assert model.table.dtype is torch.float32
