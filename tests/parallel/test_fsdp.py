"""The FSDP2 strategy: parameters are replaced, ranks run in lockstep, and gradients are summed, not averaged."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab
from anybatch.errors import DataError, ParameterError, UserError, WorldError
from anybatch.parallel.dtensors import gather
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.sharding import Sharding
from anybatch.testing import relative_error, run_ranks
from tests.engine.cases import CASES, Batch, InMemory, cut, plain_gradients, vectors
from tests.engine.test_traffic import recorded
from tests.faults import sees
from tests.parallel.sharded_models import FORMS, errors_of, loss_of, tower
from tests.parallel.sharded_models import plain as plain_tower
from tests.parallel.sharded_models import whole as whole_of
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
SHARDED_CASES = (
    *("ragged", "masked tokens", "two terms", "loss sum, undeclared"),
    *("micro-batches whose mean is NaN", "two terms, some without targets"),
)
REDUCED_IN_EVERY_MICRO_BATCH = ("ragged", "masked tokens")
MICRO_BATCH_SIZES = (3, None)
REDUCTIONS = ("last_micro_batch", "every_micro_batch")
NOT_TO_BE_CHANGED_IN_PLACE = "FSDP2-wrapped module .* returned a view tensor"


def whole(tensor: Any) -> torch.Tensor:
    """Return the full tensor of a sharded one."""
    full: torch.Tensor = tensor.full_tensor()
    return full


def sgd(named: Any) -> torch.optim.Optimizer:
    """Build an optimizer over the sharded parameters."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1)


def sharded_errors(case_name: str, num_samples: int | None, *, defer: bool) -> list[float]:
    """Run on every rank: return errors of gradients, norms, losses and parameters after two clipped updates."""
    warnings.filterwarnings("ignore", message=NOT_TO_BE_CHANGED_IN_PLACE)
    world = ab.World.from_environment()
    case = CASES[case_name]
    batch: Batch = cut(case.batch(), 0, num_samples or 10**6)
    plain = case.model()
    loss = case.reference(plain, batch)
    expected = plain_gradients(plain, loss)
    norm = torch.nn.utils.get_total_norm([gradient for gradient in expected.values() if gradient is not None])
    limit = float(norm) / 2
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        plain_gradients(plain, case.reference(plain, batch))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        optimizer.step()
    errors = []
    for size in MICRO_BATCH_SIZES:
        model = case.model()
        with ab.Engine(
            model,
            sgd,
            case.loss,
            micro_batch_size=size,
            strategy=FSDP(reduction="last_micro_batch" if defer else "every_micro_batch"),
            clip=limit,
            world=world,
        ) as engine:
            found = {name: whole(gradient) for name, gradient in engine.gradients(InMemory(batch)).items()}
            errors.append(relative_error(found, expected))
            report = engine.step(InMemory(batch))
            errors += [abs(report.loss / float(loss) - 1), abs((report.grad_norm or 0.0) / float(norm) - 1)]
            engine.step(InMemory(batch))
            evaluated = engine.evaluate([InMemory(batch)])
            state = {name: whole(parameter) for name, parameter in model.named_parameters()}
            errors.append(relative_error(state, dict(plain.named_parameters())))
            if "loss" in evaluated:
                errors.append(abs(evaluated["loss"] / float(case.reference(plain, batch)) - 1))
    return errors


@sees(
    "a filler unit of an idle rank counts",
    "src/anybatch/engine/micro_batches.py",
    "number=unit.number, weight=0.0)",
    "number=unit.number, weight=1.0)",
    cases=["micro-batches whose mean is NaN-True"],
)
@pytest.mark.parametrize(
    ("case", "defer"),
    [*((case, True) for case in SHARDED_CASES), *((case, False) for case in REDUCED_IN_EVERY_MICRO_BATCH)],
)
def test_sharded_gradient_equals_the_unsplit_batch(case: str, defer: bool, two_ranks: Ranks) -> None:
    """Two FSDP2 ranks give the full-batch gradient, norm and loss, also with different numbers of micro-batches."""
    for errors in two_ranks.run(_sharded, case, None, defer):
        assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("num_samples", [1, 7])
