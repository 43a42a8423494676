"""Numbers of short runs, to compare before and after a change that must not alter them.

Five steps for each strategy with each kind of loss, precision and BatchNorm policy, on two ranks ("single" on one).
Digests are bitwise, so compare them on one machine only; `run_numbers.json` holds numbers that any machine reproduces
up to rounding, and `test_run_numbers.py` compares them.

    python -m tests.engine.run_numbers > before.txt     # a digest for each run
    python -m tests.engine.run_numbers --write          # record run_numbers.json again
"""

import argparse
import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anybatch as ab
from anybatch.errors import CompositionError
from anybatch.parallel.dtensors import gather
from anybatch.testing import RankPool
from tests.engine.cases import CASES, NUM_CLASSES, NUM_FEATURES, Batch, InMemory, classify, vectors
from tests.engine.two_pass_cases import JOINT_CASES, pairs

RECORDED = Path(__file__).with_suffix(".json")
WORLD_SIZES = (1, 2)
STRATEGIES = ("single", "all_reduce", "ddp", "zero1", "fsdp")
LOSSES = (
    "ragged",
    "a sum",
    "masked tokens",
    "class weights",
    "two terms",
    "loss sum, undeclared",
    "one loss per sample",
)
NORMS = ("keep", "sync", "freeze", "exact")
PRECISIONS: Mapping[str, tuple[torch.dtype, Mapping[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16 autocast": (torch.float32, {"precision": "bf16"}),
    "bf16 weights": (torch.bfloat16, {}),
    "bf16 weights, split": (torch.bfloat16, {"bf16_weights": "split"}),
}
NUM_STEPS, MICRO_BATCH_SIZE = 5, 3
Numbers = dict[str, list[float]]


class NormalisedNetwork(nn.Module):
    """A classifier of vectors with a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)
        ).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


Run = tuple[Callable[[], nn.Module], Callable[[], Batch], Any, dict[str, Any]]


def runs() -> dict[str, Run]:
    """Return the runs by name: a model, a batch, a loss and the options of the engine."""
    found: dict[str, Run] = {name: (CASES[name].model, CASES[name].batch, CASES[name].loss, {}) for name in LOSSES}
    for name in ("clip", "triplet"):
        case = JOINT_CASES[name]
        found[name] = (case.model, pairs, ab.joint(case.encode, case.loss()), {})
    declared = ab.mean_over_samples(classify)
    for norms in NORMS:
        found[f"norms {norms}"] = (NormalisedNetwork, lambda: vectors(29), declared, {"norms": norms})
    return found | {name: _in_precision(dtype, options) for name, (dtype, options) in PRECISIONS.items()}


def _in_precision(dtype: torch.dtype, options: Mapping[str, Any]) -> Run:
    case = CASES["ragged"]

    def batch() -> Batch:
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in case.batch().items()}

    return lambda: case.model().to(dtype), batch, case.loss, dict(options)


def numbers_of_rank(strategies: tuple[str, ...]) -> dict[str, tuple[str, list[float]]]:
    """Run on every rank: return a digest, and losses and norms, of each run."""
    world = ab.World.from_environment()
    found: dict[str, tuple[str, list[float]]] = {}
    for strategy in strategies:
        for name, run in runs().items():
            try:
                found[f"{strategy}, {name}"] = _numbers(strategy, run, world)
            except CompositionError as refused:  # such as bf16 weights under DDP
                found[f"{strategy}, {name}"] = (type(refused).__name__, [])
    return found


def _numbers(strategy: str, run: Run, world: ab.World) -> tuple[str, list[float]]:
    digest, numbers = hashlib.sha256(), []
    model, batch, loss, options = run[0](), run[1](), run[2], run[3]
    with ab.Engine(
        model,
        lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        copy.deepcopy(loss),
        micro_batch_size=MICRO_BATCH_SIZE,
        strategy=strategy,
        world=world,
        check_loss=False,
        **options,
    ) as engine:
        for gradient in engine.gradients(InMemory(batch)).values():
            if gradient is not None:
                digest.update(gather(gradient).detach().double().contiguous().numpy().tobytes())
        for _ in range(NUM_STEPS):
            report = engine.step(InMemory(batch))
            numbers += [float(report.loss), float(report.grad_norm or 0.0)]
        for parameter in model.parameters():
            whole = gather(parameter).detach()
            digest.update(whole.double().contiguous().numpy().tobytes())
            numbers.append(float(whole.double().square().sum()))
    digest.update(json.dumps(numbers).encode())
    return digest.hexdigest()[:16], numbers


def measured(world_size: int) -> dict[str, tuple[str, list[float]]]:
    """Return the results of rank 0 in a world of this size."""
    strategies = STRATEGIES[:1] if world_size == 1 else STRATEGIES[1:]
    with RankPool(world_size) as pool:
        found: dict[str, tuple[str, list[float]]] = pool.run(numbers_of_rank, strategies)[0]
    return {f"{world_size} ranks, {name}": value for name, value in found.items()}


def main() -> None:
    """Print the digests, or record the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    found = {name: value for size in WORLD_SIZES for name, value in measured(size).items()}
    if parser.parse_args().write:
        lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, (_, numbers) in found.items()]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, (digest, _) in found.items():
        print(digest, name)  # noqa: T201 (a program)


if __name__ == "__main__":
    main()
