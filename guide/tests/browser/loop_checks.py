"""Checks of the elements of the full loop, in the list in `docs/guide.md`."""

import pytest
from playwright.sync_api import Locator, expect

from guide.tests.browser.element_checks import READY, heights, phase_of, slider

PLAYED = """async loop => {
    const does = loop.querySelector('.does'), seen = [phase()];
    function phase() { return loop.querySelector('.phases [aria-current=step]')?.textContent; }
    await new Promise(done => {
        const watch = new MutationObserver(() => {
            seen.push(phase());
            if (seen.length === 10) { watch.disconnect(); done(); }
        });
        watch.observe(does.closest('.walk').querySelector('.code'), {subtree: true, attributes: true});
        watch.observe(does, {subtree: true, characterData: true});
        loop.querySelector('.play').click();
    });
    loop.querySelector('.play').click();
    return seen;
}"""
"""Plays the loop, and returns its first phases."""
DRAWING = "moment => [...moment.querySelectorAll('svg')].map(drawing => drawing.innerHTML)"
"""The drawing of a moment, without its labels."""


def plays_the_loop(loop: Locator) -> None:
    """Playing runs line after line at the chosen speed, until the loop is done."""
    slider(loop, "Moment of the run").fill("0")
    loop.get_by_label("Speed").first.select_option("4\u00d7")
    passes = ["load", *["forward"] * 3, "backward", "accumulate", "check"]
    assert loop.evaluate(PLAYED) == ["ready", "clear", *passes, "load"]
    position = slider(loop, "Moment of the run")
    position.press("End")
    end = int(position.input_value())
    position.fill(str(end - 2))
    loop.get_by_role("button", name="Play").click()
    expect(position).to_have_value(str(end))
    assert phase_of(loop) == "done"


def counts_micro_batches(loop: Locator) -> None:
    """The counter starts at 0 of 4, and shows which micro-batch runs."""
    slider(loop, "Moment of the run").fill("0")
    counts = loop.locator(".counts")
    expect(counts).to_have_text(f"{READY} 0 of 4 added 0 updates", use_inner_text=True)
    shown = [text for _, _, text in steps_of(loop)]
    for number in range(1, 5):
        assert f"micro-batch {number} of 4 {number - 1} of 4 added 0 updates" in shown
    assert shown[-1].endswith("4 of 4 added 0 updates")


def steps_of(loop: Locator) -> list[tuple[str, str, str]]:
    """Go on until all four micro-batches are added; return line, phase and counters of each moment."""
    counts, line = loop.locator(".counts"), loop.locator(".code [aria-current=step]")
    seen = []
    while "4 of 4 added" not in counts.inner_text():
        loop.get_by_role("button", name="Next").click()
        text = " ".join(counts.inner_text().split())
        seen.append((line.get_attribute("data-line") or "", phase_of(loop), text))
    return seen


def builds_up_gradients(loop: Locator) -> None:
    """Each accumulation adds the micro-batch's gradient to the sum, until it fills the outline of the final sum."""
    strips, position = loop.locator(".strips svg"), slider(loop, "Moment of the run")
    position.fill("0")
    previous = [0.0] * 42
    added = 0
    while added < 4:
        loop.get_by_role("button", name="Next").click()
        if phase_of(loop) != "accumulate":
            continue
        added += 1
        total = heights(strips.nth(1).locator(".gradient"))
        assert sum(map(abs, total)) > 0
        assert total != previous
        previous = total
    assert len(previous) > 35  # without bars that round to nothing
    assert previous == pytest.approx(heights(strips.nth(1).locator(".goal")), abs=0.21)


def steps_once(loop: Locator) -> None:
    """After the fourth micro-batch the weights move, and before it they do not."""
    weights = loop.locator(".strips svg.weights .gradient")
    slider(loop, "Moment of the run").fill("0")
    before = weights.get_attribute("d")
    steps_of(loop)
    assert weights.get_attribute("d") == before
    while phase_of(loop) != "update":
        loop.get_by_role("button", name="Next").click()
    expect(loop.locator(".counts")).to_have_text(f"{READY} 4 of 4 added 1 update", use_inner_text=True)
    assert weights.get_attribute("d") != before
    assert loop.locator(".strips svg.weights .goal").get_attribute("d") == before


