"""Write docs/composition.md from the table: `python docs/write_composition.py`."""

from collections.abc import Mapping
from pathlib import Path

from anybatch.core.compatibility import TABLE, Combinations, Feature, Verdict, cell


def as_markdown() -> str:
    """Return the table as a page of the documentation."""
    parts = [
        _INTRODUCTION,
        _legend(),
        "## Features",
        _features(),
        "## Table",
        _matrix(),
        *(_section(title, verdict) for title, verdict in _SECTIONS.items()),
        _ATTACHED,
    ]
    return "\n\n".join(parts)


_INTRODUCTION = """# Which features can be combined

The engine checks this table before it changes the model.
A *split* divides an effective batch into micro-batches, and a *deal* assigns these to ranks.
With deal='balanced', a micro-batch at the border of two ranks may be split.
A test runs every cell on one and on two CPU ranks, with torch.compile's backends `aot_eager` and `eager`.
A pair without its own entry gets the worse verdict of its two features.

`python docs/write_composition.py` writes this page from `src/anybatch/core/compatibility.py`."""
_ATTACHED = """## Attached to parameters, or used by the loss

`tests/parallel/test_attached_to_parameters.py` runs every row on two ranks.
Where `fsdp` refuses a row, `zero1` works, because it keeps whole weights.

| feature | `all_reduce`, `ddp`, `zero1` | `fsdp` |
|---|---|---|
| attributes of parameters (`_no_weight_decay`) | kept | carried over to the shards |
| `parameter.register_hook` | once per step, on the summed gradient | refused: `ParameterError` |
| `register_post_accumulate_grad_hook` | refused: `ParameterError` | refused: `ParameterError` |
| your own parameter class | kept | refused: `ParameterError` |
| channels-last or transposed weights | kept | refused: `ParameterError` |
| optimizers that need whole parameters (Muon, Adafactor) | exact | refused: `CompositionError` |
| loss function uses weights outside of FSDP blocks (the modules that FSDP shards together) | exact | exact |
| loss function uses weights of an FSDP block | exact | refused in the first micro-batch: `LossError` |
| loss function refers to a parameter (as a closure) | exact | refused: `ParameterError` |
| loss function calls `torch.autograd.grad` through the model | exact | refused in the first micro-batch: `LossError` |
| second function of `ab.joint` uses weights of the model or its own weights | exact | exact |
| samples with different numbers of items | exact | exact |
| loss through the model of another engine (a GAN) | exact | exact |"""
_MEANINGS: Mapping[Verdict, str] = {
    Verdict.EXACT: "exact: the gradient equals the gradient of the unsplit batch (to 1e-12 in float64; up to rounding "
    "in bf16 and fp16)",
    Verdict.SAME_SPLIT: "exact for the same split: micro-batches give the same gradient on any number of ranks",
    Verdict.DIFFERS: "differs: it runs, with a different gradient",
    Verdict.EXCLUSIVE: "exclusive: the two cannot occur together",
    Verdict.REFUSED: "refused: `CompositionError` before the model is changed, or in the first backward if only that "
    "can show it",
}
_SECTIONS: Mapping[str, Verdict] = {
    "Refused": Verdict.REFUSED,
    "Differs": Verdict.DIFFERS,
    "Exact for the same split": Verdict.SAME_SPLIT,
    "Exclusive across axes": Verdict.EXCLUSIVE,
}
_DETECTED_LATE: Mapping[str, str] = {
    "batch": " (detected at the first batch)",
    "idle parameters": " (detected in a run)",
    "checkpointing": " (detected in a run)",
}


def _legend() -> str:
    rows = [f"| `{verdict.value}` | {_MEANINGS[verdict]} |" for verdict in Verdict]
    return "\n".join(["| mark | meaning |", "|---|---|", *rows])


def _features() -> str:
    rows = [
        f"| `{feature.name.lower()}` | {feature.axis} | {feature.label}{_DETECTED_LATE.get(feature.axis, '')} |"
        for feature in Feature
    ]
    return "\n".join(["| feature | axis | meaning |", "|---|---|---|", *rows])


def _matrix() -> str:
    ordered = list(Feature)
    width = max(len(feature.name) for feature in ordered)
    header = [f"{number:<10}" for number in range(1, len(ordered) + 1, 10)]
    lines = [" " * (width + 4) + " ".join(header).rstrip()]
    for number, row in enumerate(ordered, 1):
        marks = "".join(cell(row, column).verdict.value for column in ordered[:number])
        groups = " ".join(marks[start : start + 10] for start in range(0, number, 10))
        lines.append(f"{number:>2} {row.name.lower():<{width}} {groups}")
    columns = (
        "Columns have the numbers of the rows, in groups of ten; the diagonal has the verdict on a single feature."
    )
    return "\n".join([columns, "", "```text", *lines, "```"])


def _named(combinations: Combinations) -> str:
    """Return the names of features or pairs: all pairs with the same second features as "`a`, `b` with `c`, `d`"."""
    seconds: dict[str, list[str]] = {}
    for first, *others in combinations:
        seconds.setdefault(f"`{first.name.lower()}`", []).extend(f"`{other.name.lower()}`" for other in others)
    firsts: dict[tuple[str, ...], list[str]] = {}
    for name, partners in seconds.items():
        firsts.setdefault(tuple(partners), []).append(name)
    parts = [(", ".join(names), ", ".join(partners)) for partners, names in firsts.items()]
    return "; ".join(" with ".join(filter(None, part)) for part in parts)


def _section(title: str, verdict: Verdict) -> str:
    items = []
    for combinations, found in TABLE.items():
        if found.verdict is verdict:
            items.append(f"- {_named(combinations)}: {found.reason}. {found.remedy}".rstrip())
    return "\n\n".join([f"## {title}", "\n".join(items) or "None."])


if __name__ == "__main__":
    Path(__file__).with_name("composition.md").write_text(as_markdown() + "\n", encoding="utf-8")
