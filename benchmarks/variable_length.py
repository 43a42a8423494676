"""Time of a step on samples of different lengths, split in different ways with the same limit on tokens.

The transformer of the recipe `text`; effective batches of 64 samples with lengths up to 512, of four distributions; at
most 4,096 tokens in a micro-batch, padding included. The ways:

- arrival order: micro-batches of 8 samples, a number that always fits, in the order of arrival;
- sorted: micro-batches of 8 samples, sorted by length within the batch;
- transformers' `BatchRebalanceSampler` (`train_sampling_strategy="batch_rebalance"`), which is given a number of
  micro-batches: 8, as a user of micro-batches of 8 has them, 16, and the fewest with which none is above the cap;
- accelerate and Lightning Fabric, where they are installed (`pip install 'anybatch[peers]'`): their loops over a
  DataLoader, 8 samples as they arrive;
- `ab.token_budget`: padded, packed into rows without padding, and with the faster one of both, as the engine measures.

Token budgets run in the engine, planning included; the other ways run in a hand-written loop, which divides by the
number of targets of the whole batch. Ways alternate step by step, on the same batches. Figures are medians: of the
seconds, of the ratio to the neighbouring step with the padded budget, and of the padding as a share of all computed
tokens. Under each table is a bound by the measured cost model: the predicted cost of a step without any padding and in
the fewest micro-batches, relative to a step with the padded budget.

    python benchmarks/variable_length.py [--out benchmarks/results/NAME.md]
"""

import importlib
import importlib.util
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import report
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_pt_utils import BatchRebalanceSampler

import anybatch as ab
from anybatch.data import Packed, Padded, PaddedOrPacked
from anybatch.recipes.text import Transformer

SIZE, CAP, LONGEST, NUM_BATCHES, ROUNDS = 64, 4_096, 512, 6, 4
Lengths = list[int]
SplitOptions = list[list[int]]


def log_normal(draw: random.Random) -> int:
    """Return a log-normal length, as of sentences: half of them below 90, some in the hundreds."""
    return int(draw.lognormvariate(4.5, 0.8))


def heavy_tailed(draw: random.Random) -> int:
    """Return a length of a Pareto distribution."""
    return int(20 * draw.paretovariate(1.1))


def bimodal(draw: random.Random) -> int:
    """Return a length of a question (nine in ten) or of a document."""
    return draw.randint(20, 40) if draw.random() < 0.9 else draw.randint(400, 512)


def nearly_constant(draw: random.Random) -> int:
    """Return a length close to 256."""
    return draw.randint(248, 256)


KINDS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": log_normal,
    "heavy-tailed": heavy_tailed,
    "bimodal": bimodal,
    "nearly constant": nearly_constant,
}


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens of given lengths."""

    def __init__(self, lengths: Lengths) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths = lengths
        self.rows = [torch.randint(1, 256, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def network() -> nn.Module:
    """Return a transformer of a million parameters."""
    torch.manual_seed(0)
    return Transformer(width=128, num_layers=4, num_heads=4)


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the mean cross-entropy over the targets of a micro-batch; bytes are predicted from the bytes before."""
    ends = batch.get("cu_seqlens")
    lengths = None if ends is None else ends.diff().tolist()
    logits = model(batch["input_ids"], lengths)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def padding(lengths: Lengths, cut: SplitOptions) -> float:
    """Return the share of padding in the computed tokens."""
    computed = sum(len(unit) * max(lengths[place] for place in unit) for unit in cut)
    return 1 - sum(lengths) / computed


def in_order(order: Sequence[int]) -> SplitOptions:
    """SplitOptions into micro-batches of 8, in order."""
    return [list(order[start : start + 8]) for start in range(0, len(order), 8)]


def rebalanced(lengths: Lengths, num_units: int) -> SplitOptions:
    """Split like transformers' sampler."""
    sampler = BatchRebalanceSampler(lengths, len(lengths), 1, num_units, shuffle=False)
    return [list(unit) for unit in sampler]


def rebalanced_within_cap(lengths: Lengths) -> SplitOptions:
    """Split like transformers' sampler, into the fewest micro-batches within the limit."""
    for num_units in range(1, len(lengths) + 1):
        cut = rebalanced(lengths, num_units)
        if all(len(unit) * max(lengths[place] for place in unit) <= CAP for unit in cut):
            return cut
    raise AssertionError


