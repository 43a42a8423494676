"""The composition table is complete, has reasons, and is checked as printed."""

import runpy
from pathlib import Path

from anybatch.core.compatibility import (
    Cell,
    Feature,
    Verdict,
    cell,
    check_combinations,
    pairs,
    remarks,
)
from anybatch.errors import CompositionError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "composition.md"
as_markdown = runpy.run_path(str(PAGE.with_name("write_composition.py")))["as_markdown"]
ALL_PAIRS = pairs(Feature)


def refused(*features: Feature) -> str:
    """Return the error message for a combination of features, or an empty string."""
    try:
        check_combinations(dict.fromkeys(features, ""))
    except CompositionError as error:
        return str(error)
    return ""


def test_page_is_current() -> None:
    """docs/composition.md is up to date with `docs/write_composition.py`."""
    assert PAGE.read_text(encoding="utf-8") == as_markdown() + "\n"


def test_inexact_cells_have_a_reason() -> None:
    """A refused or inexact cell has a reason and a remedy; an exclusive one has a reason."""
    for one, other in ALL_PAIRS:
        found = cell(one, other)
        said = bool(found.reason), bool(found.remedy)
        assert said == {Verdict.EXACT: (False, False), Verdict.EXCLUSIVE: (True, False)}.get(
            found.verdict, (True, True)
        )
        assert not found.reason.endswith(".")
        assert not found.remedy or found.remedy.endswith(".")


def test_exactly_the_refused_cells_are_refused() -> None:
    """The check raises for a pair if and only if its cell is refused, with the cell's reason and remedy."""
    num_refused = 0
    for one, other in ALL_PAIRS:
        found = cell(one, other)
        if found.verdict is Verdict.EXCLUSIVE:
            continue  # never checked, as nobody can request both
        message = refused(one, other)
        assert bool(message) is (found.verdict is Verdict.REFUSED)
        assert found.verdict is not Verdict.REFUSED or (found.reason in message and found.remedy in message)
        num_refused += bool(message)
    assert num_refused == sum(cell(*pair).verdict is Verdict.REFUSED for pair in ALL_PAIRS) > 0


def test_every_reason_is_given_once() -> None:
    """Several refused pairs give one message with each reason once."""
    lines = refused(Feature.DDP, Feature.LOW_PARAMETERS, Feature.CAST, Feature.FP16, Feature.ALONE).splitlines()

    assert len(lines) == 3
    assert len({line.partition(": ")[2] for line in lines}) == 3


def test_stated_pairs_imply_exactness() -> None:
    """Only a feature that is listed as exact with an inexact one makes the combination exact."""
    assert cell(Feature.REENTRANT, Feature.COMPILED) == Cell(Verdict.EXACT)
    assert not refused(Feature.REENTRANT, Feature.COMPILED, Feature.DDP)
    assert refused(Feature.REENTRANT, Feature.DDP)


def test_remarks_list_inexact_features() -> None:
    """Remarks list inexact or cut-dependent features once each; a run without such features has none."""
    exact = {f for f in Feature if cell(f, f).verdict is Verdict.EXACT}
    common = {f for f in exact if f.axis != "norms"}
    assert remarks(common) == ()

    said = remarks({*common, Feature.BATCH_NORM, Feature.DROPOUT_KEYED})
    assert [line.partition(":")[0] for line in said] == [Feature.BATCH_NORM.label, Feature.DROPOUT_KEYED.label]
    assert cell(Feature.BATCH_NORM, Feature.BATCH_NORM).remedy in said[0]

    for cure in exact - common:
        assert remarks({*common, Feature.BATCH_NORM, cure}) == ()

    (said_of_both,) = remarks({*common, Feature.NORMS_SYNC, Feature.BATCH_NORM})
    assert said_of_both.startswith(f"{Feature.BATCH_NORM.label} with {Feature.NORMS_SYNC.label}: ")


def test_features_implied_by_low_parameters_are_refused() -> None:
    """bf16 and fp16 parameters imply master weights and cast gradients, so errors for these apply to them."""
    for feature in Feature:
        if cell(feature, Feature.LOW_PARAMETERS).verdict is Verdict.REFUSED:
            for implied in (Feature.MASTER_WEIGHTS, Feature.CAST, Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS):
                assert cell(feature, implied).verdict is Verdict.REFUSED
