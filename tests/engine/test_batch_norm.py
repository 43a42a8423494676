"""BatchNorm policies: their gradients and running statistics."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.errors import AnyBatchError, BatchSizeError, CompositionError, DataError, ParameterError
from anybatch.norms import Exact, Ghost, Policy, PolicyName
from anybatch.testing import relative_error
from tests.engine.cases import Batch, Split, arrive, vectors
from tests.engine.compatibility_cases import Keeping
from tests.norms.residual import buffers_of, classify, images, largest_difference, native, network
from tests.raising import raises
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
SPLITS: Mapping[str, Split] = {
    "1": Split(micro_batch_size=1),
    "4": Split(micro_batch_size=4),
    "3 steps": Split(accumulation_steps=3),
    "5, fixed": Split(micro_batch_size=5, deal="fixed"),
    "2, uneven shares": Split(micro_batch_size=2, brought=lambda size: list(range(size, 0, -1))),
}
EXACT: Mapping[str, Policy | PolicyName] = {
    "layerwise": "exact",
    "layerwise, offloaded": Exact(offload=True),
    "checkpoint": Exact(method="checkpoint"),
}
EXACT_RUNS = (
    ("layerwise", "1", "auto"),
    ("layerwise", "5, fixed", "auto"),
    ("layerwise", "4", "ddp"),
    ("layerwise, offloaded", "2, uneven shares", "auto"),
    ("checkpoint", "2, uneven shares", "auto"),
    ("checkpoint", "3 steps", "ddp"),
)
"""Runs as (policy, split, strategy)."""
Errors = dict[tuple[str, ...], "tuple[float, float] | str"]


def trained(
    batch: Batch, split: Split, world: ab.World, model: nn.Module | None = None, **options: Any
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Return the gradient that the optimizer got in one step, and the buffers afterwards."""
    model = model or network()
    optimizer = Keeping(model.parameters(), lr=0.1)
    loss = options.pop("loss", ab.mean_over_samples(classify))
    given: dict[str, Any] = {"micro_batch_size": split.micro_batch_size, "accumulation_steps": split.accumulation_steps}
    given = {"norms": "keep", **given, **options}
    with ab.Engine(model, optimizer, loss, deal=split.deal, world=world, **given) as engine:
        engine.step(arrive(batch, split, world))
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, optimizer.kept, strict=True)), buffers_of(model)


def exact_errors() -> Errors:
    """Run on every rank: return the errors of gradients and buffers for each of the runs."""
    world = ab.World.from_environment()
    errors: Errors = {}
    expected, buffers = native(network(), images())
    for policy, split, strategy in EXACT_RUNS:
        try:
            found, own = trained(images(), SPLITS[split], world, norms=EXACT[policy], strategy=strategy)
            errors[policy, split, strategy] = relative_error(found, expected), largest_difference(own, buffers)
        except Exception:  # noqa: BLE001 (the test reports it)
            errors[policy, split, strategy] = traceback.format_exc()
    return errors


def test_exact_equals_the_unsplit_batch(ranks: Ranks) -> None:
    """With norms="exact", gradients and buffers equal one forward and backward over the batch, on 1, 2 and 3 ranks.

    Running means, variances and the batch counter are updated once.
    """
    for errors in ranks.run(exact_errors):
        assert len(errors) == len(EXACT_RUNS)
        wrong = {key: e for key, e in errors.items() if isinstance(e, str) or not max(e) <= TOLERANCE}
        assert not wrong, "\n".join(f"{key}: {error}" for key, error in wrong.items())


def test_keep_and_sync_differ() -> None:
    """The counter-example: with statistics per micro-batch, the gradient is off by more than a tenth."""
    expected, _ = native(network(), images())
    for norms in ("keep", "sync"):
        found, _ = trained(images(), Split(micro_batch_size=4), ab.World(), norms=norms)
        assert relative_error(found, expected) > 0.1


# Ghost groups


class InGroups(nn.BatchNorm2d):
    """BatchNorm over one group of samples at a time."""

    sizes: list[int]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(map(super().forward, values.split(self.sizes))))


def grouped(sizes: list[int]) -> dict[str, torch.Tensor | None]:
    """Return the gradient of the unsplit network whose layers normalise group by group."""
    model = network()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            outer, _, own = name.rpartition(".")
            layer = InGroups(module.num_features).double()
            layer.sizes = sizes
            layer.load_state_dict(module.state_dict())
            setattr(model.get_submodule(outer), own, layer)
    return native(model, images())[0]


def ghosts(group_size: int) -> list[Any]:
    """Run on every rank: return gradients and buffers with ghost groups of this size, for each split."""
    world = ab.World.from_environment()
    return [trained(images(), SPLITS[name], world, norms=Ghost(group_size)) for name in ("4", "3 steps", "5, fixed")]