CUTS: dict[str, Callable[[Lengths], SplitOptions]] = {
    "arrival order, 8 samples": lambda lengths: in_order(range(len(lengths))),
    "sorted, 8 samples": lambda lengths: in_order(sorted(range(len(lengths)), key=lengths.__getitem__)),
    "transformers, 8 micro-batches": lambda lengths: rebalanced(lengths, 8),
    "transformers, 16 micro-batches": lambda lengths: rebalanced(lengths, 16),
    "transformers, fewest within the cap": rebalanced_within_cap,
}


class ByHand:
    """The hand-written loop, over a cut of each batch.

    Attributes:
        waste: the padding of each batch.
    """

    def __init__(self, dataset: Texts, cut: Callable[[Lengths], SplitOptions]) -> None:
        self.waste: list[float] = []
        self._dataset, self._cut = dataset, cut
        self._model = network()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._collate = Padded()

    def step(self, ids: Sequence[int]) -> None:
        """Train on some samples."""
        lengths = [self._dataset.lengths[one] for one in ids]
        cut = self._cut(lengths)
        self.waste.append(padding(lengths, cut))
        targets = sum(length - 1 for length in lengths)
        for unit in cut:
            batch = self._collate([self._dataset[ids[place]] for place in unit])
            share = sum(lengths[place] - 1 for place in unit) / targets
            (loss(self._model, batch) * share).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class ByPeer:
    """A peer's loop over a DataLoader of 8 samples as they arrive; the loss is divided by the number of micro-batches.

    Attributes:
        waste: the padding of each batch.
    """

    def __init__(self, dataset: Texts) -> None:
        self.waste: list[float] = []
        self._dataset = dataset
        self._model: Any = network()
        self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._loader: Any = DataLoader(dataset, batch_size=8, collate_fn=Padded())

    def rows(self) -> Iterator[Any]:
        """Yield micro-batches, epoch after epoch."""
        while True:
            yield from self._loader

    def note_waste(self, ids: Sequence[int]) -> None:
        """Record the padding of this batch."""
        lengths = [self._dataset.lengths[one] for one in ids]
        self.waste.append(padding(lengths, in_order(range(len(lengths)))))


