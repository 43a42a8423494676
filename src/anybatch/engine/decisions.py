"""The decisions of an engine in words, by name, for the run header and checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_UPDATES: Mapping[str, str] = MappingProxyType(
    {
        "direct": "the optimizer updates the parameters directly",
        "master_weights": "the optimizer updates float32 master weights, which are copied into the parameters",
        "split": "the optimizer updates float32 weights: the model has the upper 16 bits, the engine the lower 16",
        "stochastic": "weights and optimizer state are updated in float32, with stochastic rounding to bf16",
        "cast": "float32 gradients are cast to the parameters' type for the optimizer",
    }
)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision."""

    name: str
    text: str


class Decisions(Mapping[str, str]):
    """An append-only record of decisions; as a mapping, it has the newest text of each name."""

    def __init__(self) -> None:
        self.history: tuple[Decision, ...] = ()
        self._newest: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Add a decision; a no-op if the text is empty."""
        if text:
            self.history += (Decision(name, text),)
            self._newest[name] = text

    def __getitem__(self, name: str) -> str:
        return self._newest[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._newest)

    def __len__(self) -> int:
        return len(self._newest)

    def __repr__(self) -> str:
        return f"Decisions({self._newest})"


def first_decisions(
    *,
    update: str,
    strategy: str,
    world_size: int,
    num_processes: int,
    differed: Sequence[str],
    remarks: Sequence[str],
    norms: str,
    not_repeated: str,
    draws: bool,
    seed: int | None,
) -> Iterator[Decision]:
    """Yield the decisions made while an engine is built, and the reasons why it differs from the native batch."""
    yield Decision("update", _UPDATES[update])
    if remarks:
        yield Decision("equality", " ".join(remarks))
    yield Decision("strategy", strategy)
    if num_processes > world_size:
        each = num_processes // world_size
        text = f"{world_size}, with {each} processes each, which run one model together on the same samples"
        yield Decision("ranks", text)
    if differed:
        text = f"{len(differed)} parameters and buffers differed between ranks and were set to rank 0's values, "
        yield Decision("replicas", f"{text}first {differed[0]!r}")
    if draws:
        key = "the data's seed (ab.batches(seed=), 0 for other loaders)" if seed is None else f"seed={seed}"
        yield Decision("random_numbers", f"keyed by {key}: torch.manual_seed does not change them, Engine(seed=) does")
    if norms:
        yield Decision("norms", norms)
    if not_repeated:
        yield Decision("out_of_memory", f"a step that runs out of memory ends the run, because {not_repeated}")
