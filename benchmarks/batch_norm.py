"""Compare each BatchNorm policy with the native batch: its remaining error and its cost.

A residual network with smooth activations and 16 BatchNorm layers learns 256 images in micro-batches of 8, in float64.
Errors are relative, over all parameters and over all running means and variances. The function that a policy computes
on the unsplit batch is its "own function". Time is this process's, as a ratio to interleaved native steps
(median and quartiles). Memory is the peak of the outputs of operations that have not been freed: activations and
gradients, not parameters and inputs. It excludes the copies of "offloaded" on the host, which have their own column.

torch's SyncBatchNorm does not run on CPUs: norms='sync' is the same formula, over gloo.

    python benchmarks/batch_norm.py [--out benchmarks/results/NAME.md]
"""

import copy
import gc
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch as ab
from anybatch.norms import Exact, Ghost, replaced
from anybatch.norms.exact import _HostCopy
from anybatch.testing import RankPool, relative_error

sys.path.insert(0, str(Path(__file__).parents[1]))  # the network comes from the tests
from tests.engine.cases import Batch, cut
from tests.norms.residual import classify, images, network

NUM_IMAGES, MICRO_BATCH_SIZE, SIDE, NUM_ROUNDS = 256, 8, 12, 7
MIB = 2**20
Step = Callable[[], None]
Tensors = dict[str, torch.Tensor | None]
POLICIES: Mapping[str, Any] = {
    "keep": "keep",
    "freeze": "freeze",
    "Ghost(group_size=8)": Ghost(8),
    "exact": Exact(offload=False),
    "exact, offloaded": Exact(offload=True),
    "Exact(method='checkpoint')": Exact(method="checkpoint"),
}


class OutputBytes(TorchDispatchMode):
    """Counts the bytes of operations' outputs in this thread, until they are freed."""

    def __init__(self, tally: "Tally") -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operation and count its outputs."""
        del types
        output = func(*args, **(kwargs or {}))
        for item in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(item, torch.Tensor):
                self._tally.add(item.untyped_storage())
        return output


class Tally:
    """Bytes of outputs that have not been freed, over all threads, and their peak."""

    def __init__(self) -> None:
        self.peak = self._now = self.on_host = 0
        self._known: set[int] = set()
        self._lock = threading.RLock()
        self._aside = threading.local()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage once."""
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or getattr(self._aside, "on", False):
            return
        with self._lock:
            if key in self._known:
                return
            self._known.add(key)
            self._now += size
            self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        with self._lock:
            self._known.discard(key)
            self._now -= size

    @contextmanager
    def host_copies_separately(self) -> Iterator[None]:
        """Count the bytes that the policy copies to the host separately."""
        original = _HostCopy.__init__

        def counted(copied: _HostCopy, tensor: torch.Tensor) -> None:
            self._aside.on = True
            original(copied, tensor)
            self._aside.on = False
            self.on_host += tensor.numel() * tensor.itemsize

        with mock.patch.object(_HostCopy, "__init__", counted):
            yield


TALLIES: list[Tally] = []


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy; count in any thread while there is a tally."""
    if not TALLIES or threading.current_thread() is threading.main_thread():
        return classify(model, batch)
    with OutputBytes(TALLIES[-1]):
        return classify(model, batch)


def make_batch() -> Batch:
    """Return the effective batch."""
    return images(NUM_IMAGES, side=SIDE)


def new_net() -> nn.Module:
    """Return the network."""
    return network(width=8, depth=5)


def running(model: nn.Module) -> Tensors:
    """Return copies of all running means and variances."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def gradients(model: nn.Module) -> Tensors:
    """Return copies of all gradients."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


class KeepGradients(torch.optim.SGD):
    """An optimizer that keeps the gradients of its last step."""

    def step(self, closure: Any = None) -> None:  # noqa: ANN401
        """Keep the gradients."""
        del closure
        self.kept = [None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]


class Subject:
    """One row of the table: runs a step on the full batch, always from the same state."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module], Tensors]) -> None:
        self.model = model
        self._step = step
        self._state = copy.deepcopy(model.state_dict())

    def step(self) -> tuple[Tensors, Tensors]:
        """Return gradients and running statistics."""
        self.model.load_state_dict(self._state)
        found = self._step(self.model)
        return found, running(self.model)

    def seconds(self) -> float:
        """Return this process's time for one step."""
        begin = time.process_time()
        self.step()
        return time.process_time() - begin

    def memory(self) -> tuple[float, float]:
        """Return the peak of bytes that are not freed, and the bytes copied to the host, in MiB."""
        gc.collect()
        TALLIES.append(Tally())
        with TALLIES[-1].host_copies_separately(), OutputBytes(TALLIES[-1]):
            self.step()
        tally = TALLIES.pop()
        return tally.peak / MIB, tally.on_host / MIB


def native(model: nn.Module) -> Tensors:
    """Return the row that runs the unsplit batch in plain torch."""
    model.zero_grad()
    classify(model, make_batch()).backward()
    return gradients(model)


def plain_loop(model: nn.Module) -> Tensors:
    """Return the row that accumulates in plain torch, where every micro-batch updates the running statistics."""
    model.zero_grad()
    batch = make_batch()
    for start in range(0, NUM_IMAGES, MICRO_BATCH_SIZE):
        (classify(model, cut(batch, start, start + MICRO_BATCH_SIZE)) * (MICRO_BATCH_SIZE / NUM_IMAGES)).backward()
    return gradients(model)


