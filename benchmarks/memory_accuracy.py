"""Memory planned without data against memory allocated: the same engine and step, on a CPU.

Planned: two traces without data, at micro-batch sizes 2 and 3, and the extrapolation from them. Allocated: the real
engine runs two steps under torch's profiler, which sees every allocation of the CPU allocator in every thread; the
figure is the peak of allocated bytes during the second step. Next to it is the peak of the same run's tensors by the
ledger; kernels allocate the rest for internal use and free it before they return. Two micro-batches a step, at sizes
that were not traced.

    python benchmarks/memory_accuracy.py [--only WORD] [--out benchmarks/results/NAME.md]
"""

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import report
import torch
from torch import nn
from torch.autograd import profiler_legacy
from torch.nn import functional
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.engine.arguments import TrainSpec
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryEnvelope, fit
from anybatch.planner.step_spec import NUM_MICRO_BATCHES, StepSpec
from anybatch.planner.step_trace import trace_step
from anybatch.testing import RankPool

MEBIBYTE = 2**20
VOCABULARY = 4096
SECOND_STEP = "second step"
Batch = dict[str, torch.Tensor]
Named = Iterable[tuple[str, nn.Parameter]]


class Block(nn.Module):
    """A transformer block: attention and a perceptron, each after a norm and with a skip connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the same shape (samples, tokens, width)."""
        parts = self.mix(self.norms[0](values)).unflatten(2, (3, self.heads, -1)).movedim(2, 0)
        queries, keys, others = (part.transpose(1, 2) for part in parts)
        found = functional.scaled_dot_product_attention(queries, keys, others, is_causal=True)
        values = values + self.drop(self.join(found.transpose(1, 2).flatten(2)))
        return values + self.drop(self.narrow(functional.gelu(self.widen(self.norms[1](values)))))


class Language(nn.Module):
    """A language model that returns logits."""

    def __init__(
        self, depth: int, width: int, *, tied: bool = False, checkpointing: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, tokens, vocabulary)."""
        values = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False) if self.checkpointing else block(values)
        logits: torch.Tensor = self.head(self.norm(values))
        return logits


def images(width: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return a network of 3 x 3 convolutions on images of 32 x 32."""
    layers: list[nn.Module] = []
    before = 3
    for stage in range(3):
        for place in range(2):
            after = width * 2**stage
            stride = 2 if stage and not place else 1
            layers += [nn.Conv2d(before, after, 3, stride, 1), norm(after), nn.GELU()]
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def frozen_backbone() -> nn.Module:
    """Return a language model with only the norm and the head trainable."""
    model = Language(4, 256)
    model.requires_grad_(requires_grad=False)
    for part in (model.norm, model.head):
        part.requires_grad_(requires_grad=True)
    return model


