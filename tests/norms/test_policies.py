"""Norm policies are values with names; invalid ones are refused with the valid ones listed."""

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.errors import CompositionError, ParameterError, UserError
from anybatch.norms import Exact, Ghost
from anybatch.norms.layers import check_supported_layers
from tests.faults import sees
from tests.norms.residual import classify, network
from tests.raising import raises


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("group_norm", "replaces_layers"),
        ("ghost", "unknown_policy"),
        ("global", "unknown_policy"),
    ],
)
def test_other_names_are_refused(name: str, code: str) -> None:
    """A name that needs changed parameters points to the function for it; an unknown name lists the valid ones."""
    with raises(UserError, code):
        ab.Engine(
            model := network(),
            torch.optim.SGD(model.parameters()),
            ab.mean_over_samples(classify),
            norms=name,  # type: ignore[arg-type]
        )


def test_impossible_policies_are_refused() -> None:
    """Ghost batches of one sample and unknown methods of Exact are refused."""
    with raises(UserError, "group_too_small"):
        Ghost(1)
    with raises(UserError, "unknown_method"):
        Exact(method="detached")  # type: ignore[arg-type]


def test_unfit_layers_are_refused() -> None:
    """Layers without parameters, SyncBatchNorm on several ranks and InstanceNorm with statistics are refused."""
    lazy, synced = nn.Sequential(nn.LazyBatchNorm1d()), nn.Sequential(nn.SyncBatchNorm(3))
    with raises(ParameterError, "lazy_layer"):
        check_supported_layers(lazy, num_ranks=1, frozen=False)
    with raises(CompositionError, "synced_layer"):
        check_supported_layers(synced, num_ranks=2, frozen=False)
    with raises(CompositionError, "instance_statistics"):
        check_supported_layers(nn.InstanceNorm1d(3, track_running_stats=True), num_ranks=1, frozen=False)
    lazy(torch.randn(4, 3))
    check_supported_layers(lazy, num_ranks=2, frozen=False)
    check_supported_layers(synced, num_ranks=2, frozen=True)
    check_supported_layers(synced, num_ranks=1, frozen=False)


@sees(
    "a last micro-batch has one sample for BatchNorm",
    "src/anybatch/core/splitting.py",
    "even_parts(num_samples, len(parts))",
    "parts",
)
def test_no_micro_batch_has_a_single_sample() -> None:
    """Nine samples in micro-batches of 4 run as 3 + 3 + 3 with BatchNorm, and as 4 + 4 + 1 without."""
    for norm, sizes in ((torch.nn.BatchNorm1d(2), [3, 3, 3]), (torch.nn.LayerNorm(2), [4, 4, 1])):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = ab.mean_over_samples(lambda net, batch: net(batch).square().mean())
        with ab.Engine(model, optimizer, loss, micro_batch_size=4, norms="keep", check_loss=False) as engine:
            report = engine.step(torch.randn(9, 2))
        assert [unit.num_samples for unit in report.plan.units] == sizes
