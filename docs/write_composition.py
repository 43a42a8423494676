"""Write docs/composition.md from the table: `python docs/write_composition.py`."""

from collections.abc import Mapping
from pathlib import Path

from anybatch.core.compatibility import Cell, Feature, Verdict, cell, is_stated, pairs


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


_INTRODUCTION = """# What composes with what

The engine checks this table before it touches the model, and a test runs every cell on one rank and on two, on CPUs,
with torch.compile's backends `aot_eager` and `eager`.
A feature stands for a value that an engine is given, or for something that its model, loss or batch has.
A pair that nothing is said of is as good as the worse of its two features by itself.

This page is written from `src/anybatch/core/compatibility.py` by `python docs/write_composition.py`."""
_ATTACHED = """## Attached to parameters, or used by the loss

`tests/parallel/test_attached_to_parameters.py` runs every row on two ranks.
`zero1` keeps whole weights and is a remedy for each refusal of `fsdp`.

| what | `all_reduce`, `ddp`, `zero1` | `fsdp` |
|---|---|---|
| attributes of parameters (`_no_weight_decay`) | kept | carried over to the shards |
| `parameter.register_hook` | once per step, on the summed gradient | the same, on the whole gradient |
| `register_post_accumulate_grad_hook` | refused: `ParameterError` | refused: `ParameterError` |
| a class of parameters of your own | kept | refused: `ParameterError` |
| channels-last or transposed weights | kept | refused: `ParameterError` |
| optimizers that compute with whole parameters (Muon, Adafactor) | exact | refused: `CompositionError` |
| weights outside of blocks in the loss function | exact | exact |
| weights of a block in the loss function | exact | refused in the first micro-batch: `LossError` |
| a parameter that the loss function captured | exact | refused: `ParameterError` |
| `torch.autograd.grad` through the model in the loss function | exact | refused in the first micro-batch: `LossError` |
| weights in the second function of `ab.joint`, of the model or its own | exact | exact |
| samples with different numbers of items | exact | exact |
| a loss through the model of another engine (a GAN) | exact | exact |"""
_MEANINGS: Mapping[Verdict, str] = {
    Verdict.EXACT: "exact: the gradient is that of the un-split batch, to 1e-12 in float64; where bf16 or fp16 takes "
    "part, up to their rounding, because each micro-batch's gradient is rounded once",
    Verdict.SAME_CUT: "exact for the same cut: the gradient is that of the same micro-batches on whatever ranks",
    Verdict.DIFFERS: "differs: it runs, but equality with the un-split batch cannot be had",
    Verdict.UNTESTED: "untested: it runs, and has not been compared",
    Verdict.EXCLUSIVE: "exclusive: the two never meet",
    Verdict.REFUSED: "refused: a `CompositionError` before the model is touched; what shows only while a model runs is "
    "refused in its first backward, before the update",
}
_SECTIONS: Mapping[str, Verdict] = {
    "Refused": Verdict.REFUSED,
    "Differs": Verdict.DIFFERS,
    "Exact for the same cut": Verdict.SAME_CUT,
    "Untested": Verdict.UNTESTED,
    "Exclusive across axes": Verdict.EXCLUSIVE,
}
_KNOWN: Mapping[str, str] = {
    "built": "when the engine is built",
    "first batch": "at the first batch",
    "running": "only while it runs",
}


def _legend() -> str:
    rows = [f"| `{verdict.value}` | {_MEANINGS[verdict]} |" for verdict in Verdict]
    return "\n".join(["| mark | meaning |", "|---|---|", *rows])


def _features() -> str:
    rows = [
        f"| {number} | `{feature.name.lower()}` | {feature.axis.name} | {feature.says} | {_KNOWN[feature.axis.known]} |"
        for number, feature in enumerate(Feature, 1)
    ]
    return "\n".join(["| | feature | axis | means | known |", "|---|---|---|---|---|", *rows])


def _matrix() -> str:
    ordered = list(Feature)
    width = max(len(feature.name) for feature in ordered)
    lines = [" " * (width + 4) + "".join(f"{number:>3}" for number in range(1, len(ordered) + 1))]
    for number, row in enumerate(ordered, 1):
        marks = "".join(f"{cell(row, column).verdict.value:>3}" for column in ordered[:number])
        lines.append(f"{number:>2} {row.name.lower():<{width}} {marks}")
    return "\n".join(["The diagonal is a feature by itself.", "", "```text", *lines, "```"])


def _section(title: str, verdict: Verdict) -> str:
    grouped: dict[Cell, list[str]] = {}
    for one, other in pairs(Feature):
        found = cell(one, other)
        if is_stated(one, other) and found.verdict is verdict:
            names = (one,) if one is other else (one, other)
            grouped.setdefault(found, []).append(" with ".join(f"`{name.name.lower()}`" for name in names))
    items = [f"- {', '.join(names)}: {said.reason}. {said.instead}".rstrip() for said, names in grouped.items()]
    return "\n\n".join([f"## {title}", "\n".join(items) or "Nothing at present."])


if __name__ == "__main__":
    Path(__file__).with_name("composition.md").write_text(as_markdown() + "\n", encoding="utf-8")
