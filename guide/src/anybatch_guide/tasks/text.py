"""`text`: sums in words, such as "two plus eleven is thirteen.", of very different lengths, as bytes."""

from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

import anybatch as ab
from anybatch.recipes.text import NUM_BYTE_VALUES, Transformer
from anybatch_guide.tasks.task import IGNORED, LabelledSamples, PlaygroundTask, loss

NUM_SENTENCES, NUM_HELD_OUT = 1_000, 200
CONTEXT = 56
_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty")


def task() -> PlaygroundTask:
    """Return the task: 1,000 sentences; predict each byte from the previous ones."""
    inputs, targets = encoded(sentences(NUM_SENTENCES + NUM_HELD_OUT, seed=0))
    return PlaygroundTask(
        name="text",
        num_classes=NUM_BYTE_VALUES,
        model=partial(Transformer, width=32, num_layers=2, num_heads=2),
        # Sentences have different lengths, so the mean is over bytes, not sentences.
        loss=ab.mean_over_tokens(loss, labels="targets", shift=False),
        rows=LabelledSamples(inputs[:NUM_SENTENCES], targets[:NUM_SENTENCES]),
        held_out=LabelledSamples(inputs[NUM_SENTENCES:], targets[NUM_SENTENCES:]),
    )


def sentences(number: int, *, seed: int) -> list[str]:
    """Return sums of one to three numbers below twenty, in words."""
    random = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(number):
        num_terms = int(torch.randint(1, 4, (), generator=random))
        terms = torch.randint(0, 20, (num_terms,), generator=random).tolist()
        texts.append(f"{' plus '.join(map(in_words, terms))} is {in_words(sum(terms))}.")
    return texts


def in_words(number: int) -> str:
    """Return a number below sixty in words."""
    if number < len(_UNITS):
        return _UNITS[number]
    tens, units = divmod(number, 10)
    return f"{_TENS[tens]}-{_UNITS[units]}" if units else _TENS[tens]


def encoded(texts: list[str]) -> tuple[Int[Tensor, "sentence byte"], Int[Tensor, "sentence byte"]]:
    """Return as inputs a newline and the bytes of each sentence, and as targets the byte after each input."""
    inputs = torch.zeros(len(texts), CONTEXT, dtype=torch.int64)
    targets = torch.full((len(texts), CONTEXT), IGNORED)
    for row, text in enumerate(texts):
        codes = torch.tensor(list(f"\n{text}\n".encode("ascii")))
        inputs[row, : len(codes) - 1] = codes[:-1]
        targets[row, : len(codes) - 1] = codes[1:]
    return inputs, targets