def test_idle_ranks_run_extra_micro_batches(num_samples: int, two_ranks: Ranks) -> None:
    """A rank without samples, or with one micro-batch less, runs an extra one with weight 0, so that no rank waits.

    The extra one counts neither in the gradient nor in an evaluation.
    """
    for errors in two_ranks.run(_sharded, "ragged", num_samples, True):
        assert max(errors) <= TOLERANCE


def _sharded(case: str, num_samples: int | None, defer: bool) -> list[float]:
    return sharded_errors(case, num_samples, defer=defer)


def lockstep_decisions() -> list[str]:
    """Run on every rank: return the decisions on a bare loss, the "auto" micro-batch size and the sharding."""
    warnings.filterwarnings("ignore", message=NOT_TO_BE_CHANGED_IN_PLACE)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3))
    batch = InMemory({"x": torch.randn(85, 200), "y": torch.randint(0, 3, (85,))})

    def loss(net: Any, part: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(part["x"]), part["y"])

    with ab.Engine(model, sgd, loss, strategy=FSDP(), world=ab.World.from_environment()) as engine:
        engine.step(batch)
        return [engine.decisions[name] for name in ("loss", "micro_batch_size", "sharding")]


def test_lockstep_keeps_auto_and_the_check_of_the_loss(two_ranks: Ranks) -> None:
    """In lockstep, all ranks take the same decisions on a bare loss and the "auto" size, and none hangs."""
    first, second = two_ranks.run(lockstep_decisions)

    assert first == second
    assert first[0].startswith("taken as a mean over samples")
    assert first[2].startswith("the model in one piece")
    assert first[1] == "the whole rank share, because ranks run in lockstep"


def messages_of_idle_ranks() -> list[str]:
    """Run on every rank: return the error if a rank has no micro-batch to run in lockstep."""
    world = ab.World.from_environment()
    masked = CASES["last ranks without targets"]
    shares = CASES["ragged"]
    said = []
    for case, batch in (
        (masked, InMemory(masked.batch())),
        (shares, shares.batch() if world.rank == 0 else cut(shares.batch(), 0, 0)),
    ):
        engine = ab.Engine(case.model(), sgd, case.loss, micro_batch_size=3, strategy=FSDP(), world=world)
        with pytest.raises(DataError) as caught:
            engine.step(batch)
        said.append(str(caught.value))
    return said


def test_a_rank_without_any_micro_batch_is_refused(two_ranks: Ranks) -> None:
    """If a rank's share has no sample or no target, all ranks raise an error instead of waiting."""
    for without_targets, without_samples in two_ranks.run(messages_of_idle_ranks):
        assert "rank 1" in without_targets
        assert "same number of micro-batches" in without_targets
        assert "rank 1" in without_samples
        assert "same number of micro-batches" in without_samples


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks: two replicas of two shards."""
    ranks = Ranks(4, keep_groups=True)
    yield ranks
    ranks.close()


def worst_errors(options: Mapping[str, Any], forms: Sequence[str]) -> dict[str, float]:
    """Run on every rank: return the largest error for each form of a model."""
    warnings.filterwarnings("ignore", message=NOT_TO_BE_CHANGED_IN_PLACE)
    return {form: max(errors_of(form, options)) for form in forms}


@sees(
    "only the root of a sharded model sums gradients",
    "src/anybatch/parallel/fsdp.py",
    "for module in self._modules:\n            # Each module separately",
    "for module in self._modules[:1]:\n            # Each module separately",
    cases=["every_micro_batch"],
)
@sees(
    "a parameter used by no rank has a gradient of zero",
    "src/anybatch/parallel/fsdp.py",
    """
            if not is_used:
                parameter.grad = None
""",
    """
            pass