def lights_up(loop: Locator) -> None:
    """The code has the loop, and each line of a micro-batch is marked with its phase, its caption and its picture."""
    expect(loop.locator(".code")).to_contain_text("loss = loss / accumulation_steps")
    slider(loop, "Moment of the run").fill("0")
    passes = [("5", "forward"), ("6", "forward"), ("7", "forward"), ("8", "backward"), ("8", "accumulate")]
    window = [("4", "load"), *passes, ("10", "check")]
    seen = [(line, phase) for line, phase, _ in steps_of(loop)]
    assert [*seen, ("10", "check")] == [("3", "clear"), *window * 4]


def draws_each_line(loop: Locator) -> None:
    """Each step changes the drawing; the loop takes a numbered micro-batch; lines 5, 6 and 7 have three captions."""
    position, does = slider(loop, "Moment of the run"), loop.locator(".does")
    position.fill("0")
    said = {}
    while phase_of(loop) != "accumulate":
        loop.get_by_role("button", name="Next").click()
        line = loop.locator(".code [aria-current=step]").get_attribute("data-line") or ""
        said[line, phase_of(loop)] = does.inner_text()
        if phase_of(loop) in ("forward", "backward"):
            expect(loop.locator(f".links.{phase_of(loop)}")).to_have_count(1)
            expect(loop.locator(".apart")).to_have_count(1)
    assert len({said[line, "forward"] for line in ("5", "6", "7")}) == 3
    assert "divided by the 4" in said["7", "forward"]
    assert said["3", "clear"] == "Nothing to clear yet: p.grad is empty."
    draws_the_decision(loop)
    changes_the_drawing(loop)


def draws_the_decision(loop: Locator) -> None:
    """Line 10 draws the number of added micro-batches and the decision, and keeps loss and gradient."""
    slider(loop, "Moment of the run").fill("0")
    loss, gradient = loop.locator(".moment svg").first.locator("text").last, loop.locator(".strips .gradient").first
    before: list[str | None] = []
    for number in range(1, 5):
        while phase_of(loop) != "check":
            before = [loss.text_content(), gradient.get_attribute("d")]
            loop.get_by_role("button", name="Next").click()
        expect(loop.locator(".moment rect.gradient")).to_have_count(number)
        expect(loop.locator(".moment text.strong.middle").last).to_have_text("update now" if number == 4 else "not yet")
        assert before == [loss.text_content(), gradient.get_attribute("d")]
        loop.get_by_role("button", name="Next").click()


def changes_the_drawing(loop: Locator) -> None:
    """After every Next the drawing differs from the one before; line 4 lifts and names the micro-batch it takes."""
    slider(loop, "Moment of the run").fill("0")
    following, line, does = (
        loop.get_by_role("button", name="Next"),
        loop.locator(".code [aria-current=step]"),
        loop.locator(".does"),
    )
    taken: list[int] = []
    before = loop.locator(".moment").first.evaluate(DRAWING)
    while following.is_enabled():
        following.click()
        drawn = loop.locator(".moment").first.evaluate(DRAWING)
        assert drawn != before, does.inner_text()
        before = drawn
        if line.get_attribute("data-line") == "4" and following.is_enabled():
            taken.append(len(taken) % 4 + 1)
            expect(does).to_have_text(f"The loop takes micro-batch {taken[-1]} of 4.")
            expect(loop.locator(".counts .runs")).to_have_text(f"micro-batch {taken[-1]} of 4")
            expect(loop.locator(".apart")).to_have_count(1)
    assert taken == [1, 2, 3, 4] * 2
    expect(does).to_have_text("All micro-batches are used: the loop ends.")


def begins_ready(loop: Locator) -> None:
    """The first line is marked, the phase is ready, and nothing has run."""
    slider(loop, "Moment of the run").fill("0")
    assert phase_of(loop) == "ready"
    expect(loop.locator(".does")).to_have_text("Nothing has run yet.")
    expect(loop.locator(".code [aria-current=step]")).to_contain_text("accumulation_steps = 4")
