"""Every element of the list in `docs/guide.md` does what the list says."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

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


class Element(NamedTuple):
    """An element: its name, its part of the page, what it does (as in `docs/guide.md`), and the check of that."""

    name: str
    place: str
    does: str
    check: Callable[[Locator], None]


ELEMENTS = (
    Element(
        "context line", "top", "Names the field above the title: GPU workshop, memory optimization.", names_the_field
    ),
    Element("title", "top", "Says what the page is about.", is_titled),
    Element(
        "promise",
        "top",
        "Promises large effective batches in little GPU memory, and says how.",
        promises,
    ),
    Element(
        "visual and interactive, on sight",
        "top",
        "Says that the guide is interactive; its first figure plays without a click.",
        plays_on_sight,
    ),
    Element("call to begin", "top", "Is visible in the first window and leads to the first chapter.", leads_on),
    Element(
        "GPU memory is finite",
        "top",
        "A batch of 64 exceeds the memory limit in the forward pass, and the step is refused: out of memory.",
        ends_with_out_of_memory,
    ),
    Element(
        "sliders: batch 16, memory 16 GiB",
        "gpu-memory",
        "Each slider opens at 16 and changes whether the step fits.",
        has_both_sliders,
    ),
    Element(
        "fixed part",
        "gpu-memory",
        "Weights, gradients and optimizer state take the same memory for every batch size.",
        keeps_a_fixed_part,
    ),
    Element(
        "linear growth, then out of memory",
        "gpu-memory",
        "Activations grow linearly with the batch, drawn to scale, until the step does not fit.",
        grows_with_each_sample,
    ),
    Element(
        "split, animated",
        "split",
        "One batch moves apart into its micro-batches, and the one that runs is outlined.",
        works_through_a_split,
    ),
    Element(
        "process each, accumulate",
        "split",
        "Each micro-batch adds its term to the equation and its bars to the sum, which fills the full gradient.",
        adds_up,
    ),
    Element(
        "update once, in the core idea",
        "split",
        "After the last micro-batch the weights move once; a wrong divisor misses the gradient.",
        updates_once,
    ),
    Element(
        "phase readout, ready",
        "split",
        "Shows ready, forward, backward or update; it opens ready, with nothing added.",
        is_ready,
    ),
    Element(
        "full loop, animated",
        "loop",
        "Plays two steps of four micro-batches at the chosen speed, without frames in which nothing is computed.",
        plays_the_loop,
    ),
    Element(
        "micro-batch counter, 0 of 4",
        "loop",
        "Starts at 0 of 4, and shows which micro-batch runs, how many are added, and the updates.",
        counts_micro_batches,
    ),
    Element(
        "gradients build up",
        "loop",
        "Each accumulation adds the micro-batch's gradient to the sum, until it fills the outline.",
        builds_up_gradients,
    ),
    Element(
        "single optimizer step",
        "loop",
        "The weights move once, after the fourth micro-batch; hollow bars show where they were.",
        steps_once,
    ),
    Element(
        "mathematics 1: full batch",
        "mathematics",
        "Defines the gradient of the full batch as a mean over samples.",
        derives(1, head="The gradient of the full batch is a mean", symbols="g\u2207L\u2211", says="alone"),
    ),
    Element(
        "mathematics 2: plain sum",
        "mathematics",
        "Adds up the micro-batches' gradients without a factor: four times too long.",
        derives(2, head="Add up the micro-batches: too large", symbols="\u2211gk", says="4.0\u00a0times the length"),
    ),
    Element(
        "mathematics 3: divide",
        "mathematics",
        "Divides by the number of micro-batches: exactly the full gradient; shows the error of a wrong divisor.",
        derives(3, head="Divide by their number: exact", symbols="1K\u2211", says="the gradient is off by 11%"),
    ),
    Element(
        "mathematics 4: update",
        "mathematics",
        "Moves the weights against the sum, by the learning rate.",
        derives(4, head="The weights move once", symbols="\u03b8\u2190\u03b7g", says="by the learning rate"),
    ),
    Element(
        "effective = micro-batch x steps",
        "mathematics",
        "States the product next to the division: N = n x K, 64 = 16 x 4.",
        multiplies,
    ),
    Element(
        "equivalence, stated",
        "mathematics",
        "States that the step is exactly the step of the full batch, with the measured error.",
        is_equivalent,
    ),
    Element(
        "code, line by line, with a picture",
        "loop",
        "Marks the line that runs next to the picture, for every line of the loop.",
        lights_up,
    ),
    Element(
        "each line has its visual action",
        "loop",
        "Each line has its caption and changes the drawing; forward and backward flow through the drawn network.",
        draws_each_line,
    ),
    Element(
        "ready, in the code", "loop", "Before the first line nothing has run, and the readout says so.", begins_ready
    ),
    Element(
        "memory comparison",
        "memory",
        "Compares one pass with a split of the same effective batch, by category, as bars.",
        compares_memory,
    ),
    Element(
        "slider of the effective batch, 64",
        "memory",
        "Opens at 64; a larger one makes one pass larger, and hardly changes the split.",
        moves_the_effective_batch,
    ),
    Element(
        "trade time for memory",
        "memory",
        "One point per split on a curve of memory and measured time of a step; the reader drags along it.",
        trades,
    ),
    Element(
        "advantage: larger batches, contrastive learning",
        "claims",
        "A card with matches found by plain accumulation and by two passes over the batch.",
        verdict(
            "Contrastive learning", words="true only if", number=r"11\.8% .* 14\.6%", says="contrastive learning needs"
        ),
    ),
    Element(
        "advantage: convergence",
        "claims",
        "A card with the held-out loss of a larger batch, after the same number of steps and of samples.",
        verdict("Less noise", words="true only if", number=r"0\.127 instead of 0\.144", says="converges better"),
    ),
    Element(
        "advantage: works everywhere",
        "claims",
        "A card with the measured error on this CPU, limited to what was measured.",
        verdict("Any hardware", words="true only if", number=r"as far as tested: on one CPU", says="any hardware"),
    ),
    Element(
        "advantage: easy",
        "claims",
        "A card that counts changed lines and the mistakes a checker finds in them.",
        verdict("Three lines", words="true only if", number=r"3.lines change", says="three extra lines"),
    ),
    Element(
        "limitation: slower",
        "claims",
        "A card with the measured time of a step, relative to one pass and to one micro-batch.",
        verdict("N times longer", words="true only if", number=r"3\.0.times as long", says="N times as long"),
    ),
    Element(
        "limitation: BatchNorm",
        "claims",
        "A card with the error of the gradient with BatchNorm, and with GroupNorm.",
        verdict("BatchNorm", words="true", number=r"29% with BatchNorm", says="statistics of each micro-batch"),
    ),
    Element(
        "limitation: stale gradients",
        "claims",
        "A card that refutes it: the weights do not move within a window.",
        verdict("Stale gradients", words="false", number=r"change of a parameter is 0", says="are stale"),
    ),
    Element(
        "limitation: memory is not free",
        "claims",
        "A card with the copy of the gradients that stays in memory.",
        verdict(
            "Memory is not free", words="true", number=r"one copy of the gradients \(259.KiB\)", says="keeps gradients"
        ),
    ),
    Element(
        "playground: opening",
        "playground",
        "Opens with micro-batch 16, 4 steps, effective batch 64, a predicted peak, 0 updates and a loss of 2.30.",
        opens_at_16_times_4,
    ),
    Element(
        "playground: watch it run in real time",
        "playground",
        "While it plays, the gradient visibly fills in the first steps, and the curve grows until the loss is below 1.",
        runs_in_real_time,
    ),
    Element(
        "playground: effect of the steps",
        "playground",
        "More accumulation steps change effective batch and loss, and hardly the memory; a pinned run stays.",
        shows_the_effect_of_steps,
    ),
)


@pytest.fixture(scope="module")
def page(browser: Browser, address: str) -> Iterator[Page]:
    """Open the exported page, and hydrate all of it."""
    with opened(browser, address, **DESKTOP) as watched:
        bring_to_life(watched.page)
        yield watched.page

        assert watched.faults == []


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_an_element_does_what_the_list_says(page: Page, element: Element) -> None:
    """The element is on the page, and does what its description says."""
    element.check(page.locator("#top") if element.place == "top" else come_to(page, element.place))


def test_the_list_is_in_the_documentation() -> None:
    """The table in `docs/guide.md` has these elements in this order, with what each does and the link to its part."""
    table = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `#([\w-]+)` \|$", table, re.MULTILINE)

    assert rows == [(element.name, element.does, element.place) for element in ELEMENTS]
    assert len(rows) == 40
