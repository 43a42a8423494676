"""A small language model on samples of different lengths, padded or packed, and the loss of the unsplit batch."""

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.data import Packed, Padded, PaddedOrPacked
from anybatch.engine.micro_batch_size import budget_trials
from anybatch.engine.micro_batch_size.search import Auto
from anybatch.testing import relative_error
from tests.engine.cases import plain_gradients

VOCABULARY, WIDTH = 13, 8
LENGTHS = (5, 1, 4, 17, 3, 9, 2, 6, 12, 3, 5, 8, 9, 7, 1, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3)


COLLATES: dict[str, Any] = {
    "padded": Padded(),
    "padded left": Padded(side="left"),
    "padded to 8": Padded(multiple_of=8),
    "packed": Packed(),
}


class Sentences:
    """Rows of tokens of these lengths; the targets in the first third of each are masked."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = lengths
        draw = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        labels = row.clone()
        labels[: len(row) // 3] = -100
        return {"input_ids": row, "labels": labels}


class Language(nn.Module):
    """One layer of causal attention; a padding mask or restarting positions separate samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.split = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Return logits (batch, time, word)."""
        time = input_ids.shape[1]
        if position_ids is None:
            assert attention_mask is not None
            position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
            sample = torch.zeros_like(input_ids)
            keys = attention_mask.bool()
        else:
            sample = (position_ids == 0).cumsum(1)
            keys = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.embedding(input_ids) + self.positions(position_ids)
        query, key, value = self.split(x).chunk(3, dim=-1)
        seen = torch.ones(time, time, dtype=torch.bool).tril() & (sample[:, :, None] == sample[:, None, :])
        seen = seen & keys[:, None, :] | torch.eye(time, dtype=torch.bool)
        logits: Tensor = self.out(x + F.scaled_dot_product_attention(query, key, value, attn_mask=seen))
        return logits


def loss(model: Any, batch: Any) -> Tensor:
    """Return the mean cross-entropy over targets that count, each predicted from the token before it."""
    logits = model(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


DECLARED = ab.mean_over_tokens(loss, labels="labels", ignore_index=-100, shift=True)


def expected_gradients(sample_ids: Sequence[int]) -> Any:
    """Return the gradient of the unsplit batch: all samples padded together, one forward, one backward."""
    dataset, model = Sentences(), Language()
    return plain_gradients(model, loss(model, Padded()([dataset[one] for one in sample_ids])))


def engine_on_ranks(model: Language, strategy: str, tokens: int) -> ab.Engine:
    """Run on every rank: return an engine with a token budget."""
    return ab.Engine(
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        DECLARED,
        micro_batch_size=ab.token_budget(tokens),
        strategy=strategy,
        world=ab.World.from_environment(),
        check_loss=False,
    )


def evaluated(cases: Sequence[tuple[str, str, int]]) -> list[tuple[float, float, int]]:
    """Run on every rank: return the mean of each (collate, strategy, budget), the plain one, and the most tokens.

    Batches have 9 samples; the last one is smaller.
    """
    dataset, found = Sentences(), []
    with torch.no_grad():
        plain = float(loss(Language(), Padded()([dataset[one] for one in range(len(dataset))])))
    for collate, strategy, tokens in cases:
        batches = ab.batches(
            dataset, effective_batch_size=9, shuffle=False, lengths=dataset.lengths, collate=COLLATES[collate]
        )
        model, sizes = Language(), [0]

        def note(_: nn.Module, inputs: tuple[Any, ...], sizes: list[int] = sizes) -> None:
            sizes.append(inputs[0].numel())

        with model.register_forward_pre_hook(note), engine_on_ranks(model, strategy, tokens) as engine:
            (mean,) = engine.evaluate(batches).values()
        found.append((mean, plain, max(sizes)))
    return found


def gradient_errors(cases: Sequence[tuple[str, str, int]]) -> dict[tuple[str, str, int], float]:
    """Run on every rank: return the relative error of each (collate, strategy, budget) in a step of all samples."""
    found = {}
    for collate, strategy, tokens in cases:
        dataset = Sentences()
        batches = ab.batches(
            dataset, effective_batch_size=25, shuffle=True, lengths=dataset.lengths, collate=COLLATES[collate]
        )
        with engine_on_ranks(Language(), strategy, tokens) as engine:
            batch = next(iter(batches))
            gradients = {name: whole(gradient) for name, gradient in engine.gradients(batch).items()}
            found[collate, strategy, tokens] = relative_error(gradients, expected_gradients(batch.sample_ids))
    return found


class SimulatedDevice:
    """A clock advanced by forwards: by a fixed time plus a time per token, which differs for packed tokens.

    Args:
        packed_factor: time of a packed token relative to a padded one.
        cached: most tokens in a micro-batch at normal speed; in larger ones each token takes twice as long.

    Attributes:
        newest: the layout of the latest forward.
        largest: most tokens in a forward.
    """

    def __init__(self, packed_factor: float, *, cached: float = math.inf) -> None:
        self._packed_factor = packed_factor
        self._cached = cached
        self._seconds = 0.0
        self.newest = ""
        self.largest = 0

    def clock(self) -> float:
        """Return the simulated time."""
        return self._seconds

    def times(self, engine: ab.Engine) -> ab.Engine:
        """Return an engine whose trial runs use this clock."""
        engine._parts.sizes.auto = Auto(clock=self.clock)  # noqa: SLF001 (a clock for budgets has no public option)
        return engine

    def runs(self, model: nn.Module) -> nn.Module:
        """Return a model whose forwards advance this clock."""
        model.register_forward_pre_hook(self._forward)
        return model

    def _forward(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        is_packed = arguments[2] is not None
        self.newest = "packed" if is_packed else "padded"
        num_tokens = arguments[0].numel()
        self.largest = max(self.largest, num_tokens)
        tokens = num_tokens * (self._packed_factor if is_packed else 1.0)
        self._seconds += 1.0 + 0.1 * tokens * (2.0 if num_tokens > self._cached else 1.0)


def either_on_ranks(*packed_factors: float) -> tuple[float, str]:
    """Run on every rank, each with another clock: return the error of the gradient, and the chosen layout."""
    world = ab.World.from_environment()
    device = SimulatedDevice(packed_factors[world.rank])
    model = device.runs(Language())
    batches = ab.batches(Sentences(), effective_batch_size=25, lengths=LENGTHS, collate=PaddedOrPacked())
    batch = next(iter(batches))
    with (
        mock.patch.object(budget_trials, "WORTH_TIMING", 0),
        ab.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DECLARED,
            micro_batch_size=ab.token_budget(40),
            world=world,
        ) as engine,
    ):
        found = device.times(engine).gradients(batch)
        assert device.newest == engine.decisions["layout"].partition(",")[0]
        return relative_error(found, expected_gradients(batch.sample_ids)), engine.decisions["layout"]


def whole(gradient: Any) -> Any:
    """Return the full tensor of a gradient, if it is sharded."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def ids_of_run(num_steps: int, start: Any = None, state: Any = None) -> tuple[list[tuple[int, ...]], Any, Any]:
    """Run on every rank: train, and return the samples of each step, the final position, and the parameters."""
    world = ab.World.from_environment()
    dataset = Sentences()
    model = Language()
    if state is not None:
        model.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()})
    batches = ab.batches(
        dataset, effective_batch_size=7, epochs=3, lengths=dataset.lengths, collate=Padded(), start=start
    )
    ids, end = [], None
    with ab.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DECLARED, micro_batch_size=ab.token_budget(40), world=world
    ) as engine:
        for _, batch in zip(range(num_steps), batches, strict=False):
            engine.step(batch)
            ids.append(tuple(batch.sample_ids))
            end = batch.end
    return ids, end, {name: value.tolist() for name, value in model.state_dict().items()}
