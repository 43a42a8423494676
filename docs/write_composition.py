"""Write docs/composition.md from the table: `python docs/write_composition.py`."""

from collections.abc import Mapping
from pathlib import Path

from anybatch.core.compatibility import TABLE, Combinations, Feature, Verdict


def as_markdown() -> str:
    """Return the table as a page of the documentation."""
    parts = [
        _INTRODUCTION,
        *(_section(verdict, *texts) for verdict, texts in _SECTIONS.items()),
        _ATTACHED,
        "## Names of features",
        _features(),
    ]
    return "\n\n".join(parts)


_INTRODUCTION = """# Which features can be combined

A combination of two [features](#names-of-features) that is not listed here is exact.
Exact means the gradient of the unsplit batch: to 1e-12 in float64, and up to rounding in bf16 and fp16.
The engine raises a `CompositionError` before it changes the model; a few errors come in the first backward.
A test runs every pair on one and on two CPU ranks, with torch.compile's backends `aot_eager` and `eager`.

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
_SECTIONS: Mapping[Verdict, tuple[str, str]] = {
    Verdict.REFUSED: ("Refused", ""),
    Verdict.DIFFERS: ("Differs", "These run, with a different gradient."),
    Verdict.SAME_SPLIT: (
        "Exact for the same split",
        "Micro-batches of the same samples give the same gradient on any number of ranks.",
    ),
    Verdict.EXCLUSIVE: ("Exclusive", "These cannot occur together."),
}
_DETECTED_LATE: Mapping[str, str] = {
    "batch": " (detected at the first batch)",
    "idle parameters": " (detected in a run)",
    "checkpointing": " (detected in a run)",
}


def _features() -> str:
    rows = [
        f"| `{feature.name.lower()}` | {feature.label}{_DETECTED_LATE.get(feature.axis, '')} |" for feature in Feature
    ]
    return "\n".join(["| feature | meaning |", "|---|---|", *rows])


def _named(combinations: Combinations) -> str:
    """Return the names of features or pairs; pairs with the same second features are joined: "`a`, `b` with `c`"."""
    seconds: dict[str, list[str]] = {}
    for first, *others in combinations:
        seconds.setdefault(f"`{first.name.lower()}`", []).extend(f"`{other.name.lower()}`" for other in others)
    firsts: dict[tuple[str, ...], list[str]] = {}
    for name, partners in seconds.items():
        firsts.setdefault(tuple(partners), []).append(name)
    parts = [(", ".join(names), ", ".join(partners)) for partners, names in firsts.items()]
    return "; ".join(" with ".join(filter(None, part)) for part in parts)


def _section(verdict: Verdict, title: str, meaning: str) -> str:
    items = []
    for combinations, found in TABLE.items():
        if found.verdict is verdict:
            items.append(f"- {_named(combinations)}: {found.reason}. {found.remedy}".rstrip())
    return "\n\n".join(filter(None, [f"## {title}", meaning, "\n".join(items) or "None."]))


if __name__ == "__main__":
    Path(__file__).with_name("composition.md").write_text(as_markdown() + "\n", encoding="utf-8")
