"""The decisions of an engine, in words, by name: kept in the run's header and in its checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_UPDATES: Mapping[str, str] = MappingProxyType(
    {
        "direct": "the optimizer updates the parameters themselves",
        "master_weights": "the optimizer updates float32 master weights, which are copied into the parameters",
        "split": "the optimizer updates float32 weights: the model has their upper 16 bits, the engine the lower ones",
        "stochastic": "weights and optimizer state are updated in float32, and rounded to bf16 stochastically",
        "cast": "float32 gradients are cast to the parameters' type for the optimizer",
    }
)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision.

    Attributes:
        name: what it is about, such as "micro_batch_size".
        text: what was decided and why, a clause.
    """

    name: str
    text: str


class Decisions(Mapping[str, str]):
    """An append-only record of decisions. Read as a mapping it holds the newest text of each name.

    Attributes:
        history: all of them, the oldest first.
    """

    def __init__(self) -> None:
        self.history: tuple[Decision, ...] = ()
        self._newest: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Add a decision; an empty text is none."""
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
    """Yield what was decided while an engine was built, and what keeps it from equality.

    Args:
        update: how the optimizer's update reaches the parameters.
        strategy: the strategy and why, if the engine chose it; empty if the user did.
        world_size: number of ranks.
        num_processes: number of processes; more than ranks where several run one model together.
        differed: parameters and buffers that were not equal on all ranks and are now.
        remarks: a sentence for everything that keeps the run from equality with the un-split batch.
        norms: the policy about BatchNorm in words; empty without such layers.
        not_repeated: why a step that runs out of memory is not repeated, a clause; empty if it is.
        draws: layers draw random numbers that the engine keys.
        seed: of these numbers; None for the data's.
    """
    yield Decision("update", _UPDATES[update])
    if remarks:
        yield Decision("equality", " ".join(remarks))
    yield Decision("strategy", strategy)
    if num_processes > world_size:
        each = num_processes // world_size
        text = f"{world_size}, of {each} processes each, which run one model together on the same samples"
        yield Decision("ranks", text)
    if differed:
        text = f"{len(differed)} parameters and buffers differed between ranks and took rank 0's values, "
        yield Decision("replicas", f"{text}first {differed[0]!r}")
    if draws:
        key = "the seed of the data (ab.batches(seed=), 0 for batches of one's own)" if seed is None else f"seed={seed}"
        yield Decision("random_numbers", f"keyed by {key}: torch.manual_seed does not change them, Engine(seed=) does")
    if norms:
        yield Decision("norms", norms)
    if not_repeated:
        yield Decision("out_of_memory", f"a step that runs out of memory ends the run, because {not_repeated}")
