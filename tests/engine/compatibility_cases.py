"""A run built from features of the composition table, and the same gradient in plain torch.

The plain computation is one forward and one backward over all samples, without anybatch. Only dropout needs several
forwards: the micro-batches run one by one under their own seeds, and their sums go through one backward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.core.compatibility import Feature, Verdict, cell, stated_pairs
from anybatch.core.randomness import BatchKey, micro_batch_seed
from anybatch.errors import CompositionError
from anybatch.norms import Exact, Ghost
from anybatch.parallel.ddp import DDP
from anybatch.parallel.dtensors import gather
from anybatch.testing import relative_error
from tests.engine.masks_by_hand import mask

Features = frozenset[Feature]
Batch = dict[str, torch.Tensor]
Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]
Named = dict[str, torch.Tensor | None]

NUM_SAMPLES, NUM_POSITIONS, NUM_WORDS, WIDTH = 11, 4, 6, 6
RARE_WORD, SEED = 5, 7
TERM_WEIGHTS = {"words": 1.0, "size": 0.3}
LEARNING_RATE = 8.0  # makes updates large compared to the rounding of bf16 parameters
MAX_NORM = 0.1
DEFAULTS = (
    *(Feature.FP32, Feature.WIDE_PARAMETERS, Feature.DIRECT, Feature.BALANCED, Feature.MICRO_BATCH_SIZE),
    *(Feature.DEALT, Feature.COUNT_BEFORE, Feature.DENSE),
)
IMPLIED = {
    **dict.fromkeys([feature for feature in Feature if feature.axis == "update"], Feature.LOW_PARAMETERS),
    Feature.DIRECT: Feature.WIDE_PARAMETERS,
    Feature.LOW_PARAMETERS: Feature.MASTER_WEIGHTS,
    **dict.fromkeys([feature for feature in Feature if feature.axis == "norms"], Feature.BATCH_NORM),
}
IN_FLOAT32 = {Feature.MASTER_WEIGHTS, Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS}
GROUP_SIZE = 3
STRATEGIES = {feature: feature.name.lower() for feature in Feature if feature.axis == "strategy"}
SETTINGS = [(strategy, ranks) for ranks in (Feature.ALONE, Feature.SEVERAL_RANKS) for strategy in STRATEGIES]
ON_ONE_RANK = [(strategy, Feature.ONE_RANK) for strategy in STRATEGIES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The results of a run.

    Attributes:
        error: largest relative error of the engine's numbers, in units of the tolerance.
        refusal: the message of a CompositionError.
        changed: state that changed despite a refusal.
    """

    error: float = 0.0
    refusal: str = ""
    changed: tuple[str, ...] = ()


def complete(features: Iterable[Feature]) -> Features:
    """Return the features of a complete run: the given ones, implied ones, and the defaults of the other axes."""
    found = set(features)
    for feature in (*[IMPLIED[f] for f in Feature if f in found and f in IMPLIED], *DEFAULTS):
        if not any(other.axis == feature.axis for other in found):
            found.add(feature)
    return frozenset(found)


@cache
def runs_of(one: Feature, other: Feature) -> list[Features]:
    """Return the runs that show two features together, without anything else that is refused.

    They use several ranks with both strategies, and one rank, under torch.distributed if that is one of the two.
    """
    if cell(one, other).verdict is Verdict.EXCLUSIVE:
        return []
    settings = ON_ONE_RANK if Feature.ONE_RANK in (one, other) else SETTINGS
    for strategy in (Feature.ZERO1, Feature.FSDP, Feature.DATA_PARALLEL):  # shown by their own cells
        if strategy not in (one, other):
            settings = [setting for setting in settings if strategy not in setting]
    if Feature.COMPILED in (one, other) and not {Feature.DDP, Feature.COMPRESSED} & {one, other}:  # it takes long
        settings = [setting for setting in settings if Feature.DDP not in setting]
    runs = [
        complete({one, other, *setting})
        for setting in settings
        if all(feature in setting for feature in (one, other) if feature.axis in [s.axis for s in setting])
    ]
    bad = (Verdict.REFUSED, Verdict.EXCLUSIVE)
    return [
        run
        for run in runs
        if all(met is cell(one, other) for met in (cell(*pair) for pair in stated_pairs(run)) if met.verdict in bad)
    ]