def test_ghost_groups_are_one_function(ranks: Ranks) -> None:
    """Gradients follow the declared groups, and buffers are equal, for any micro-batch size and number of ranks.

    The last of the 13 samples joins the group before it.
    """
    expected = grouped([4, 4, 5])
    buffers = trained(images(), Split(), ab.World(), norms=Ghost(4))[1]
    assert relative_error(expected, native(network(), images())[0]) > 0.1
    for found in ranks.run(ghosts, 4):
        for gradients, own in found:
            assert relative_error(gradients, expected) <= TOLERANCE
            assert largest_difference(own, buffers) <= TOLERANCE


def test_ghost_needs_samples_in_front() -> None:
    """Ghost groups raise an error, without side effects, if the rows cannot be divided among the samples."""
    model = network()
    before = buffers_of(model)

    def doubled(net: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(net(torch.cat([batch["x"], batch["x"][:1]]))[:-1], batch["y"])

    with (
        ab.Engine(model, Keeping(model.parameters(), lr=0.1), ab.mean_over_samples(doubled), norms=Ghost(4)) as engine,
        raises(CompositionError, "ghost_rows"),
    ):
        engine.step(images())
    assert largest_difference(buffers_of(model), before) == 0.0


# Running statistics under keep


def pooled_by_hand(values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return running mean and variance, starting from 0 and 1, after one update by all values."""
    together = torch.cat(values).transpose(0, 1).flatten(1)
    return 0.1 * together.mean(1), 0.9 + 0.1 * together.var(1)


def keep_statistics() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run on every rank: return the buffers after one step, and the expected ones of the first layer."""
    world = ab.World.from_environment()
    model = network()
    first = model.get_submodule("stem")(images()["x"]).detach()
    mean, variance = pooled_by_hand([first])
    split = Split(micro_batch_size=3, brought=lambda size: list(range(size, 0, -1)))
    _, buffers = trained(images(), split, world, model)
    return buffers, {"norm.running_mean": mean, "norm.running_var": variance}


def test_running_statistics_match_the_effective_batch(ranks: Ranks) -> None:
    """With norms="keep", running statistics are updated once per effective batch and are equal on all ranks.

    The first layer's inputs do not depend on other layers, so its statistics equal the unsplit batch's.
    """
    found = ranks.run(keep_statistics)
    for buffers, expected in found:
        assert largest_difference({name: buffers[name] for name in expected}, expected) <= TOLERANCE
        assert largest_difference(buffers, found[0][0]) == 0.0
        assert all(int(value) == 1 for name, value in buffers.items() if name.endswith("tracked"))


class SeveralNorms(nn.Module):
    """Norm layers that do not feed each other: cumulative, called twice, and untracked."""

    def __init__(self) -> None:
        super().__init__()
        self.cumulative = nn.BatchNorm1d(5, momentum=None)
        self.twice = nn.BatchNorm1d(5, momentum=0.3)
        self.untracked = nn.BatchNorm1d(5, track_running_stats=False)
        self.out = nn.Linear(5, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        both = self.twice(values) + self.twice(3 * values + 1)
        inside = self.cumulative(values) + both + self.untracked(values)
        logits: torch.Tensor = self.out(inside)
        return logits


def several_norms() -> nn.Module:
    """Return these layers, with the same weights each time."""
    torch.manual_seed(4)
    return SeveralNorms().double()


def on_vectors(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of vectors."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("size", [5, None])
def test_all_kinds_of_layers_are_updated_as_unsplit(size: int | None) -> None:
    """Cumulative means and layers called twice get the same statistics as from two unsplit forwards."""
    model, split = several_norms(), several_norms()
    optimizer, loss = torch.optim.SGD(split.parameters(), lr=0.0), ab.mean_over_samples(on_vectors)
    with ab.Engine(split, optimizer, loss, micro_batch_size=size, norms="keep") as engine:
        for number in (13, 12):
            on_vectors(model, vectors(number))
            engine.step(vectors(number))
    found = buffers_of(split)

    assert largest_difference(found, buffers_of(model)) <= TOLERANCE
    assert int(found["cumulative.num_batches_tracked"]) == 2
    assert int(found["twice.num_batches_tracked"]) == 4


def test_frozen_layers_train_weight_and_bias_only() -> None:
    """With norms="freeze", training equals the network in eval mode, and layers without statistics raise an error."""
    model = network().eval()
    expected, before = native(model, images())
    found, buffers = trained(images(), Split(micro_batch_size=4), ab.World(), norms="freeze")

    assert relative_error(found, expected) <= TOLERANCE
    assert float(found["norm.weight"].abs().max()) > 0.0  # type: ignore[union-attr]
    assert largest_difference(buffers, before) == 0.0
    untracked = several_norms()
    with raises(CompositionError, "no_running_statistics"):
        ab.Engine(untracked, Keeping(untracked.parameters()), ab.mean_over_samples(on_vectors), norms="freeze")


# Exact normalisation with other features


def masked(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the images that have a label."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def masked_images() -> Batch:
    """Return images whose first eight have no label, so that whole micro-batches and ranks count nothing."""
    batch = images()
    batch["y"] = torch.where(torch.arange(13) < 8, -100, batch["y"])
    return batch


def masked_errors() -> tuple[float, float]:
    """Run on every rank: return the errors with images that have no label."""
    world = ab.World.from_environment()
    expected, buffers = native(network(), masked_images(), masked)
    loss = ab.mean_over(masked, lambda batch: float((batch["y"] >= 0).sum()))
    found, own = trained(masked_images(), Split(micro_batch_size=3), world, norms="exact", loss=loss)
    return relative_error(found, expected), largest_difference(own, buffers)


def test_uncounted_samples_are_normalised(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Images without a label add no loss, but are part of the statistics."""
    for pool in (one_rank, two_ranks):
        for errors in pool.run(masked_errors):
            assert max(errors) <= TOLERANCE


def few_samples() -> tuple[float, float]:
    """Run on every rank: return the errors with fewer samples than ranks."""
    world = ab.World.from_environment()
    expected, buffers = native(network(), images(2))
    found, own = trained(images(2), Split(micro_batch_size=1), world, norms="exact")
    return relative_error(found, expected), largest_difference(own, buffers)


def no_share(norms: str) -> str:
    """Run on every rank: return the error if only the first rank brings samples."""
    world = ab.World.from_environment()
    try:
        trained(images(), Split(micro_batch_size=4, brought=lambda size: [1] + [0] * (size - 1)), world, norms=norms)
    except DataError as error:
        return str(error)
    return ""


def test_every_rank_takes_part(three_ranks: Ranks) -> None:
    """Exact normalisation works with fewer samples than ranks; an empty share raises an error on all ranks."""
    for errors in three_ranks.run(few_samples):
        assert max(errors) <= TOLERANCE
    for norms in ("exact", "sync"):
        assert all("rank 1 has no sample" in said for said in three_ranks.run(no_share, norms))


class Wayward(nn.Module):
    """Skips a layer if the first number of a micro-batch is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inside = self.first(values)
        if values[0, 0] > 0:
            inside = self.second(inside)
        logits: torch.Tensor = self.out(inside)
        return logits


class Checkpointed(nn.Module):
    """Checkpoints a block that contains a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), nn.Linear(5, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(checkpoint(self.inside, values, use_reentrant=False))
        return logits


@pytest.mark.parametrize(
    ("model", "number", "size", "kind", "code"),
    [
        (Wayward, 9, 3, CompositionError, "different_layers"),
        (Checkpointed, 9, 3, CompositionError, ""),
        (Wayward, 1, 1, BatchSizeError, "single_value"),
    ],
)
def test_statistics_that_cannot_be_merged_are_refused(
    model: Callable[[], nn.Module], number: int, size: int, kind: type[AnyBatchError], code: str
) -> None:
    """Micro-batches that reach different layers, user checkpoints around a layer, and single values raise errors."""
    batch = vectors(number)
    batch["x"][:, 0] = batch["x"][:, 0].abs() * torch.tensor([1.0] * 3 + [-1.0] * 6)[:number]
    made = model().double()
    with (
        ab.Engine(
            made,
            Keeping(made.parameters()),
            ab.mean_over_samples(on_vectors),
            micro_batch_size=size,
            norms="exact",
            check_loss=False,
        ) as engine,
        raises(kind, code),
    ):
        engine.step(batch)


def test_checkpointed_blocks_can_be_named() -> None:
    """Checkpointed blocks are the outermost modules with a direct norm layer, or the given ones; others raise."""
    model = network()
    loss = ab.mean_over_samples(classify)
    for blocks, said in ((None, "2 blocks, blocks.0, blocks.1"), (("blocks",), "1 blocks, blocks")):
        with ab.Engine(
            model, Keeping(model.parameters()), loss, norms=Exact(method="checkpoint", blocks=blocks)
        ) as engine:
            assert said in engine.decisions["norms"]
    with pytest.raises(ParameterError):
        ab.Engine(model, Keeping(model.parameters()), loss, norms=Exact(method="checkpoint", blocks=("block",)))
    assert not any(module._forward_hooks for module in model.modules())  # noqa: SLF001 (torch has no public API)