class ByAccelerate(ByPeer):
    """A loop with accelerate."""

    def __init__(self, dataset: Texts) -> None:
        super().__init__(dataset)
        accelerate = importlib.import_module("accelerate")
        self._accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=SIZE // 8)
        prepared = self._accelerator.prepare(self._model, self._optimizer, self._loader)
        self._model, self._optimizer, self._loader = prepared
        self._rows = self.rows()

    def step(self, ids: Sequence[int]) -> None:
        """Train on the next samples, whose ids are given."""
        self.note_waste(ids)
        for batch in itertools.islice(self._rows, SIZE // 8):
            with self._accelerator.accumulate(self._model):
                self._accelerator.backward(loss(self._model, batch))
                self._optimizer.step()
                self._optimizer.zero_grad()


class ByFabric(ByPeer):
    """A loop with Lightning Fabric."""

    def __init__(self, dataset: Texts) -> None:
        super().__init__(dataset)
        self._fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
        self._model, self._optimizer = self._fabric.setup(self._model, self._optimizer)
        self._loader = self._fabric.setup_dataloaders(self._loader)
        self._rows = self.rows()

    def step(self, ids: Sequence[int]) -> None:
        """Train on the next samples, whose ids are given."""
        self.note_waste(ids)
        for number, batch in enumerate(itertools.islice(self._rows, SIZE // 8)):
            is_last = number == SIZE // 8 - 1
            with nullcontext() if is_last else self._fabric.no_backward_sync(self._model):
                self._fabric.backward(loss(self._model, batch) / (SIZE // 8))
        self._optimizer.step()
        self._optimizer.zero_grad()


PEERS = {
    "accelerate, 8 samples": ("accelerate", ByAccelerate),
    "Lightning Fabric, 8 samples": ("lightning", ByFabric),
}


class ByEngine:
    """The engine with a budget."""

    def __init__(self, dataset: Texts, collate: Padded | Packed | PaddedOrPacked) -> None:
        self.waste: list[float] = []
        self._lengths = dataset.lengths
        self.bounds: list[float] = []
        model = network()
        self._engine = ab.Engine(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            ab.mean_over_tokens(loss, labels="labels"),
            micro_batch_size=ab.token_budget(CAP),
            measure_gradient_norm=False,
            check_loss=False,
        )
        self._collate = collate
        data = ab.batches(
            dataset,
            effective_batch_size=SIZE,
            shuffle=False,
            epochs=1_000,
            lengths=dataset.lengths,
            collate=collate,
        )
        self._batches = iter(data)

    def step(self, ids: Sequence[int]) -> None:
        """Train on the next samples, whose ids are given."""
        batch = next(self._batches)
        assert list(batch.sample_ids) == list(ids)
        plan = self._engine.step(batch).plan
        cut = [list(plan.positions(unit)) for unit in plan.units]
        lengths = [self._lengths[one] for one in ids]
        packs = isinstance(self._collate, Packed) or self._engine.decisions.get("layout", "").startswith("packed")
        self.waste.append(0.0 if packs else padding(lengths, cut))
        fixed = float(self.measured.partition("; ")[2].partition(" tokens")[0].replace(",", ""))
        padded = sum(len(unit) * max(lengths[place] for place in unit) for unit in cut)
        fewest = -(-sum(lengths) // CAP)
        self.bounds.append((sum(lengths) + fixed * fewest) / (padded + fixed * len(cut)))

    @property
    def measured(self) -> str:
        """The engine's report on its budget."""
        return self._engine.decisions["micro_batch_size"]

    @property
    def layout(self) -> str:
        """The engine's report on padding and packing, if it has a choice."""
        return self._engine.decisions["layout"]


def steps_of_epochs(num_samples: int) -> Iterator[range]:
    """Yield the samples of each step, epoch after epoch."""
    starts = itertools.cycle(range(0, num_samples, SIZE))
    return (range(start, start + SIZE) for start in starts)


def measure(kind: str, rounds: int) -> list[str]:
    """Return the rows of one kind of lengths."""
    draw = random.Random(0)  # noqa: S311 (lengths)
    length = partial(KINDS[kind], draw)
    dataset = Texts([min(LONGEST, max(2, length())) for _ in range(NUM_BATCHES * SIZE)])
    ways: dict[str, ByHand | ByPeer | ByEngine] = {name: ByHand(dataset, cut) for name, cut in CUTS.items()}
    ways |= {name: make(dataset) for name, (package, make) in PEERS.items() if importlib.util.find_spec(package)}
    budget = ByEngine(dataset, Padded())
    packed = Packed(boundaries=True)
    ways |= {
        "token budget, padded": budget,
        "token budget, packed": ByEngine(dataset, packed),
        "token budget, the faster": (faster := ByEngine(dataset, PaddedOrPacked(packed=packed))),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, ids in enumerate(itertools.islice(steps_of_epochs(len(dataset)), 1 + rounds * NUM_BATCHES)):
        names = list(ways) if number % 2 else list(reversed(ways))
        for name in names:
            begun = time.perf_counter()
            ways[name].step(ids)
            if number:  # the first round warms up, and the engine measures in it
                seconds[name].append(time.perf_counter() - begun)
    best = seconds["token budget, padded"]
    rows = []
    for name, way in ways.items():
        ratios = [own / other for own, other in zip(seconds[name], best, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            f"| {kind} | {name} | {statistics.median(seconds[name]):.3f} | {middle:.2f} | {low:.2f} to {high:.2f} "
            f"| {statistics.median(way.waste):.0%} |"
        )
    rows.append(f"| {kind} | bound, by the cost model | | {statistics.median(budget.bounds):.2f} | | 0% |")
    print("\n".join([*rows, f"{kind}: {budget.measured}; {faster.layout}"]), flush=True)
    return rows


def main() -> None:
    """Measure all, and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| lengths | cut | seconds a step | times the padded budget | quartiles | padding |",
        "|---|---|--:|--:|---|--:|",
    ]
    for kind in given.kinds:
        lines += measure(kind, given.rounds)
    report.publish(
        lines,
        title="Steps on samples of different lengths",
        command="python benchmarks/variable_length.py",
        setting=f"one thread, effective batches of {SIZE}, at most {CAP:,} tokens a micro-batch",
        out=given.out,
    )


if __name__ == "__main__":
    main()
