"""The code path of a steady step: files, calls, and calls without an effect.

One micro-batch per rank, `ab.batches`, no observer. Counted with `sys.setprofile` after the first steps; comprehensions
are left out, and so are calls in threads. A call is idle if it returns None or one of its arguments, changes no
attribute of its object, and calls nothing of anybatch and no C function other than lookups.

    python benchmarks/step_path.py [--ranks 2] [--list]
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

import torch
from torch import nn

import anybatch as ab
from anybatch.testing import RankPool

PACKAGE: Final = str(Path(ab.__file__).parent)
LOOKUPS: Final = frozenset({"isinstance", "len", "getattr", "hasattr", "get", "values", "items", "keys", "type", "id"})
"""C functions that change nothing."""
WARM_UP_STEPS: Final = 20  # the loss check runs again in steps 4, 8 and 16
Call = tuple[str, str]


class CallCounter:
    """Counts the calls of anybatch's own functions while it is the profile function.

    Attributes:
        calls: how often each function was called, by file and name.
        idle: how many of these calls were idle.
    """

    def __init__(self) -> None:
        self.calls: Counter[Call] = Counter()
        self.idle: Counter[Call] = Counter()
        self._open: list[tuple[FrameType, dict[str, int], list[int]]] = []
        self._busy: set[int] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Handle one event of `sys.setprofile`."""
        if event == "c_call" and getattr(argument, "__name__", "") not in LOOKUPS:
            self._busy.add(id(frame))
        name = frame.f_code.co_name
        is_own = frame.f_code.co_filename.startswith(PACKAGE) and (name[0] != "<" or name == "<lambda>")
        if not is_own:
            return
        if event == "call":
            if self._open:
                self._busy.add(id(self._open[-1][0]))
            arguments = [id(value) for value in frame.f_locals.values()]
            self._open.append((frame, _state(frame), arguments))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, before, arguments = self._open.pop()
            call = (frame.f_code.co_filename.removeprefix(PACKAGE + "/"), frame.f_code.co_qualname)
            self.calls[call] += 1
            is_busy = id(frame) in self._busy
            self._busy.discard(id(frame))
            if (
                name != "__init__"
                and not is_busy
                and (argument is None or id(argument) in arguments)
                and before == _state(frame)
            ):
                self.idle[call] += 1


def _state(frame: FrameType) -> dict[str, int]:
    """Return the identities of the attributes of the object whose method runs."""
    own = frame.f_locals.get("self")
    return {name: id(value) for name, value in vars(own).items()} if hasattr(own, "__dict__") else {}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over samples."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def count(ranks: int) -> CallCounter:
    """Return the calls of one steady step of this process."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "y": index % 3} for index in range(64)]
    model = nn.Linear(4, 3)
    counter = CallCounter()
    with ab.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ab.mean_over_samples(loss), micro_batch_size=8
    ) as engine:
        batches = iter(ab.batches(samples, effective_batch_size=8 * ranks, epochs=100))
        for _ in range(WARM_UP_STEPS):
            engine.step(next(batches))
        sys.setprofile(counter)
        try:
            engine.step(next(batches))
        finally:
            sys.setprofile(None)
    return counter


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="list the calls, idle ones with their number")
    given = parser.parse_args()
    if given.ranks == 1:
        counter = count(1)
    else:
        with RankPool(given.ranks) as pool:
            counter = pool.run(count, given.ranks)[0]
    files = {file for file, _ in counter.calls}
    print(f"{len(files)} files, {counter.calls.total()} calls, {counter.idle.total()} idle calls")
    if given.ranks == 1:
        print(f"{sum(name.split('.')[0] == 'anybatch' for name in sys.modules)} modules of anybatch imported")
    if given.list:
        for (file, name), number in sorted(counter.calls.items()):
            print(f"{file}:{name} {number}, idle {counter.idle[file, name]}")


if __name__ == "__main__":
    main()
