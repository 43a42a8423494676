"""Steps over long samples, worked out from short ones, against the same steps traced whole."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.errors import PlanError
from anybatch.memory.trace import Allocation, MemoryEnvelope, MemoryTrace, Peak, fit
from anybatch.planner.cost.devices import find_device
from anybatch.planner.cost.step_time import CostTrace, Operation, operation_seconds, rates_of
from anybatch.planner.envelopes import Envelopes, find_envelopes
from anybatch.planner.plan import make_plan
from anybatch.planner.proposals.changes import changed, named_change
from anybatch.planner.proposals.more_ranks import smallest_world
from anybatch.planner.short_samples import (
    check_costs,
    check_memory,
    coefficients,
    costs_at,
    entries_of_costs,
    lengthen,
    memory_at,
)
from anybatch.planner.trace.sample_lengths import TokenLengths, operations_per_chunk
from anybatch.planner.trace.step_spec import StepSpec, built
from anybatch.recipes.planning.library_models import subject_of_config
from anybatch.recipes.planning.plan import plan
from tests.faults import sees
from tests.planner.step_specs import step_spec

transformers = pytest.importorskip("transformers")

Turn = Callable[[int, int], int]
Last = Callable[[int], int]


class _Program:
    """Writes a trace down, event by event."""

    def __init__(self) -> None:
        self.pieces: list[Allocation] = []
        self.events: list[int] = []

    def take(self, num_bytes: int, name: str) -> int:
        self.pieces.append(Allocation(num_bytes, "activations", "forward", name))
        self.events.append(len(self.pieces))
        return len(self.pieces)

    def free(self, number: int) -> None:
        self.events.append(-number)


def scan(tokens: int, m: int, kept: Turn = lambda _, __: 3, last: Last = lambda _: 1) -> MemoryTrace:
    """Return the trace of a scan over tokens: each keeps a piece until the way back, which sums up in new pieces."""
    program = _Program()
    inputs = program.take(5 * m * tokens * tokens + 7, "inputs")
    states = []
    for at in range(tokens):
        work = program.take(11 * m, "work")
        states.append(program.take(kept(tokens, at) * m + 1, "state"))
        program.free(work)
    total = program.take(2 * m * tokens, "total")
    for state in reversed(states):
        step = program.take(2 * m * tokens, "step")
        program.free(total)
        program.free(state)
        total = step
    program.free(total)
    program.free(inputs)
    for _ in range(last(tokens) > 0):
        program.free(program.take(m * last(tokens), "last"))
    return MemoryTrace(tuple(program.pieces), tuple(program.events), ((0, "step begins"),))


def envelope(tokens: int, **fields: Any) -> MemoryEnvelope:
    """Return the memory of the scan at any micro-batch size."""
    return fit(scan(tokens, 2, **fields), 2, scan(tokens, 3, **fields), 3)


def peak(one: MemoryEnvelope, m: int) -> Peak:
    """Return the moment of the peak, but for its number."""
    return dataclasses.replace(one.at_peak(m), event_index=0)


@pytest.mark.parametrize("tokens", [11, 40, 1000])
@sees(
    "further turns leave nothing",
    "src/anybatch/planner/short_samples.py",
    "tuple(size * one for one in row)",
    "tuple(0 * one for one in row)",
)
@sees(
    "sizes of short samples are lines",
    "src/anybatch/planner/short_samples.py",
    "at[2] - 2 * at[1] + at[0])",
    "0 * at[0])",
)
def test_a_scan_is_as_it_is_when_traced_whole(tokens: int) -> None:
    """A scan over any number of tokens holds, at its peak and in all, what its whole trace says, piece by piece."""
    short = [envelope(one) for one in (8, 9, 10)]
    found, whole = memory_at(short[0], lengthen(list(map(coefficients, short))), tokens - 8), envelope(tokens)

    assert (found.trace.marks, sum(map(abs, found.trace.events[:1]))) == (whole.trace.marks, 1)
    for m in (1, 4, 9):
        assert peak(found, m) == peak(whole, m)
        assert sorted(found.sizes(m))[-5:] == sorted(whole.sizes(m))[-5:]
        assert int(found.held.at(m)[-1]) == 0


@sees(
    "very many pieces are not put together",
    "src/anybatch/planner/short_samples.py",
    "together = max(1,",
    "together = min(1,",
)
@sees(
    "pieces put together are fewer",
    "src/anybatch/planner/short_samples.py",
    "[turns % together] * (turns % together > 0)",
    "[]",
)
@pytest.mark.slow
def test_very_many_pieces_are_put_together() -> None:
    """A step of more turns than pieces are written down for holds the same in fewer pieces."""
    short = [envelope(one) for one in (8, 9, 10)]
    found = memory_at(short[0], lengthen(list(map(coefficients, short))), 500_002)

    # The inputs and sums are quadratics and lines, and each of the tokens keeps a state.
    tokens, m = 500_010, 2
    assert found.peak_bytes(m) == 5 * m * tokens**2 + 7 + tokens * (3 * m + 1) + 2 * (2 * m * tokens)
    assert len(found.trace.allocations) < 250_000


def _refused(tokens: int, **fields: Any) -> str:
    """Return why a scan is not worked out from short ones, compared with one over more tokens."""
    short = [envelope(one, **fields) for one in (8, 9, 10)]
    try:
        lengthened = lengthen(list(map(coefficients, short)))
        check_memory(short[0], lengthened, tokens - 8, scan(tokens, 2, **fields), 2)
    except PlanError as error:
        return str(error)
    return "nothing"


@sees(
    "turns are not compared",
    "src/anybatch/planner/short_samples.py",
    "if not torch.equal(around[",
    "if False and not torch.equal(around[",
)
@sees(
    "sizes at the longer length are not compared",
    "src/anybatch/planner/short_samples.py",
    "if not torch.equal(there, at_m) or",
    "if",
)
@sees(
    "operations at the longer length are not compared",
    "src/anybatch/planner/short_samples.py",
    "if names != list(found.names):",
    "if False:",
)
def test_what_is_no_polynomial_is_refused() -> None:
    """Turns that differ, sizes that are no polynomials in the tokens, and what comes above a length are not guessed."""
    check = "what a step holds is no quadratic"

    assert "differ in more than turns" in _refused(72, kept=lambda _, at: at)
    assert "turns of a loop over tokens" in _refused(72, kept=lambda _, at: 3 + (at > 30))
    assert check in _refused(72, kept=lambda tokens, _: tokens**3)
    assert check in _refused(72, kept=lambda tokens, _: max(20, tokens))
    assert check in _refused(72, last=lambda tokens: max(20, tokens))
    assert "more than further turns" in _refused(72, last=lambda tokens: tokens > 60)


def _operations(tokens: int, table: int) -> CostTrace:
    """Return the operations of a loop over tokens, before it a look-up in a table."""
    look_up = Operation(name="embedding", kind="other", phase="forward", bytes_read=min(8 * tokens, table))
    product = Operation(
        name="mm", kind="matmul", phase="forward", flops=2000 * tokens, bytes_read=900, dims=(1, tokens, 4, 5)
    )
    add = Operation(name="add", kind="other", phase="backward", bytes_read=600, bytes_written=300)
    return CostTrace((look_up, *(product, add) * tokens, product))


@sees(
    "further turns take no time",
    "src/anybatch/planner/short_samples.py",
    "found += [_resized(one, row, turns)",
    "found += [_resized(one, row, 0)",
)
@sees(
    "work at the longer length is not compared",
    "src/anybatch/planner/short_samples.py",
    "> _MOST_OFF * sums[1]).any()",
    "> _MOST_OFF * sums[1]).all()",
)
def test_operations_are_counted_as_often_as_they_run() -> None:
    """A step takes the seconds of all its operations; that a look-up reads no more than its table is let pass."""
    short = [_operations(one, 300) for one in (8, 9, 10)]
    lengthened = lengthen(list(map(entries_of_costs, short)))
    check_costs(short[0], lengthened, 64, _operations(72, 300))
    found = costs_at(short[0], lengthened, 992)

    rates = rates_of(find_device("RTX 4090"))
    expected = operation_seconds(_operations(1000, 10**9).operations, rates)
    assert operation_seconds(found.operations, rates) == pytest.approx(expected, rel=1e-12)
    idle = CostTrace(tuple(dataclasses.replace(one, flops=0) for one in _operations(72, 300).operations))
    with pytest.raises(PlanError, match="work of a step"):
        check_costs(short[0], lengthened, 64, idle)


CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: transformers.MambaConfig(
        hidden_size=8, num_hidden_layers=1, vocab_size=50, state_size=4, use_cache=False
    ),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(
        hidden_size=8, num_hidden_layers=2, vocab_size=50, state_size=4, use_cache=False
    ),
    "rwkv": lambda: transformers.RwkvConfig(
        hidden_size=8, attention_hidden_size=8, num_hidden_layers=1, vocab_size=50, context_length=512, use_cache=False
    ),
    "jamba": lambda: transformers.JambaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        vocab_size=50,
        intermediate_size=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        use_cache=False,
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        vocab_size=50,
        intermediate_size=12,
        num_attention_heads=2,
        lru_width=8,
        use_cache=False,
    ),
}


def both(config: Any, tokens: int, *changes: str, **fields: Any) -> tuple[Envelopes, Envelopes]:
    """Return a step of a configuration as it is worked out from short samples, and as it is traced whole."""
    subject = subject_of_config(config, sequence_length=tokens)
    spec = StepSpec(train=subject.train, sample=subject.sample, **{"strategy": "single", **fields})
    for name in changes:
        spec = changed(spec, [named_change(spec, name)])
    ready, _ = built(spec)
    assert subject.lengths is not None
    assert operations_per_chunk(ready.trained, subject.lengths, ready.profile) > 0
    pair = (dataclasses.replace(ready, lengths=subject.lengths), ready)
    found, whole = (find_envelopes(one, 1 << 30, most_samples=16) for one in pair)
    return found, whole


def assert_same(found: Envelopes, whole: Envelopes) -> None:
    """Assert that two plans of a step say the same of its memory, byte for byte, and of its time."""
    rates = rates_of(find_device("RTX 4090"))
    for m in (1, 2, 5, 16):
        for name in ("steady", "first"):
            assert peak(getattr(found, name), m) == peak(getattr(whole, name), m)
        assert found.reserved_bytes(m) == whole.reserved_bytes(m)
        seconds, expected = (operation_seconds(one.costs.at(m).operations, rates) for one in (found, whole))
        assert seconds == pytest.approx(expected, rel=0.01)
    for budget in (1 << 20, 1 << 24):
        assert found.largest_allocated(budget) == whole.largest_allocated(budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "changes", "num_micro_batches"),
    [
        ("mamba", 90, (), 1),
        pytest.param("mamba", 256, (), 2, marks=pytest.mark.published),
        pytest.param("falcon_mamba", 90, ("checkpointing",), 2, marks=pytest.mark.published),
        pytest.param("rwkv", 90, (), 2, marks=pytest.mark.published),
        pytest.param("recurrent_gemma", 90, (), 2, marks=pytest.mark.published),
        pytest.param("jamba", 90, (), 2, marks=pytest.mark.published),
    ],
)
def test_models_that_take_tokens_one_by_one(
    name: str, tokens: int, changes: Sequence[str], num_micro_batches: int
) -> None:
    """On CUDA they are planned from short samples, byte for byte as from a whole trace, and the plan says so."""
    found, whole = both(CONFIGS[name](), tokens, *changes, num_micro_batches=num_micro_batches)

    assert found.notes[-1].startswith(f"of {tokens} tokens, worked out from samples of 8 to 72")
    assert_same(found, whole)


@pytest.mark.published
@sees(
    "the fewest ranks are found from the shortest sample",
    "src/anybatch/planner/proposals/more_ranks.py",
    "found.steady.at(micro_batch_size)",
    "found.steady.at(1)",
)
def test_under_fsdp() -> None:
    """Weights that are sharded make no difference, nor do they where the fewest ranks are looked for."""
    config = CONFIGS["mamba"]()
    assert_same(*both(config, 90, strategy="fsdp", world_size=2))

    subject = subject_of_config(config, sequence_length=90)
    whole = StepSpec(train=subject.train, sample=subject.sample, strategy="fsdp")
    short = dataclasses.replace(whole, lengths=subject.lengths)
    found, expected = (smallest_world(one, 1 << 30, micro_batch_size=3, largest=2) for one in (short, whole))
    assert found == expected


@pytest.mark.slow
@pytest.mark.published
@sees(
    "a CPU is planned from samples as short as others",
    "src/anybatch/planner/trace/sample_lengths.py",
    "_LEAST_CPU_TOKENS // self.chunk_tokens",
    "0",
)
def test_on_a_cpu() -> None:
    """On a CPU samples are longer, for what its kernels take for themselves; the plan is that of a whole trace too."""
    config = CONFIGS["mamba"]()
    config.intermediate_size = 64
    found, whole = both(config, 132, profile="cpu")

    assert found.notes[-1].startswith("of 132 tokens, worked out from samples of 64 to 128")
    assert_same(found, whole)


class _Sums(nn.Module):
    """Sums up tokens one by one: those so far, or one each; of fewer tokens than `least` with a square more."""

    def __init__(self, least: int, *, so_far: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.least = least
        self.so_far = so_far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if x.shape[1] < self.least:
            y = y.square()
        return torch.stack([y[:, at * (not self.so_far) : at + 1].exp().sum(1) for at in range(x.shape[1])], 1)


def _sums(tokens: int, **settings: Any) -> tuple[Envelopes, Envelopes]:
    """Return a step of such a model where samples of other lengths are there, and where they are not."""

    def sample(tokens: int) -> torch.Tensor:
        return torch.zeros(1, tokens, 4)

    spec = step_spec(
        lambda: _Sums(**settings),
        optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.1),
        loss=lambda model, batch: model(batch).mean(),
        sample=sample(tokens),
        strategy="single",
    )
    pair = (dataclasses.replace(spec, lengths=TokenLengths(sample=sample, num_tokens=tokens)), spec)
    found, whole = (find_envelopes(one, 1 << 30, most_samples=16) for one in pair)
    return found, whole


@pytest.mark.slow
def test_what_does_not_follow_is_traced_whole() -> None:
    """A model whose turns differ is planned as if nothing was known of shorter samples, and that it is slow is said."""
    found, whole = _sums(80, least=0, so_far=True)

    assert "traced as a whole, which is slow" in found.notes[-1]
    assert_same(found, whole)


@pytest.mark.slow
@sees(
    "no longer samples are tried",
    "src/anybatch/planner/envelopes.py",
    "_TIMES_AS_LONG = (1, 4)",
    "_TIMES_AS_LONG = (1,)",
)
def test_longer_samples_are_tried() -> None:
    """A model that does something else with a few tokens is planned from more."""
    found, whole = _sums(100, least=20, so_far=False)

    assert found.notes[-1].startswith("of 100 tokens, worked out from samples of 32 to 96")
    assert_same(found, whole)


@sees(
    "chunks of a configuration are not kept",
    "src/anybatch/recipes/planning/library_models.py",
    "num_tokens=length, chunk_tokens=chunk)",
    "num_tokens=length)",
)
@sees(
    "windows of a configuration are passed over",
    "src/anybatch/recipes/planning/library_models.py",
    "min(windows, default=length) < length",
    "False",
)
@pytest.mark.slow
def test_short_samples_are_whole_chunks_within_a_window() -> None:
    """Short samples have as many tokens over after the last chunk as the long one; above a window there are none."""
    config = CONFIGS["mamba"]()
    config.chunk_size = 16
    lengths = subject_of_config(config, sequence_length=1003).lengths
    assert lengths is not None
    assert lengths.short("cuda") == (139, 155, 171, 203)

    windowed = CONFIGS["recurrent_gemma"]()
    windowed.attention_window_size = 512
    assert subject_of_config(windowed, sequence_length=512).lengths is not None
    assert subject_of_config(windowed, sequence_length=513).lengths is None


@pytest.mark.slow
@sees(
    "all models are planned from short samples",
    "src/anybatch/planner/plan.py",
    "not operations_per_chunk(ready.trained, spec.lengths, spec.profile)",
    "False",
)
def test_transformers_are_traced_at_their_length() -> None:
    """A model whose tokens run together is planned as it was, at its own length; one of each kind."""
    llama = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=50,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    t5 = transformers.T5Config(
        d_model=16, d_ff=24, num_layers=1, num_heads=2, d_kv=8, vocab_size=50, decoder_start_token_id=0
    )
    for config in (llama, t5):
        found = plan(config, device="RTX 4090", effective_batch_size=8, sequence_length=256, proposals=False)
        subject = subject_of_config(config, sequence_length=256)
        assert subject.lengths is not None
        spec = StepSpec(train=subject.train, sample=subject.sample)
        whole = make_plan(spec, found.budget, 8, proposals=False)

        assert found.spec.lengths is None
        assert found.baseline.peak == whole.baseline.peak
        assert found.baseline.reserved_bytes == whole.baseline.reserved_bytes
        assert found.baseline.seconds == whole.baseline.seconds
