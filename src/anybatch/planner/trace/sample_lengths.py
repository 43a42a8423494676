"""Samples of any number of tokens, where that number is ours to choose, and models that run as many operations."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.core.loss import declared
from anybatch.core.tree import Batch, resize_samples
from anybatch.engine.spec import TrainSpec
from anybatch.memory.torch_internals import TorchDispatchMode
from anybatch.planner.trace.cuda_emulation import Profile, allocating_as

_LEAST_CHUNKS = 8
_LEAST_CPU_TOKENS = 64
_NUM_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLengths:
    """A sample of any number of tokens.

    Attributes:
        sample: function tokens -> a batch of one sample of so many.
        num_tokens: of the sample that is planned for.
        chunk_tokens: a model takes so many at a time; 1 where it takes them one by one, or all at once.
    """

    sample: Callable[[int], Batch]
    num_tokens: int
    chunk_tokens: int = 1

    def short(self, profile: Profile, times: int = 1) -> tuple[int, int, int, int]:
        """Return three lengths, each a chunk longer than the one before, and a longer one to compare with, in tokens.

        Args:
            profile: whose step is traced. On a CPU kernels are asked for their workspaces, and for a few tokens they
                compute in other ways.
            times: the three are so many times as long.
        """
        least = max(_LEAST_CHUNKS, _LEAST_CPU_TOKENS // self.chunk_tokens if profile == "cpu" else 0)
        # A sample of 64 tokens is no shorter than a chunk that a configuration does not name, as a rule.
        chunks = (0, 1, 2, max(4, 64 // self.chunk_tokens))
        # What is left over of the last chunk is the same in all.
        rest = self.num_tokens % self.chunk_tokens
        first, second, third, last = ((times * least + more) * self.chunk_tokens + rest for more in chunks)
        return first, second, third, last


def operations_per_chunk(train: TrainSpec, lengths: TokenLengths, profile: Profile) -> int:
    """Return how many operations more a forward has where a sample is a chunk longer: 0 where tokens run together.

    It is run on the meta device, which takes a fifth of the time of tensors that know their device.

    Args:
        train: what is trained, its model made without memory; of another model nothing is found, and 0 returned.
        lengths: of its samples.
        profile: the device type whose operations these are.
    """
    loss = declared(train.loss)
    # Whatever does not run here is found, and said, where the step is traced.
    try:
        model = copy.deepcopy(train.model)
        counts = list[int]()
        for num_tokens in lengths.short("cuda")[:2]:
            sample = lengths.sample(num_tokens)
            batch = resize_samples(
                sample, _NUM_SAMPLES, lambda one: one.expand(_NUM_SAMPLES, *one.shape[1:]).to("meta")
            )
            with torch.no_grad(), allocating_as(profile), _Count() as count:
                loss.function(model, batch)
            counts.append(count.num_operations)
    except Exception:  # noqa: BLE001 (of whatever kind the model's own is)
        return 0
    return counts[1] - counts[0]


class _Count(TorchDispatchMode):
    """Counts operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's types have no names in public)
        """Count an operation, and run it; make up a number that it reads, as there are none."""
        del types
        self.num_operations += 1
        if func.__name__ == "_local_scalar_dense.default":
            return args[0].dtype is not torch.bool
        return func(*args, **(kwargs or {}))