# The model, the data, the loss and the optimizer


class Network(nn.Module):
    """Scores the words of a sentence position by position, with the layers that the features need."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH, sparse=Feature.SPARSE in features)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if Feature.BATCH_NORM in features else nn.Identity()
        drops = features & {Feature.DROPOUT_KEYED, Feature.DROPOUT_PER_SAMPLE, Feature.DROPOUT_UNKEYED}
        self.dropout: nn.Module = nn.Dropout(0.5) if drops else nn.Identity()
        self.out = nn.Linear(WIDTH, NUM_WORDS)
        leaves_some = Feature.UNUSED in features
        self.rare = nn.Linear(WIDTH, WIDTH) if leaves_some else None  # used by one sample
        self.idle = nn.Linear(2, 2) if leaves_some else None  # never used
        if Feature.TIED in features:
            self.second.weight = self.first.weight
        if Feature.FROZEN in features:
            self.first.bias.requires_grad_(False)
            self.out.weight.requires_grad_(False)
        self.reentrant = next((way for f, way in CHECKPOINTING.items() if f in features), None)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        if self.rare is not None:
            chosen = (words == RARE_WORD).any(1)
            if chosen.any():
                hidden = hidden + self.rare(hidden) * chosen[:, None, None]
        if self.reentrant is None:
            hidden = self.inside(hidden)
        else:
            hidden = checkpoint(self.inside, hidden, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.out(hidden)
        return logits

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(hidden))
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        dropped: torch.Tensor = self.dropout(torch.tanh(self.second(hidden)))
        return dropped


class InGroups(nn.BatchNorm1d):
    """BatchNorm that sees one group of samples after the other; 11 samples are three groups of 3 and one of 2."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(map(super().forward, rows.split(GROUP_SIZE * NUM_POSITIONS))))


class Masks(nn.Module):
    """Dropout over the whole batch with the masks that its micro-batches draw, each under its own seed."""

    def __init__(self, units: Sequence[tuple[int, int, int | None]]) -> None:
        super().__init__()
        self.units = units

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        masks = []
        for start, stop, seed in self.units:
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            masks.append(F.dropout(torch.ones_like(hidden[start:stop]), 0.5))
        return hidden * torch.cat(masks)


CHECKPOINTING = {Feature.NON_REENTRANT: False, Feature.REENTRANT: True}


