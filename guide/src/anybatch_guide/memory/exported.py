"""Envelopes of memory as whole numbers that travel as JSON: what is held at every micro-batch size, in a few kB.

A step of GPT-2 takes and lets go some 1,900 pieces of memory, of about 90 kinds: layers repeat. So a kind is written
once, with its size as a line `a + b m`, and the order in which pieces come and go as a sequence of small numbers:

- `n > 0`: the next n pieces are taken;
- `-r < 0`: of what is held, the piece that was taken last but r - 1 is let go.

Counted from the top, what a layer lets go is the same in every layer, so both sequences repeat and are packed:
`[..., 0, back, length, ...]` stands for `length` numbers, copied one by one from `back` places before the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from anybatch.memory.trace import Allocation, Category, MemoryEnvelope, MemoryTrace, Phase, Polynomials

Kind = tuple[int, int, Category, Phase, str]
"""Bytes of a piece of memory as constant and slope, what it is held for, when it is taken, and by what."""
_LEAST = 4
"""Fewer numbers are not worth a copy, which takes three."""
_FAR = 64
"""How many earlier places are looked at for the longest copy."""


def as_numbers(envelopes: Sequence[MemoryEnvelope], kinds: dict[Kind, int]) -> dict[str, Any]:
    """Return envelopes whose sizes are lines as JSON can hold them; `envelopes_of` is the way back.

    They are packed together, since the first step is mostly like the others. Marks are left out.

    Args:
        envelopes: of steps of the same program.
        kinds: kinds that are known, with their numbers; those that are new are added.
    """
    assert all(one.is_affine for one in envelopes), "a size is no line"
    pieces = [_pieces_of(one, kinds) for one in envelopes]
    moves = [list(_from_the_top(one.trace.events)) for one in envelopes]
    return {
        "traced": list(envelopes[0].traced),
        "num_pieces": [len(one) for one in pieces],
        "num_moves": [len(one) for one in moves],
        "pieces": packed([number for one in pieces for number in one]),
        "moves": packed([number for one in moves for number in one]),
    }


def envelopes_of(numbers: Mapping[str, Any], kinds: Sequence[Kind]) -> list[MemoryEnvelope]:
    """Return the envelopes that were written as numbers."""
    pieces, moves = unpacked(numbers["pieces"]), unpacked(numbers["moves"])
    found = []
    for num_pieces, num_moves in zip(numbers["num_pieces"], numbers["num_moves"], strict=True):
        own = [kinds[number - 1] for number in pieces[:num_pieces]]
        found.append(_envelope(own, tuple(_by_number(moves[:num_moves])), tuple(numbers["traced"])))
        pieces, moves = pieces[num_pieces:], moves[num_moves:]
    return found


def _pieces_of(envelope: MemoryEnvelope, kinds: dict[Kind, int]) -> list[int]:
    lines = zip(envelope.allocated.constant.tolist(), envelope.allocated.slope.tolist(), strict=True)
    return [
        kinds.setdefault((constant, slope, one.category, one.phase, one.operation), len(kinds) + 1)
        for one, (constant, slope) in zip(envelope.trace.allocations, lines, strict=True)
    ]


def _envelope(pieces: Sequence[Kind], events: tuple[int, ...], traced: tuple[int, ...]) -> MemoryEnvelope:
    constant, slope = (torch.tensor([cast("int", kind[place]) for kind in pieces]) for place in (0, 1))
    sizes = Polynomials(constant, slope, torch.zeros_like(slope))
    allocations = tuple(
        Allocation(constant + slope * traced[0], category, phase, operation)
        for constant, slope, category, phase, operation in pieces
    )
    signs = torch.tensor(events)
    return MemoryEnvelope(
        MemoryTrace(allocations, events), sizes, sizes.running_sums(signs.sign(), signs.abs() - 1), traced
    )


def _from_the_top(events: Sequence[int]) -> Iterator[int]:
    """Yield how many pieces are taken in a row, or, below 0, which of those that are held is let go."""
    held: list[int] = []
    num_taken = 0
    for event in events:
        if event > 0:
            held.append(event)
            num_taken += 1
            continue
        if num_taken:
            yield num_taken
            num_taken = 0
        place = len(held) - 1 - held[::-1].index(-event)
        yield place - len(held)
        del held[place]
    if num_taken:
        yield num_taken


def _by_number(moves: Sequence[int]) -> Iterator[int]:
    """Yield events as a trace has them: `n` where piece number `n - 1` is taken, `-n` where it is let go."""
    held: list[int] = []
    num_taken = 0
    for move in moves:
        if move < 0:
            yield -held.pop(move)
            continue
        for number in range(num_taken + 1, num_taken + move + 1):
            held.append(number)
            yield number
        num_taken += move


def packed(numbers: Sequence[int]) -> list[int]:
    """Return numbers other than 0 with repetitions as copies of what came before."""
    starts: dict[tuple[int, ...], list[int]] = {}
    out: list[int] = []
    place = num_indexed = 0
    while place < len(numbers):
        while num_indexed < place:
            starts.setdefault(tuple(numbers[num_indexed : num_indexed + _LEAST]), []).append(num_indexed)
            num_indexed += 1
        near = starts.get(tuple(numbers[place : place + _LEAST]), [])[-_FAR:]
        length, start = max(((_num_alike(numbers, one, place), one) for one in near), default=(0, 0))
        if length < _LEAST:
            out.append(numbers[place])
            place += 1
        else:
            out += [0, place - start, length]
            place += length
    return out


def unpacked(numbers: Sequence[int]) -> list[int]:
    """Return the numbers that were packed."""
    out: list[int] = []
    place = 0
    while place < len(numbers):
        if numbers[place]:
            out.append(numbers[place])
            place += 1
            continue
        _, back, length = numbers[place : place + 3]
        for _ in range(length):
            out.append(out[-back])
        place += 3
    return out


def _num_alike(numbers: Sequence[int], start: int, place: int) -> int:
    """Return how many numbers from `place` on are as those from `start` on."""
    length = 0
    while place + length < len(numbers) and numbers[start + length] == numbers[place + length]:
        length += 1
    return length
