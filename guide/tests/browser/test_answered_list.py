"""Every element of the list in `docs/guide.md` does what the list says."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page

from guide.tests.browser.chromium import DESKTOP, bring_to_life, come_to, opened
from guide.tests.browser.element_checks import (
    adds_up,
    compares_memory,
    derives,
    ends_with_out_of_memory,
    grows_with_each_sample,
    has_both_sliders,
    is_equivalent,
    is_ready,
    is_titled,
    keeps_a_fixed_part,
    leads_on,
    moves_the_effective_batch,
    multiplies,
    names_the_field,
    opens_at_16_times_4,
    plays_on_sight,
    promises,
    runs_in_real_time,
    shows_the_effect_of_steps,
    trades,
    updates_once,
    verdict,
    works_through_a_split,
)
from guide.tests.browser.loop_checks import (
    begins_ready,
    builds_up_gradients,
    counts_micro_batches,
    draws_each_line,
    lights_up,
    plays_the_loop,
    steps_once,
)
from tests.architecture.source_tree import ROOT

ROWS = re.findall(
    r"^\| (.+?) \| .+? \| `#([\w-]+)` \|$", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), re.MULTILINE
)
"""Names and parts of the elements in the list."""
CONDITION = "True with a condition"
"""The verdict of claims that are true only under a condition."""
CHECKS: dict[str, Callable[[Locator], None]] = {
    "context line": names_the_field,
    "title": is_titled,
    "promise": promises,
    "visual and interactive, on sight": plays_on_sight,
    "call to begin": leads_on,
    "GPU memory is finite": ends_with_out_of_memory,
    "sliders: batch 16, memory 16 GiB": has_both_sliders,
    "fixed part": keeps_a_fixed_part,
    "linear growth, then out of memory": grows_with_each_sample,
    "split, animated": works_through_a_split,
    "process each, accumulate": adds_up,
    "update once, in the core idea": updates_once,
    "phase readout, ready": is_ready,
    "full loop, animated": plays_the_loop,
    "micro-batch counter, 0 of 4": counts_micro_batches,
    "gradients build up": builds_up_gradients,
    "single optimizer step": steps_once,
    "mathematics 1: full batch": derives(
        1, head="The gradient of the full batch is a mean", symbols="g\u2207L\u2211", says="alone"
    ),
    "mathematics 2: plain sum": derives(
        2, head="Add up the micro-batches: too large", symbols="\u2211gk", says="4.0\u00a0times the length"
    ),
    "mathematics 3: divide": derives(
        3, head="Divide by their number: exact", symbols="1K\u2211", says="the result is off by 11%"
    ),
    "mathematics 4: update": derives(
        4, head="The weights move once", symbols="\u03b8\u2190\u03b7g", says="by the learning rate"
    ),
    "effective = micro-batch x steps": multiplies,
    "equivalence, stated": is_equivalent,
    "code, line by line, with a picture": lights_up,
    "each line has its visual action": draws_each_line,
    "ready, in the code": begins_ready,
    "memory comparison": compares_memory,
    "slider of the effective batch, 64": moves_the_effective_batch,
    "trade time for memory": trades,
    "advantage: larger batches, contrastive learning": verdict(
        "Contrastive learning", words=CONDITION, number=r"14\.6%, .* 11\.8%", says="contrastive learning needs"
    ),
    "advantage: convergence": verdict(
        "Less noise",
        words=CONDITION,
        number=r"0\.127 instead of 0\.144",
        says="converges better",
        details=r"same number of samples, the loss with large batches is 0\.211",
    ),
    "advantage: works everywhere": verdict(
        "Any hardware",
        words=CONDITION,
        number=r"^True with a condition: Only as far as tested: on one CPU",
        says="any hardware",
    ),
    "advantage: easy": verdict(
        "Three lines",
        words=CONDITION,
        number=r"3.lines change",
        says="three extra lines",
        details=r"findings in the usual loop\s*1",
    ),
    "limitation: slower": verdict(
        "N times longer",
        words=CONDITION,
        number=r"3\.0.times as long",
        says="N times as long",
        details=r"same samples in one pass, it takes 1\.6.times as long",
    ),
    "limitation: BatchNorm": verdict(
        "BatchNorm", words="True", number=r"29% with BatchNorm", says="statistics of each micro-batch"
    ),
    "limitation: stale gradients": verdict(
        "Stale gradients", words="False", number=r"change of a weight is 0", says="are stale"
    ),
    "limitation: memory is not free": verdict(
        "Memory is not free", words="True", number=r"sum of the earlier gradients \(259.KiB\)", says="keeps gradients"
    ),
    "playground: opening": opens_at_16_times_4,
    "playground: watch it run in real time": runs_in_real_time,
    "playground: effect of the steps": shows_the_effect_of_steps,
}
"""The check of each element, by its name in the list."""


@pytest.fixture(scope="module")
def page(browser: Browser, address: str) -> Iterator[Page]:
    """Open the exported page, and hydrate all of it."""
    with opened(browser, address, **DESKTOP) as watched:
        bring_to_life(watched.page)
        yield watched.page

        assert watched.faults == []


@pytest.mark.parametrize(("name", "place"), ROWS, ids=lambda row: row)
def test_an_element_does_what_the_list_says(page: Page, name: str, place: str) -> None:
    """The element is on the page and does its job from the list."""
    CHECKS[name](page.locator("#top") if place == "top" else come_to(page, place))


def test_each_element_of_the_list_has_a_check() -> None:
    """The list has forty elements, and each has a check."""
    assert [name for name, _ in ROWS] == list(CHECKS)
    assert len(ROWS) == 40
