"""The programs of the cookbook: short, listed in docs/cookbook.md, and equal to plain PyTorch on whole batches."""

import pytest

from docs.write_cookbook import LOSSES, PAGE, PROGRAMS, ROW, described, error_by_hand, error_of
from tests.ranks_fixture import Ranks

BOUND = 1e-10
ALWAYS = ("moe_load_balance", "dapo", "preference_packed", "focal", "several_tasks", "gan", "freezing")
"""Programs that every run of the tests includes; CI draws some of the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.published]) for name in PROGRAMS]
)
@pytest.mark.slow
def test_program(name: str, two_ranks: Ranks) -> None:
    """Trained in micro-batches, on one rank and on two, parameters equal the result of plain PyTorch on whole batches.

    With the mean of the micro-batches' losses, as by hand, a loss would train other parameters.
    """
    errors = [error_of(name), *two_ranks.run(error_of, name)]

    assert all(error <= BOUND for error in errors), errors
    if name in LOSSES:
        assert error_by_hand(name) > 1e-4, "the mean of the micro-batches' losses would do too"


def test_the_page_lists_every_program() -> None:
    """Each program is in a table with its first line and length, at most 60 lines, and an error within the bound."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))

    assert {name: (text, int(lines)) for name, text, lines, *_ in rows} == {name: described(name) for name in PROGRAMS}
    assert max(int(lines) for _, _, lines, *_ in rows) <= 60
    assert max(float(error) for *_, one_rank, two_ranks in rows for error in (one_rank, two_ranks)) <= BOUND
