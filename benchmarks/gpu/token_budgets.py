"""A check of the stage about data: token budgets on samples of different lengths, and the ways of others."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu.stage import Row, Rows, Setting
from gpu.two_models import Decoder, attend, engine_of, milliseconds, new_model, ratio, seconds_of
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.data import Packed, Padded, PaddedOrPacked

Batch = dict[str, Any]
Units = list[list[int]]
"""The samples of each micro-batch."""
Step = Callable[[], tuple[Units, bool]]
"""Makes a step; returns its micro-batches and whether they were packed."""


def packable_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over targets; a token is predicted from those before it."""
    logits = model(
        batch["input_ids"], batch.get("position_ids"), batch.get("cu_seqlens"), int(batch.get("max_seqlen", 0))
    )
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Way:
    """A way to train on samples of different lengths.

    Attributes:
        tokens: of each step, padding left out.
        waste: the share of padding in each step.
        num_units: micro-batches of each step.
    """

    def __init__(self, lengths: Sequence[int], step: Step) -> None:
        self.tokens: list[int] = []
        self.waste: list[float] = []
        self.num_units: list[int] = []
        self._lengths = lengths
        self._step = step

    def __call__(self) -> None:
        """Make a step."""
        units, is_packed = self._step()
        tokens = [[self._lengths[one] for one in unit] for unit in units]
        computed = sum(sum(unit) if is_packed else len(unit) * max(unit) for unit in tokens)
        self.tokens.append(sum(map(sum, tokens)))
        self.waste.append(1 - self.tokens[-1] / computed)
        self.num_units.append(len(units))


def in_groups(ids: Sequence[int], size: int) -> Units:
    """Return consecutive groups."""
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]


