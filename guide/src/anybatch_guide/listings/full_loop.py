"""The full loop: three steps of a small language model on 64 sentences, in micro-batches of 16, written to a log.

python -m anybatch_guide.listings.full_loop loop.jsonl    prints the log, then the step times of several splits
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import anybatch as ab
from anybatch.core.records import Observer
from anybatch.events.jsonl import read_jsonl
from anybatch.recipes.planning.decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    model_type="gpt2",
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=256,
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def sentences(num_sentences: int) -> list[dict[str, Tensor]]:
    """Return sentences of up to 48 tokens that count up by 1, 2 or 3; labels are -100 after the end."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 49, (num_sentences, 1), generator=random)
    tokens = torch.randint(1, 4, (num_sentences, 49), generator=random).cumsum(dim=1) % 64
    labels = tokens[:, 1:].where(torch.arange(48) < lengths, -100)
    return [{"tokens": x, "labels": y} for x, y in zip(tokens[:, :-1], labels, strict=True)]


def make_model() -> Decoder:
    """Return a transformer with two layers, always with the same initial weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Decoder(CONFIG)


def token_loss(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the targets; every micro-batch has a different number of them."""
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def train(num_steps: int, observer: Observer | None, model: Decoder) -> list[float]:
    """Return the losses of the engine's first steps with 16 x 4 = 64 samples."""
    loss = ab.mean_over_tokens(token_loss, shift=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=16, clip=0.5, observer=observer)
    batches = ab.batches(sentences(256), effective_batch_size=64, steps=num_steps, shuffle=False)
    return [float(engine.step(batch).loss) for batch in batches]


def by_hand(size: int | None) -> Callable[[], None]:
    """Return one step in plain PyTorch: all 64 samples in one pass, or `size` at a time."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = torch.utils.data.default_collate(sentences(64))
    num_targets = (batch["labels"] != -100).sum()

    def step() -> None:
        for rows in torch.arange(64).split(size or 64):
            logits = model(batch["tokens"][rows]).flatten(0, 1)
            loss_sum = cross_entropy(logits, batch["labels"][rows].flatten(), reduction="sum")
            (loss_sum / num_targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_engine(size: int) -> Callable[[], None]:
    """Return the same step, made by the engine."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = ab.mean_over_tokens(token_loss, shift=False)
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=size, clip=0.5)
    batch = torch.utils.data.default_collate(sentences(64))

    def step() -> None:
        engine.step(batch)

    return step


def measured(steps: dict[str, Callable[[], None]], rounds: int, pause: Callable[[], None]) -> dict[str, list[float]]:
    """Return the step times of each way; rounds are interleaved, so that a busy machine slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-2, rounds):
        for name, step in steps.items():
            pause()
            start = time.perf_counter()
            step()
            if number >= 0:  # two rounds to warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ways() -> dict[str, Callable[[], None]]:
    """Return the compared steps: without accumulation, with accumulation by hand, and the engine's."""
    hand = {"by hand 64 x 1": by_hand(None), "by hand 16 x 4": by_hand(16)}
    return hand | {f"engine {size} x {64 // size}": by_engine(size) for size in (64, 16, 4, 1)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    with ab.JsonlLog(path) as log:
        print("losses", *train(3, log, make_model()))
    for line in read_jsonl(path):
        print(line)
    seconds = measured(ways(), 20, lambda: None)
    native = statistics.median(seconds["by hand 64 x 1"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:16} {middle * 1000:7.1f} ms  {middle / native:.2f} of native")