def of_transformers(kind: str, **options: Any) -> nn.Module:  # noqa: ANN401 (options of its configuration)
    """Return a transformers model with random weights."""
    import transformers  # noqa: PLC0415 (half of the cases do without it)

    transformers.logging.set_verbosity_error()
    vision = {} if kind != "ViT" else {"image_size": 64, "patch_size": 8, "num_labels": 10}
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    sizes |= vision or {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    tail = {"Bert": "ForMaskedLM", "ViT": "ForImageClassification"}.get(kind, "ForCausalLM")
    if kind == "GPT2":
        sizes, tail = (
            {"vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 256, "n_layer": 4, "n_head": 4},
            "LMHeadModel",
        )
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    model: nn.Module = getattr(transformers, f"{kind}{tail}")(config)
    return model


def text(num_tokens: int) -> Callable[[int], Batch]:
    """Return a function (samples) -> batch of this many tokens each."""
    return lambda number: {
        "ids": torch.randint(VOCABULARY, (number, num_tokens)),
        "labels": torch.randint(VOCABULARY, (number, num_tokens)),
    }


def padded(number: int) -> Batch:
    """Return a batch for transformers models, with padding at the end."""
    ids = torch.randint(VOCABULARY, (number, 128))
    mask = torch.ones_like(ids)
    mask[:, -16:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pictures(number: int) -> Batch:
    """Return images and their classes."""
    return {"image": torch.randn(number, 3, 32, 32), "label": torch.randint(10, (number,))}


def large_pictures(number: int) -> Batch:
    """Return images and classes under the names of transformers models."""
    return {"pixel_values": torch.randn(number, 3, 64, 64), "labels": torch.randint(10, (number,))}


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over tokens."""
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def of_class(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over images."""
    return functional.cross_entropy(model(batch["image"]), batch["label"])


def own(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that a transformers model computes itself."""
    value: torch.Tensor = model(**batch).loss
    return value


def adamw(named: Named) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(named, lr=1e-3)


def sgd(named: Named) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(named, lr=1e-2, momentum=0.9, weight_decay=1e-4)


def adafactor(named: Named) -> torch.optim.Optimizer:
    """Return Adafactor."""
    return torch.optim.Adafactor(named, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One configuration, and the micro-batch sizes to compare."""

    model: Callable[[], nn.Module]
    loss: Any
    batch: Callable[[int], Batch]
    sizes: tuple[int, ...] = (5, 8)
    optimizer: Callable[[Named], torch.optim.Optimizer] = adamw
    world_size: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> StepSpec:
        """Return the planned bytes."""
        options = dict(self.options)
        strategy = options.pop("strategy", "auto")

        def train() -> TrainSpec:
            return TrainSpec(model=self.model(), optimizer=self.optimizer, loss=self.loss, clip=1.0, **options)

        return StepSpec(train=train, sample=self.batch(1), strategy=strategy, world_size=self.world_size, profile="cpu")


TOKENS, SAMPLES = ab.mean_over_tokens(next_token, shift=False), ab.mean_over_samples(of_class)
LM = ab.mean_over_tokens(own)
SIZES = {"S (2 x 128)": (2, 128), "M (4 x 256)": (4, 256), "L (6 x 512)": (6, 512)}
CASES: dict[str, Case] = {
    **{
        f"transformer {name}, {tokens} tokens, AdamW": Case(lambda size=size: Language(*size), TOKENS, text(tokens))
        for name, size in SIZES.items()
        for tokens in (64, 256)
    },
    "transformer M, SGD": Case(lambda: Language(4, 256), TOKENS, text(128), optimizer=sgd),
    "transformer M, Adafactor": Case(lambda: Language(4, 256), TOKENS, text(128), optimizer=adafactor),
    "transformer M, bf16 autocast": Case(
        lambda: Language(4, 256), TOKENS, text(128), options={"precision": "bf16", "average_decay": 0.99}
    ),
    "transformer M, dropout": Case(lambda: Language(4, 256, dropout=0.1), TOKENS, text(128)),
    "transformer M, checkpointing": Case(lambda: Language(4, 256, checkpointing=True), TOKENS, text(128)),
    "transformer M, bf16, checkpointing": Case(
        lambda: Language(4, 256, checkpointing=True), TOKENS, text(128), options={"precision": "bf16"}
    ),
    "transformer M, tied": Case(lambda: Language(4, 256, tied=True), TOKENS, text(128)),
    "transformer M, bf16 weights, masters": Case(lambda: Language(4, 256).bfloat16(), TOKENS, text(128)),
    "transformer M, frozen backbone": Case(frozen_backbone, TOKENS, text(128)),
    "GPT-2 of transformers": Case(lambda: of_transformers("GPT2"), LM, padded),
    "BERT of transformers": Case(lambda: of_transformers("Bert"), ab.mean_over_tokens(own, shift=False), padded),
    "Llama of transformers, tied, bf16": Case(
        lambda: of_transformers("Llama", num_key_value_heads=2, tie_word_embeddings=True),
        LM,
        padded,
        options={"precision": "bf16"},
    ),
    "ViT of transformers": Case(lambda: of_transformers("ViT"), ab.mean_over_samples(own), large_pictures),
    "CNN without norms, AdamW": Case(lambda: images(64, lambda _: nn.Identity()), SAMPLES, pictures, (16, 48)),
    "CNN with BatchNorm, AdamW": Case(lambda: images(64, nn.BatchNorm2d), SAMPLES, pictures, (16, 48)),
    "CNN with BatchNorm, SGD": Case(lambda: images(64, nn.BatchNorm2d), SAMPLES, pictures, (16, 48), sgd),
    "CNN with BatchNorm, bf16": Case(
        lambda: images(64, nn.BatchNorm2d), SAMPLES, pictures, (16, 48), options={"precision": "bf16"}
    ),
    "CNN with exact BatchNorm": Case(
        lambda: images(64, nn.BatchNorm2d), SAMPLES, pictures, (16, 48), options={"norms": "exact"}
    ),
    "transformer M, DDP, 2 ranks": Case(
        lambda: Language(4, 256), TOKENS, text(128), world_size=2, options={"strategy": "ddp"}
    ),
    "transformer M, all_reduce, 2 ranks": Case(lambda: Language(4, 256), TOKENS, text(128), world_size=2),
    "CNN with BatchNorm, DDP, 2 ranks": Case(
        lambda: images(64, nn.BatchNorm2d), SAMPLES, pictures, (16, 48), world_size=2, options={"strategy": "ddp"}
    ),
}


HEAD = (
    "| configuration | micro-batch | planned, MiB | allocated, MiB | error, % | error, bytes | "
    "planned less tensors, bytes | peak in | planned in, s |"
)


def planned(case: Case) -> tuple[MemoryEnvelope, float]:
    """Return the planned memory of a step at any micro-batch size, and the time to plan it."""
    start = time.perf_counter()
    low, high = (trace_step(case.spec(), size).steady for size in (2, 3))
    return fit(low, 2, high, 3), time.perf_counter() - start


def allocated(name: str, size: int) -> tuple[int, int]:
    """Return the peaks of allocated bytes and of tensors in the real engine's second step."""
    torch.set_num_threads(1)
    case = CASES[name]
    world = ab.World.from_environment(device="cpu")
    torch.manual_seed(world.rank)
    gc.collect()
    with warnings.catch_warnings(), AllocatorEvents() as allocator, MemoryLedger() as ledger:
        warnings.simplefilter("ignore")  # DDP on the search for unused parameters
        batch = case.batch(NUM_MICRO_BATCHES * size)
        engine = ab.Engine(
            case.model(),
            case.optimizer,
            case.loss,
            micro_batch_size=size,
            clip=1.0,
            check_loss=False,
            world=world,
            **case.options,
        )
        engine.step(batch)
        start = ledger.num_events
        with record_function(SECOND_STEP):
            engine.step(batch)
        engine.close()
    return allocator.peak_bytes(), ledger.trace(start).peak_bytes


class AllocatorEvents:
    """Allocations of the CPU allocator in the context, in this thread and in threads started meanwhile.

    torch's profilers observe one thread each, and exact BatchNorm runs every micro-batch in a separate thread.
    """

    def __init__(self) -> None:
        self._records: list[list[Any]] = []
        self._run = threading.Thread.run

    def __enter__(self) -> Self:
        """Begin to record."""
        threading.Thread.run = self._watched_run()  # type: ignore[method-assign]
        self._enable()
        return self

    def __exit__(self, *_: object) -> None:
        """End the recording."""
        self._disable()
        threading.Thread.run = self._run  # type: ignore[method-assign]

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes during the second step."""
        events = [event for record in self._records for event in record]
        first = events[0]
        begins, ends = (first.cpu_elapsed_us(event) for event in self._of_second_step())
        sizes = [(first.cpu_elapsed_us(event), event.cpu_memory_usage()) for event in events]
        held = most = 0
        for moment, num_bytes in sorted((row for row in sizes if row[1]), key=lambda row: row[0]):
            held += num_bytes
            if begins <= moment <= ends:
                most = max(most, held)
        return most

    def _of_second_step(self) -> tuple[Any, Any]:
        """Return the events of the beginning and end of the second step."""
        main = self._records[-1]
        place = next(number for number, event in enumerate(main) if event.name() == SECOND_STEP)
        handle = main[place].handle()
        end = next(event for event in main[place + 1 :] if event.kind() == "pop" and event.handle() == handle)
        return main[place], end

    def _watched_run(self) -> Callable[[threading.Thread], None]:
        def run(thread: threading.Thread) -> None:
            self._enable()
            try:
                self._run(thread)
            finally:
                self._disable()

        return run

    def _enable(self) -> None:
        config = profiler_legacy.profile(profile_memory=True).config()
        torch._C._autograd._enable_profiler_legacy(config)  # noqa: SLF001 (its only name)

    def _disable(self) -> None:
        self._records += torch._C._autograd._disable_profiler_legacy()  # noqa: SLF001 (its only name)


def compare(name: str) -> Iterator[str]:
    """Yield the rows of one case."""
    case = CASES[name]
    envelope, seconds = planned(case)
    for size in case.sizes:
        if case.world_size == 1:
            found, tensors = allocated(name, size)
        else:
            with RankPool(case.world_size) as ranks:
                found, tensors = ranks.run(allocated, name, size)[0]
        expected = envelope.peak_bytes(size)
        error = 100 * (expected / found - 1)
        sizes = f"{expected / MEBIBYTE:.2f} | {found / MEBIBYTE:.2f}"
        errors = f"{error:+.3f} | {expected - found:+,} | {expected - tensors:+,}"
        yield f"| {name} | {size} | {sizes} | {errors} | {envelope.at_peak(size).phase} | {seconds:.1f} |"


def main() -> None:
    """Measure and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="compare only cases with this word in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for name in CASES:
        if options.only in name:
            for line in compare(name):
                print(line, flush=True)
                lines.append(line)
    report.publish(
        lines,
        title="Memory as planned without data, against memory as allocated",
        command="python benchmarks/memory_accuracy.py" + (f" --only {options.only!r}" if options.only else ""),
        setting="float32 unless it says otherwise, 1 thread, gradients clipped by norm",
        out=options.out,
    )


if __name__ == "__main__":
    main()