def by_hand(model: nn.Module, dataset: Any, batches: Iterator[Units], device: str) -> Step:  # noqa: ANN401
    """Return a step of a plain loop that divides by the targets of the whole batch."""
    optimizer, collate = torch.optim.AdamW(model.parameters(), lr=1e-5), Padded()

    def step() -> tuple[Units, bool]:
        units = next(batches)
        targets = sum(dataset.lengths[one] - 1 for unit in units for one in unit)
        for unit in units:
            batch = {name: value.to(device) for name, value in collate([dataset[one] for one in unit]).items()}
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = packable_loss(model, batch)
            (loss * (sum(dataset.lengths[one] - 1 for one in unit) / targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return units, False

    return step


def by_budget(engine: ab.Engine, dataset: Any, collate: Any, num_samples: int) -> Step:  # noqa: ANN401
    """Return a step of the engine under a token budget."""
    data = ab.batches(
        dataset,
        effective_batch_size=num_samples,
        shuffle=False,
        epochs=1_000,
        lengths=dataset.lengths,
        collate=collate,
    )
    batches = iter(data)

    def step() -> tuple[Units, bool]:
        batch = next(batches)
        plan, ids = engine.step(batch).plan, list(batch.sample_ids)
        is_packed = isinstance(collate, Packed) or engine.decisions.get("layout", "").startswith("packed")
        return [[ids[place] for place in plan.positions(unit)] for unit in plan.units], is_packed

    return step


def new_lengths(setting: Setting) -> Rows:
    """Time attention at lengths that it has not met before, and again: some backends compile a plan for each."""
    if not setting.on_gpu:
        return
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    for name, is_allowed in (("torch's choice", enabled), ("without cuDNN", False)):
        torch.backends.cuda.enable_cudnn_sdp(is_allowed)
        first: list[float] = []
        again: list[float] = []
        for length in range(523 + is_allowed, 823, 37):
            parts = [
                torch.randn(8, length, 12, 64, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            ]
            for found in (first, again, again):
                setting.synchronize()
                begin = time.perf_counter()
                attend(*parts).sum().backward()
                setting.synchronize()
                found.append(time.perf_counter() - begin)
        cells = {"at a new length, ms": f"{1e3 * statistics.median(first[1:]):.2f}"}
        cells["at the same length again, ms"] = f"{1e3 * statistics.median(again[2:]):.2f}"
        yield Row("Attention forward and backward, 8 samples, 12 heads in bf16", {"backend": name, **cells})
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def token_budgets(setting: Setting) -> Rows:
    """Compare token budgets with padding in arrival order and with transformers' samplers on log-normal lengths."""
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler  # noqa: PLC0415
        from variable_length import Texts  # noqa: PLC0415 (imports transformers)
    except ImportError as error:
        yield Row("Samples of different lengths", {"missing": str(error)})
        return
    width, num_layers, longest, middle, size, num_batches = setting.pick(
        (768, 12, 2048, 5.7, 64, 12), (64, 2, 128, 3.0, 16, 8), (32, 1, 32, 2.0, 16, 4)
    )
    vocabulary, cap = setting.pick(16_384, 256, 256), 8 * longest
    if setting.on_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)  # noqa: FBT003 (plans per length, see `new_lengths`)
    draw = random.Random(0)  # noqa: S311 (lengths)
    lengths = [min(longest, max(2, int(draw.lognormvariate(middle, 0.8)))) for _ in range(num_batches * size)]
    dataset, packed = Texts(lengths), Packed(boundaries=True)

    def decoder() -> nn.Module:
        return new_model(
            lambda: Decoder(vocabulary=vocabulary, width=width, num_layers=num_layers, longest=longest), setting.device
        )

    def forever(make: Callable[[], list[Units]]) -> Iterator[Units]:
        while True:
            yield from make()

    def rebalanced(num_units: int) -> list[Units]:
        sampler = BatchRebalanceSampler(lengths, size, 1, num_units, shuffle=False)
        micro_batches = list(map(list, sampler))
        return [micro_batches[start : start + num_units] for start in range(0, len(micro_batches), num_units)]

    def grouped() -> list[Units]:
        sampler = LengthGroupedSampler(size, lengths=lengths, generator=torch.Generator().manual_seed(0))
        return [in_groups(ids, 8) for ids in in_groups(list(sampler), size)]

    cuts: dict[str, Callable[[], list[Units]]] = {
        "plain loop, arrival order, 8 samples": lambda: [
            in_groups(ids, 8) for ids in in_groups(range(len(lengths)), size)
        ],
        f"transformers batch_rebalance, {size // 8} micro-batches": lambda: rebalanced(size // 8),
        "transformers group_by_length, 8 samples": grouped,
    }
    ways = {name: Way(lengths, by_hand(decoder(), dataset, forever(cut), setting.device)) for name, cut in cuts.items()}
    engines = {}
    for name, collate in {"padded": Padded(), "packed": packed, "the faster": PaddedOrPacked(packed=packed)}.items():
        loss = ab.mean_over_tokens(packable_loss, labels="labels")
        engines[name] = engine_of(decoder(), loss, ab.token_budget(cap), precision="bf16")
        ways[f"token budget of {cap:,}, {name}"] = Way(lengths, by_budget(engines[name], dataset, collate, size))
    num_rounds = setting.pick(10, 4, 2)
    seconds = seconds_of(setting, ways, num_rounds)
    rates = {
        name: [tokens / taken for tokens, taken in zip(way.tokens[-num_rounds:], seconds[name], strict=True)]
        for name, way in ways.items()
    }
    first = next(iter(ways))
    for name, way in ways.items():
        decisions = engines[name.rpartition(", ")[2]].decisions if name.startswith("token") else {}
        yield Row(
            f"Log-normal lengths up to {longest}, {size} samples a step, decoder {width} x {num_layers} in bf16",
            {
                "way": name,
                "tokens/s, without padding": f"{statistics.median(rates[name]):,.0f}",
                "tokens/s / arrival order": ratio(rates[name], rates[first]),
                "padding": f"{statistics.median(way.waste):.0%}",
                "micro-batches": f"{statistics.median(way.num_units):.0f}",
                "step, ms": milliseconds(seconds[name]),
                "decided": "; ".join(decisions[key] for key in ("micro_batch_size", "layout") if key in decisions),
            },
        )