class Objective(nn.Module):
    """A cross-entropy over unmasked targets, and a penalty over samples."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.joint = Feature.JOINT in features
        self.several = Feature.SEVERAL_TERMS in features
        self.late = Feature.COUNT_LATE in features
        scale = torch.linspace(0.5, 1.5, NUM_WORDS)
        self.scale = nn.Parameter(scale) if Feature.LOSS_PARAMETERS in features else None

    def encode(self, model: nn.Module, batch: Batch) -> Batch:
        """Return each sample's input to the loss across samples: its vector, and a class."""
        logits = model(batch["words"])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return {"vector": wide.mean(1), "class": batch["words"][:, 0] % 3}

    def across(self, outputs: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of finding samples of the same class by their vectors."""
        vectors = outputs["vector"] if self.scale is None else outputs["vector"] * self.scale
        itself = torch.eye(len(vectors), dtype=torch.bool)
        alike = (vectors[:, None] * vectors).sum(2)  # no matrix product: autocast would round it
        logs = (4 * alike).masked_fill(itself, -torch.inf).log_softmax(1)
        same = (outputs["class"][:, None] == outputs["class"]) & ~itself
        return -logs[same].mean()

    def sums(self, model: nn.Module, batch: Batch) -> Sums:
        """Return (sum, count) of each term over the given samples."""
        logits = model(batch["words"])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a mean in bf16 is too inexact
        if self.scale is not None:
            logits = logits * self.scale
        words = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        sums = {"words": (words, (batch["labels"] != -100).sum())}
        if self.several:
            sums["size"] = (logits.square().mean((1, 2)).sum(), torch.tensor(len(logits)))
        return sums

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the loss in the form that its declaration needs."""
        if self.joint:
            return self.across(batch)
        sums = self.sums(model, batch)
        if self.late:
            return ab.LossSum(*sums["words"])
        means = {name: total / count for name, (total, count) in sums.items()}
        return means if self.several else means["words"]

    def declared(self) -> Any:
        """Return the engine's loss."""
        function: Callable[[nn.Module, Batch], Any] = self
        if self.scale is None:
            function = self.forward
        if self.joint:
            return ab.joint(self.encode, function)
        if self.late:
            return function
        if self.several:
            terms = {"words": ab.tokens(shift=False), "size": ab.samples(weight=TERM_WEIGHTS["size"])}
            return ab.sum_of(function, **terms)
        return ab.mean_over_tokens(function, shift=False)


class Keeping(torch.optim.SGD):
    """Plain SGD that keeps the gradients it gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.every = [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Any = None) -> Any:
        # Under zero1 the groups hold only some of the parameters during a step.
        self.kept = [None if p.grad is None else p.grad.detach().clone() for p in self.every]
        return super().step(closure)


def keeping(parameters: Mapping[str, nn.Parameter]) -> Keeping:
    """Return the optimizer."""
    return Keeping(parameters.values(), lr=LEARNING_RATE)


class Sentences(torch.utils.data.Dataset[Batch]):
    """Sentences with a third of the targets masked, unevenly; only one has the rare word."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = NUM_SAMPLES, NUM_POSITIONS
        self.words = torch.randint(0, RARE_WORD, shape, generator=generator)
        self.words[6, 2] = RARE_WORD
        masked = torch.arange(NUM_POSITIONS) >= torch.randint(
            1, NUM_POSITIONS + 1, (NUM_SAMPLES, 1), generator=generator
        )
        self.labels = torch.randint(0, NUM_WORDS, shape, generator=generator).masked_fill(masked, -100)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return self.of([index])

    def of(self, indices: Sequence[int]) -> Batch:
        """Return some sentences as a batch."""
        return {"words": self.words[list(indices)], "labels": self.labels[list(indices)]}


def join(samples: Sequence[Batch]) -> Batch:
    """Collate samples."""
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


# The run, and the plain computation


def run(features: Features, world: ab.World) -> Found:
    """Run on every rank: compare the engine with the plain computation."""
    network, objective = build(features)
    parameters = trainable(network, objective)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    model = compiled(network, features) if Feature.COMPILED in features else network
    optimizer = keeping(parameters)
    sharded = Feature.FSDP in features and Feature.CAST not in features  # fsdp replaces parameters
    instance = not features & IN_FLOAT32 and not sharded
    made: list[Keeping] = [optimizer]

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> Keeping:
        made[0] = keeping(dict(named))
        return made[0]

    batch, sample_ids, seed = arrive(features, world)
    engine = None
    try:
        engine = ab.Engine(
            model,
            optimizer if instance else make,
            objective.declared(),
            world=world,
            # Other tests check declarations on several ranks.
            **{"norms": "keep", "check_loss": world.size == 1, "seed": seed, **arguments(features)},
        )
        computed = dense(whole(dict(zip(parameters, engine.gradients(batch).values(), strict=True))))
        report = engine.step(batch)
        order = report.plan.order or range(len(sample_ids))
        sample_ids = [sample_ids[place] for place in order]
        units = [
            part
            for unit in report.plan.units
            for part in drawn(features, unit.start, unit.stop, seed_of(features, seed, sample_ids[unit.start]))
        ]
    except CompositionError as error:
        if engine is not None:
            engine.close(error)
        return Found(refusal=str(error), changed=changes(parameters, before, network, built=engine is not None))
    finally:
        if engine is not None:
            engine.close()
    assert not report.skipped
    expected = plain_gradients(features, sample_ids, units, seed, order=order)
    kept = dense(whole(dict(zip(parameters, made[0].kept, strict=True))))
    after = whole(trainable(network, objective))
    moved: Named = {name: parameter - before[name] for name, parameter in after.items() if parameter is not None}
    by_hand = {name: updated(before[name], kept[name]) for name in kept}
    errors = [relative_error(computed, expected), relative_error(kept, clipped(features, expected))]
    if Feature.ROUNDED_WEIGHTS in features:
        apart = max(steps_apart(after[name], before[name], kept[name]) for name in kept)
        return Found(error=max(*(one / tolerance(features) for one in errors), apart))
    errors.append(relative_error(moved, {name: value - before[name] for name, value in by_hand.items()}))
    return Found(error=max(errors) / tolerance(features))


def whole(tensors: Mapping[str, torch.Tensor | None]) -> Named:
    """Return sharded tensors in full."""
    return {name: None if tensor is None else gather(tensor.detach()) for name, tensor in tensors.items()}


def compiled(network: Network, features: Features) -> nn.Module:
    """Return the network under torch.compile.

    Its backward is one autograd node ("aot_eager"), as by default, but without minutes of code generation. With other
    features on several ranks or in low precision, only the forward is compiled ("eager"), in a quarter of the time.
    """
    alone = features == complete({f for f in features if f.axis in ("strategy", "ranks", "compilation")})
    both = alone or checkpointed_and_compiled(features) or (is_wide(features) and Feature.SEVERAL_RANKS not in features)
    model: Any = torch.compile(network, backend="aot_eager" if both else "eager")
    return model  # type: ignore[no-any-return]


def checkpointed_and_compiled(features: Features) -> bool:
    """Whether a compiled forward is repeated; "eager" would repeat it with other random numbers."""
    return Feature.COMPILED in features and bool(features & CHECKPOINTING.keys())


def arguments(features: Features) -> dict[str, Any]:
    """Return the engine's arguments besides model, optimizer and loss."""
    chosen: Mapping[Feature, dict[str, Any]] = {
        Feature.BF16: {"precision": "bf16"},
        Feature.FP16: {"precision": "fp16"},
        Feature.SPLIT_WEIGHTS: {"bf16_weights": "split"},
        Feature.ROUNDED_WEIGHTS: {"bf16_weights": "stochastic"},
        Feature.FIXED: {"deal": "fixed"},
        Feature.MICRO_BATCH_SIZE: {"micro_batch_size": 3},
        Feature.ACCUMULATION_STEPS: {"accumulation_steps": 2},
        Feature.TOKEN_BUDGET: {"micro_batch_size": ab.token_budget(20, fixed_tokens=1.0)},
        Feature.CLIP_NORM: {"clip": MAX_NORM},
        Feature.DROPOUT_PER_SAMPLE: {"rng": "per_sample"},
        Feature.DROPOUT_UNKEYED: {"rng": None},
        Feature.NORMS_SYNC: {"norms": "sync"},
        Feature.NORMS_FREEZE: {"norms": "freeze"},
        Feature.NORMS_GHOST: {"norms": Ghost(GROUP_SIZE)},
        Feature.NORMS_EXACT: {"norms": "exact"},
        Feature.NORMS_CHECKPOINT: {"norms": Exact(method="checkpoint")},
        **{feature: {"strategy": name} for feature, name in STRATEGIES.items()},
    }
    found = {name: value for f, given in chosen.items() if f in features for name, value in given.items()}
    if Feature.COMPRESSED in features:
        found["strategy"] = DDP(compression="bf16")
    return found


def build(features: Features) -> tuple[Network, Objective]:
    """Return the network and the loss, with the same weights each time."""
    torch.default_generator.manual_seed(1)
    dtype = torch.float64 if is_wide(features) else torch.float32
    if Feature.LOW_PARAMETERS in features:
        dtype = torch.bfloat16
    return Network(features).to(dtype), Objective(features).to(dtype)


def trainable(network: nn.Module, objective: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, in the engine's order."""
    both = nn.ModuleDict({"model": network, "loss": objective})
    return {name: parameter for name, parameter in both.named_parameters() if parameter.requires_grad}


def arrive(features: Features, world: ab.World) -> tuple[Any, Sequence[int], int]:
    """Return the batch as this rank gets it, the ids of all samples in order, and the seed of the data."""
    data = Sentences()
    if Feature.DEALT in features:
        lengths = [3 * sample % 7 + 1 for sample in range(NUM_SAMPLES)]  # only a token budget uses them
        (batch,) = ab.batches(data, effective_batch_size=NUM_SAMPLES, seed=SEED, collate=join, lengths=lengths)
        return batch, [int(sample) for sample in batch.sample_ids], SEED
    ends = [NUM_SAMPLES * 2 * rank // (world.size + 1) // GROUP_SIZE * GROUP_SIZE for rank in range(world.size)]
    ends.append(NUM_SAMPLES)
    ids = range(NUM_SAMPLES)
    (share,) = ab.shares([data.of(ids[ends[world.rank] : ends[world.rank + 1]])], world=world)
    return share, ids, 0


def seed_of(features: Features, seed: int, first_sample: int) -> int | None:
    """Return the seed of a micro-batch, or None if nothing draws from it."""
    return micro_batch_seed(seed, 0, first_sample) if Feature.DROPOUT_KEYED in features else None


def drawn(features: Features, start: int, stop: int, seed: int | None) -> list[tuple[int, int, int | None]]:
    """Return the parts of a micro-batch in the order of their draws: two replicas under data_parallel, else one."""
    middle = start + (stop - start) // 2 + 1
    if Feature.DATA_PARALLEL not in features or middle >= stop:
        return [(start, stop, seed)]
    return [(start, middle, seed), (middle, stop, None)]


class Masked(nn.Module):
    """Applies a dropout mask with a rate of one half."""

    def __init__(self, kept: torch.Tensor) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.kept * 2.0


def as_one_forward(
    network: Network,
    features: Features,
    sample_ids: Sequence[int],
    units: Sequence[tuple[int, int, int | None]],
    seed_of_data: int,
) -> None:
    """Give a network masks and statistics, so that one forward equals the engine's micro-batches."""
    if Feature.DROPOUT_PER_SAMPLE in features:
        network.dropout = Masked(mask(BatchKey(seed_of_data, 0, sample_ids), 0, (NUM_POSITIONS, WIDTH), 0.5))
    if Feature.DROPOUT_KEYED in features and Feature.BATCH_NORM in features:
        network.dropout = Masks(units)
    if Feature.NORMS_FREEZE in features:
        network.norm.eval()
    if Feature.NORMS_GHOST in features:
        network.norm = InGroups(WIDTH).to(network.out.weight.dtype)


def plain_gradients(
    features: Features,
    sample_ids: Sequence[int],
    units: Sequence[tuple[int, int, int | None]],
    seed_of_data: int = 0,
    *,
    order: Sequence[int] | None = None,
) -> Named:
    """Return the gradient of the unsplit batch; `order` is the order of its samples, if it is another one."""
    network, objective = build(features)
    as_one_forward(network, features, sample_ids, units, seed_of_data)
    in_units = Feature.DROPOUT_KEYED in features and Feature.BATCH_NORM not in features
    whole = units if in_units else [(0, len(sample_ids), None)]
    totals: Sums = {}
    outputs: list[Batch] = []
    for start, stop, seed in whole:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        with autocast(features):
            if Feature.JOINT in features:
                outputs.append(objective.encode(network, Sentences().of(sample_ids[start:stop])))
                continue
            found = objective.sums(network, Sentences().of(sample_ids[start:stop]))
        for name, (total, count) in found.items():
            before = totals.get(name, (torch.zeros(()), torch.zeros(())))
            totals[name] = before[0] + total, before[1] + count
    if outputs:
        joined, back = join(outputs), torch.tensor(order or range(len(sample_ids))).argsort()
        totals = {"words": (objective.across({name: rows[back] for name, rows in joined.items()}), torch.ones(()))}
    loss = torch.stack([TERM_WEIGHTS[name] * total / count for name, (total, count) in totals.items()]).sum()
    scale = 2.0**16 if Feature.FP16 in features else 1.0  # avoids underflow of small gradients in fp16
    (scale * loss).backward()
    parameters = trainable(network, objective)
    return dense({name: None if p.grad is None else p.grad / scale for name, p in parameters.items()})


def dense(gradients: Named) -> Named:
    """Return the gradients, with sparse ones made dense."""
    return {name: None if gradient is None else gradient.to_dense() for name, gradient in gradients.items()}


def autocast(features: Features) -> AbstractContextManager[Any]:
    """Return the context of a forward in the run's precision."""
    dtypes = {Feature.BF16: torch.bfloat16, Feature.FP16: torch.float16}
    return next((torch.autocast("cpu", dtype) for f, dtype in dtypes.items() if f in features), nullcontext())


def clipped(features: Features, gradients: Named) -> Named:
    """Return the gradients clipped as the optimizer should get them."""
    if Feature.CLIP_NORM in features:
        return clipped_by_norm(gradients, MAX_NORM)
    return gradients


def clipped_by_norm(gradients: Named, max_norm: float) -> Named:
    """Return the gradients scaled down to a maximum norm."""
    present = [gradient.double() for gradient in gradients.values() if gradient is not None]
    norm = torch.stack([gradient.square().sum() for gradient in present]).sum().sqrt()
    assert norm > 2 * max_norm, "nothing would be clipped"
    return {name: None if g is None else g * (max_norm / (norm + 1e-6)) for name, g in gradients.items()}


def updated(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return SGD's update of a parameter, computed in the gradient's type and rounded once to the parameter's."""
    if gradient is None:
        return parameter
    return torch.sub(parameter.to(gradient.dtype), gradient, alpha=LEARNING_RATE).to(parameter.dtype)


def steps_apart(after: torch.Tensor | None, before: torch.Tensor, gradient: torch.Tensor | None) -> float:
    """Return how many bf16 steps a parameter is from SGD's update: less than one, rounded either way."""
    assert after is not None
    exact = before.float() if gradient is None else before.float() - LEARNING_RATE * gradient.float()
    # Neighbours differ by at most 2**-7 of the larger one.
    return float(((after.float() - exact).abs() / (2.0**-7 * exact.abs()).clamp(min=1e-30)).max())


def is_wide(features: Features) -> bool:
    """Whether the run can be in float64: autocast does not change float64, and compression refuses it."""
    return Feature.FP32 in features and not features & {Feature.LOW_PARAMETERS, Feature.COMPRESSED}


def tolerance(features: Features) -> float:
    """Return the allowed error of gradients.

    bf16 rounds every number to a relative 2**-9, fp16 to 2**-12, and unsplit sums round in other places than
    micro-batches; six such roundings are a bit more than twice the observed error.
    """
    if is_wide(features):
        return 1e-12
    return 6 * 2.0**-9 if features & {Feature.BF16, Feature.LOW_PARAMETERS, Feature.COMPRESSED} else 6 * 2.0**-12


def changes(
    parameters: Mapping[str, nn.Parameter], before: Mapping[str, torch.Tensor], network: nn.Module, *, built: bool
) -> tuple[str, ...]:
    """Return the state that a refusal changed. An engine that was built may have cleared gradients."""
    found = [f"value of {name}" for name, parameter in parameters.items() if not torch.equal(parameter, before[name])]
    for name, parameter in parameters.items():
        if parameter.grad is not None and (not built or parameter.grad.any()):
            found.append(f"gradient of {name}")
        if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:  # noqa: SLF001 (torch has no public API)
            found.append(f"hook on {name}")
    found += [f"hook on {name}" for name, module in network.named_modules() if module._forward_hooks]  # noqa: SLF001
    return tuple(found)