""",
    cases=["every_micro_batch"],
)
@sees(
    "a block shards a parameter that is also used outside of it",
    "src/anybatch/parallel/sharding.py",
    "if all(num == all_uses[key] for key, num in _uses(block).items())",
    "if True",
    cases=["every_micro_batch"],
)
@sees(
    "parameters outside of blocks are gathered only by the model's forward",
    "src/anybatch/parallel/fsdp.py",
    "        self._gather()\n        self._backward",
    "        self._backward",
    cases=["every_micro_batch"],
)
@sees(
    "parameters without axes are not summed over ranks",
    "src/anybatch/parallel/fsdp.py",
    """
        self._finish_unsharded(*unsharded)
""",
    "",
    cases=["every_micro_batch"],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_form_of_a_model(reduction: str, two_ranks: Ranks, three_ranks: Ranks) -> None:
    """Tied, frozen, shared, unused and 0-d parameters have the plain gradient and update on 2 and 3 ranks.

    With 11 samples in micro-batches of 2, ranks have unequal shares. Some row counts are not divisible by the number of
    ranks, and one parameter has fewer rows than there are ranks.
    """
    ranks = two_ranks if reduction == "last_micro_batch" else three_ranks
    for found in ranks.run(worst_errors, {"reduction": reduction}, FORMS):
        assert {form: error for form, error in found.items() if error > TOLERANCE} == {}


@pytest.mark.parametrize("reduction", [*REDUCTIONS, "replicas_last"])
def test_replicas_of_shards(reduction: str, four_ranks: Ranks) -> None:
    """Two replicas of two shards give the plain gradient and update for every setting of the reduction."""
    options = {"reduction": reduction, "replicas": 2}
    for found in four_ranks.run(worst_errors, options, ("plain", "unused", "number")):
        assert {form: error for form, error in found.items() if error > TOLERANCE} == {}


def bytes_of_a_step(reduction: str, replicas: int, num_micro_batches: int) -> tuple[int, int, int]:
    """Run on every rank: return the output bytes of reduce-scatters, all-reduces and gathers in one step."""
    warnings.filterwarnings("ignore", message=NOT_TO_BE_CHANGED_IN_PLACE)
    world, model = ab.World.from_environment(), tower("plain").float()
    strategy = FSDP(reduction=reduction, replicas=replicas)  # type: ignore[arg-type]
    batch = InMemory({name: t.float() if t.is_floating_point() else t for name, t in vectors(64).items()})
    size = 64 // world.size // num_micro_batches
    with ab.Engine(
        model, sgd, ab.mean_over_samples(loss_of), micro_batch_size=size, strategy=strategy, world=world
    ) as engine:
        for _ in range(2):
            engine.step(batch)
        with recorded() as calls:
            report = engine.step(batch)
    assert report.plan.accumulation_steps == num_micro_batches
    scattered = [call for call in calls if call.name.startswith("reduce_scatter")]
    reduced = [call for call in calls if call.name == "all_reduce" and call.dtype == torch.float32]
    reduced = [call for call in reduced if call.num_bytes > torch.float32.itemsize]  # excludes the norm
    gathered = [call for call in calls if call.name.startswith(("all_gather_into", "all_gather_single"))]
    return tuple(sum(call.num_bytes for call in named) for named in (scattered, reduced, gathered))  # type: ignore[return-value]


@sees(
    "fsdp reduces in every micro-batch",
    "src/anybatch/parallel/fsdp.py",
    'reduces = turn.last or self._reduction != "last_micro_batch"',
    "reduces = True",
    cases=["last_micro_batch-1"],
)
@sees(
    "replicas are reduced in every micro-batch",
    "src/anybatch/parallel/fsdp.py",
    "module.set_requires_all_reduce(turn.last, recurse=False)",
    "module.set_requires_all_reduce(True, recurse=False)",
    cases=["replicas_last-2"],
)
@pytest.mark.parametrize(
    ("reduction", "replicas"),
    [
        *(("last_micro_batch", 1), ("every_micro_batch", 1)),
        *(("last_micro_batch", 2), ("every_micro_batch", 2), ("replicas_last", 2)),
    ],
)
def test_bytes_handed_to_collectives(reduction: str, replicas: int, four_ranks: Ranks) -> None:
    """With 1 and 4 micro-batches, the collectives of a step have the number of bytes in this formula.

    With P bytes of padded parameters on S shards, each reduction leaves P / S bytes per rank, and a reduction over
    replicas has the same size. Each micro-batch gathers weights on demand: twice for blocks, once for the others.
    """
    shards = 4 // replicas
    whole, blocks = sum_padded(tower("plain"), shards), sum_padded(tower("plain").blocks, shards)
    for number in (1, 4):
        every, last = number, 1
        scatters = last if reduction == "last_micro_batch" else every
        reduces = every if reduction == "every_micro_batch" else last
        for found in four_ranks.run(bytes_of_a_step, reduction, replicas, number):
            # On a CPU, gloo implements reduce-scatter as an all-reduce of full gradients.
            assert found == (
                0,
                scatters * whole + (reduces * whole // shards if replicas > 1 else 0),
                number * (whole + blocks),
            )


def sum_padded(module: torch.nn.Module, shards: int) -> int:
    """Return the bytes of float32 parameters with rows padded to a multiple of the shards."""
    return sum(4 * -(-len(p) // shards) * shards * p[0].numel() for p in module.parameters())


def engine_over(model: Any, **options: Any) -> ab.Engine:
    """Return an engine that shards a tower."""
    warnings.filterwarnings("ignore", message=NOT_TO_BE_CHANGED_IN_PLACE)
    given = {"strategy": "fsdp", "micro_batch_size": 2, "world": ab.World.from_environment(), **options}
    return ab.Engine(model, sgd, given.pop("loss", ab.mean_over_samples(loss_of)), **given)


def errors_of_users_models() -> list[float]:
    """Run on every rank: return the errors of models sharded by the user, with and without an earlier forward."""
    errors = []
    for has_run in (False, True):

        def prepare(model: Any, has_run: bool = has_run) -> None:
            mesh = init_device_mesh("cpu", (ab.World.from_environment().size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if has_run:
                model(vectors(3)["x"])

        errors += errors_of("plain", {}, prepare=prepare)
    return errors


def test_a_model_sharded_by_the_user(two_ranks: Ranks) -> None:
    """A model sharded by the user with `fully_shard` trains like a plain one, also after an earlier forward."""
    for errors in two_ranks.run(errors_of_users_models):
        assert max(errors) <= TOLERANCE


def errors_around_engines() -> list[float]:
    """Run on every rank: use a sharded model directly between steps, then in a second engine."""
    batch = vectors(11)
    model = tower("plain")
    with engine_over(model) as engine:
        for _ in range(2):
            engine.step(InMemory(batch))
            with torch.no_grad():
                model(batch["x"])
            model(batch["x"])
            engine.evaluate([InMemory(batch)])
    with torch.no_grad():
        output = model(batch["x"])
    with engine_over(model) as engine:
        found = whole_of(engine.gradients(InMemory(batch)))
        state = {name: gather(value) for name, value in model.state_dict().items()}
    plain = tower("plain")
    plain.load_state_dict(state)
    loss_of(plain, batch).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    _, after_two = plain_tower("plain", batch, 2, 1e9)
    with torch.no_grad():
        return [
            relative_error(found, expected),
            relative_error(state, after_two),
            float((output - plain(batch["x"])).abs().max()),
        ]


def test_a_sharded_model_is_used_outside_of_steps(two_ranks: Ranks) -> None:
    """A sharded model runs outside of the engine between and after steps, and in a second engine."""
    for errors in two_ranks.run(errors_around_engines):
        assert max(errors) <= TOLERANCE


def errors_of_two_models() -> list[float]:
    """Run on every rank: return the gradient errors of two models under one engine."""
    batch = vectors(11)

    def loss(models: Any, part: Batch) -> torch.Tensor:
        return loss_of(models["one"], part) + loss_of(models["other"], part)

    both = {"one": tower("plain"), "other": tower("plain")}
    with engine_over(both, loss=ab.mean_over_samples(loss)) as engine:
        found = whole_of(engine.gradients(InMemory(batch)))
    expected, _ = plain_tower("plain", batch, 1, 1e9)
    return [relative_error({name: found[f"{model}.{name}"] for name in expected}, expected) for model in both]


def test_several_models(two_ranks: Ranks) -> None:
    """Several named models are sharded separately, and all have the plain gradient."""
    for errors in two_ranks.run(errors_of_two_models):
        assert max(errors) <= TOLERANCE


def low_precision() -> tuple[float, set[str], set[str]]:
    """Run on every rank: return the error with bf16 weights, the dtypes of the shards, and the compute dtypes."""
    batch, seen = vectors(11), set()

    def loss(model: Any, part: Batch) -> torch.Tensor:
        seen.add(str(model.blocks[0].inner.weight.dtype))
        out = model(part["x"].float())
        seen.add(f"out {out.dtype}")
        return torch.nn.functional.cross_entropy(out, part["y"])

    model = tower("plain").float()
    strategy = FSDP(Sharding(param_dtype=torch.bfloat16))
    with engine_over(model, loss=ab.mean_over_samples(loss), strategy=strategy, check_loss=False) as engine:
        found = whole_of(engine.gradients(InMemory(batch)))
        types = {f"{p.dtype} {p.grad is None}" for p in model.parameters()}
        assert engine.decisions["sharding"] == "3 blocks, each separately, and all other parameters, over 2 ranks"
    expected, _ = plain_tower("plain", batch, 1, 1e9)
    return relative_error({name: value.double() for name, value in found.items()}, expected), types, seen


def test_weights_are_gathered_in_bf16_and_updated_in_float32(two_ranks: Ranks) -> None:
    """With `param_dtype` gradients are right up to bf16 rounding; shards and outputs stay float32."""
    for error, types, seen in two_ranks.run(low_precision):
        assert 1e-6 < error < 2e-2
        assert types == {"torch.float32 True"}
        assert "out torch.float32" in seen


def refused() -> None:
    """Run on every rank: check that unsupported models and shardings are refused."""
    mixed = tower("plain")
    mixed.blocks[0].gain.data = mixed.blocks[0].gain.data.float()
    twins = {"one": tower("plain"), "other": tower("plain")}
    twins["other"].first = twins["one"].first
    mesh = init_device_mesh("cpu", (2,))
    parts = tower("plain")
    fully_shard(parts.blocks[0], mesh=mesh)
    alone = tower("plain")
    fully_shard(alone, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))["inner"])
    for error, model, strategy in (
        (ParameterError, mixed, "fsdp"),
        (ParameterError, twins, "fsdp"),
        (WorldError, tower("plain"), FSDP(replicas=3)),
        (ParameterError, parts, "fsdp"),
        (ParameterError, alone, "fsdp"),
        (ParameterError, parts, "all_reduce"),
    ):
        with pytest.raises(error):
            engine_over(model, strategy=strategy)
    # FSDP2 on GPUs over gloo would end in a segmentation fault.
    own = ab.World.from_environment()
    with pytest.raises(WorldError, match="needs NCCL"):
        FSDP().prepare(torch.nn.Linear(2, 2), None, ab.World(own.rank, own.size, torch.device("cuda:0")), Mock())
    own.close()


@pytest.mark.ranks
def test_unsupported_shardings_are_refused() -> None:
    """Mixed dtypes, shared parameters, wrong numbers of replicas, other shardings and GPUs over gloo are refused."""
    for outcome in run_ranks(2, refused, timeout_seconds=600.0):
        assert not outcome.error, outcome.error
    for reduction in ("replicas_last", "once"):
        with pytest.raises(UserError):
            FSDP(reduction=reduction)  # type: ignore[arg-type]