def by_engine(model: nn.Module, norms: Any, size: int | None, world: ab.World | None = None) -> Subject:  # noqa: ANN401
    """Return the row of the engine under a policy."""
    optimizer = KeepGradients(model.parameters())
    engine = ab.Engine(
        model,
        optimizer,
        ab.mean_over_samples(loss),
        micro_batch_size=size,
        norms=norms,
        measure_gradient_norm=False,
        world=world,
    )
    names = [name for name, _ in model.named_parameters()]
    batch = make_batch()

    def step(_: nn.Module) -> Tensors:
        size, rank = engine.world.size, engine.world.rank
        engine.step(cut(batch, NUM_IMAGES * rank // size, NUM_IMAGES * (rank + 1) // size))
        return dict(zip(names, optimizer.kept, strict=True))

    return Subject(model, step)


def on_two_ranks(norms: str, sizes: list[int | None]) -> list[tuple[float, float, float, float]]:
    """Run on every rank: return errors, time and memory by size, relative to the native batch."""
    world = ab.World.from_environment()
    reference = Subject(new_net(), native)
    expected, statistics_expected = reference.step()
    rows = []
    for size in sizes:
        subject = by_engine(new_net(), norms, size, world)
        found, own = subject.step()
        errors = relative_error(found, expected), relative_error(own, statistics_expected)
        rows.append((*errors, 2 * subject.seconds() / reference.seconds(), subject.memory()[0]))
    return rows


def ratio(subject: Subject, reference: Subject) -> str:
    """Return the median and quartiles of the ratios of neighboring times."""
    subject.step()
    reference.step()
    ratios = [subject.seconds() / reference.seconds() for _ in range(NUM_ROUNDS)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def written(error: float) -> str:
    """Return an error as text."""
    return "0" if error == 0 else f"{error:.0e}"


def subjects() -> dict[str, tuple[Subject, Subject | None]]:
    """Return each row, with the function that its policy computes on the unsplit batch if it is not the native one."""
    rows: dict[str, tuple[Subject, Subject | None]] = {"loop in plain torch": (Subject(new_net(), plain_loop), None)}
    for name, norms in POLICIES.items():
        whole = by_engine(new_net(), norms, None)
        rows[name] = by_engine(new_net(), norms, MICRO_BATCH_SIZE), whole
    for kind in ("group_norm", "layer_norm"):
        models = [replaced(new_net(), kind).model for _ in range(2)]
        rows[f"replaced by {kind}"] = by_engine(models[0], "keep", MICRO_BATCH_SIZE), Subject(models[1], native)
    return rows


def table() -> list[str]:
    """Return the table."""
    reference = Subject(new_net(), native)
    expected, statistics_expected = reference.step()
    memory = reference.memory()[0]
    lines = [
        (
            "| policy | gradient, against the native batch | against its own function | running statistics | "
            "time / native | peak MiB | on the host, MiB |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|",
        f"| native batch | 0 | 0 | 0 | 1 | {memory:.1f} | 0 |",
    ]
    for name, (subject, whole) in subjects().items():
        found, own = subject.step()
        same = "" if set(found) != set(expected) else written(relative_error(found, expected))
        itself = written(relative_error(found, whole.step()[0])) if whole else ""
        moved = written(relative_error(own, statistics_expected)) if set(own) == set(statistics_expected) else "none"
        peak, on_host = subject.memory()
        lines.append(
            f"| {name} | {same} | {itself} | {moved} | {ratio(subject, reference)} | {peak:.1f} | {on_host:.1f} |"
        )
    return lines


def table_of_ranks() -> list[str]:
    """Return the table of two ranks, which normalize together."""
    lines = [
        "",
        "On 2 ranks, a half of the batch each (time: of both ranks' processes, one step, not repeated):",
        "",
        (
            "| policy | micro-batch | gradient, against the native batch | running statistics | time / native | "
            "peak MiB of a rank |"
        ),
        "|---|--:|--:|--:|--:|--:|",
    ]
    with RankPool(2) as pool:
        for norms in ("keep", "sync", "exact"):
            found = pool.run(on_two_ranks, norms, [MICRO_BATCH_SIZE, NUM_IMAGES // 2])[0]
            for size, row in zip((MICRO_BATCH_SIZE, NUM_IMAGES // 2), found, strict=True):
                errors, costs = " | ".join(map(written, row[:2])), f"{row[2]:.2f} | {row[3]:.1f}"
                lines.append(f"| {norms} | {size} | {errors} | {costs} |")
    return lines


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.set_num_threads(1)
    num_layers = sum(isinstance(module, _BatchNorm) for module in new_net().modules())
    report.publish(
        [*table(), *table_of_ranks(), ""],
        title="BatchNorm under accumulation",
        command="python benchmarks/batch_norm.py",
        setting=f"1 thread, float64, {num_layers} BatchNorm layers, {NUM_IMAGES} images of {SIDE} x {SIDE} in "
        f"micro-batches of {MICRO_BATCH_SIZE}",
        out=out,
    )


if __name__ == "__main__":
    main()
