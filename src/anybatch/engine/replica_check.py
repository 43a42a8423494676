"""Whether replicas are still equal: a checksum of all weights, compared over ranks every so many steps.

Ranks start equal and make the same updates, so their weights are equal bit for bit on equal hardware. What parts them
is an update that one rank alone has made, or weights that were changed on one rank only. Under tensor parallelism parts
of weights are compared with the same parts on other ranks, and whole weights over all processes.

The checksum is one sum per tensor. On a model of 10 million parameters (40 MB) it takes 2 to 3 ms on one core, and with
a comparison every 100 steps 0.03 ms per step, which is 0.1% of a step of 30 ms.
"""

from collections.abc import Mapping
from typing import NoReturn

import torch

from anybatch.errors import DoesNotFitError, ReplicaError
from anybatch.parallel.local_parts import is_whole, local_part
from anybatch.parallel.world import World

STEPS_BETWEEN = 100
_MOST_NAMES = 3
_UNLIKE = (
    "; or a layer whose weights are plain runs on a part of its input (a norm left out of a sequence-parallel plan)"
)
_PIECE_BYTES = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # a signed number, since torch computes with signed 64-bit integers only


class ReplicaCheck:
    """Compares the weights of replicas.

    Args:
        world: the ranks.
        weights: trained and frozen ones, by name.
        enabled: whether the strategy keeps whole replicas.
    """

    def __init__(self, world: World, weights: Mapping[str, torch.Tensor], *, enabled: bool) -> None:
        self._world = world
        self._weights = weights
        self._enabled = enabled and world.roll_call is not None
        self._seen_equal: int | None = None
        self._pending: int | None = None

    def digests(self, step: int) -> tuple[int, int]:
        """Return checksums of 20 bits of the weights before a step, of whole ones and of parts; 0 in most steps.

        Where several processes run a model together, also before the second step: a layer that they do not run alike,
        such as a norm that was left out of a sequence-parallel plan, has other gradients on each.

        On an accelerator this waits for the device, which has then made the step before.
        """
        # What was compared in the last message has not been refused.
        self._seen_equal, self._pending = self._pending if self._pending is not None else self._seen_equal, None
        if not self._enabled or (step % STEPS_BETWEEN and not (step == 1 and self._world.has_model_groups)):
            return 0, 0
        self._pending = step
        whole, parts = self._totals(step)
        return _fold(whole), _fold(parts)

    def compare(self, step: int) -> None:
        """Compare all weights at once: before they are saved, or evaluated.

        Raises:
            ReplicaError: on all ranks, with the names of those that differ.
        """
        if not self._enabled:
            return
        rows = self._world.gather_from_processes(self._totals(step))
        if any(rows[one] != rows[group[0]] for group in self._world.data_groups for one in group) or (
            len({whole for whole, _ in rows}) > 1
        ):
            self.refuse(step)
        self._seen_equal, self._pending = step, None

    def differing(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names of the weights that differ, and the processes where they are others than on the first."""
        if not self._enabled:
            return (), ()
        weights = [local_part(weight) for weight in self._weights.values()]
        rows = self._world.gather_from_processes(checksums(weights).tolist())
        # With what each process is compared: whole weights with the first one's, parts with those of its data group.
        first = {process: group[0] for group in self._world.data_groups for process in group}
        names, processes = [], set()
        for number, (name, weight) in enumerate(self._weights.items()):
            other = {
                p for p, row in enumerate(rows) if row[number] != rows[0 if is_whole(weight) else first[p]][number]
            }
            if other:
                names.append(name)
                processes |= other
        return tuple(names), tuple(sorted(processes))

    def _totals(self, step: int) -> tuple[int, int]:
        """Return the checksums of whole weights and of parts.

        Raises:
            DoesNotFitError: memory ran out.
        """
        by_kind: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for weight in self._weights.values():
            by_kind[0 if is_whole(weight) else 1].append(local_part(weight))
        try:
            whole, parts = (int(checksums(weights).sum()) if weights else 0 for weights in by_kind)
        except torch.OutOfMemoryError as error:
            message = (
                f"out of memory before step {step} (counted from 0), while the weights of the ranks were compared. "
                "Parameters and optimizer are as before the step. Other tensors fill the device of this rank: free "
                f"what your program keeps there. torch says: {str(error).partition(chr(10))[0]}"
            )
            raise DoesNotFitError(message, rank=self._world.process, step=step) from None
        return whole, parts

    def refuse(self, step: int) -> NoReturn:
        """Refuse to go on with replicas that differ, on all ranks.

        Raises:
            ReplicaError: with the names of the weights that differ.
        """
        names, ranks = self.differing()
        # A comparison that is on its way has come through, unless it is this one.
        equal = self._seen_equal if self._pending in (None, step) else self._pending
        seen = "were not compared before" if equal is None else f"were equal before step {equal}"
        some = ", ".join(map(repr, names[:_MOST_NAMES])) + ", ..." * (len(names) > _MOST_NAMES)
        message = (
            f"replicas differ before step {step}: {len(names)} of {len(self._weights)} weights ({some}) are others on "
            f"rank {', '.join(map(str, ranks))} than on rank 0; they {seen}. Something was changed on one rank only: "
            "weights, an optimizer, or an update that failed there"
            f"{_UNLIKE if self._world.has_model_groups else ''}. Change weights alike on every rank. To go on, call "
            "engine.align_replicas() on every rank, which takes the state of rank 0, or engine.load."
        )
        raise ReplicaError(message, ranks=ranks, names=names)


@torch.no_grad()
def checksums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the checksum of each tensor, on the device: its bits, summed as whole numbers modulo 2**64.

    Any single number that changes changes it, and numbers that swap places do not; it is for weights that drift.
    """
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    # Each times an odd number of its own, so that tensors which swap places show.
    return torch.stack([one * (_ODD * (2 * number + 1) % (1 << 63)) for number, one in enumerate(sums)])


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if plain.is_contiguous():
        return _sum_of_flat(plain.view(-1))
    # Channels-last weights, for example: copied in pieces of some rows, eight at least, so that words stay whole.
    num_rows = max(1, _PIECE_BYTES * len(plain) // (8 * max(1, plain.nbytes))) * 8
    pieces = [_sum_of_flat(piece.contiguous().view(-1)) for piece in plain.split(num_rows)]
    return torch.stack(pieces).sum()


def _sum_of_flat(flat: torch.Tensor) -> torch.Tensor:
    size = flat.itemsize
    # As words of 8 bytes, as far as they go: torch sums these many times faster than narrower ones.
    num_in_words = 0 if flat.storage_offset() * size % 8 else flat.numel() * size // 8 * (8 // size)
    total = flat[:num_in_words].view(torch.int64).sum()
    if num_in_words < flat.numel():
        total = total + flat[num_in_words:].view(_BITS[size]).sum(dtype=torch.int64)
    return total


def _fold(number: int) -> int:
    """Return 20 bits that depend on all 64."""
    number &= (1 << 64) - 1
    return (number ^ number >> 20 ^ number >> 40 ^ number >> 60) & 0xFFFFF
