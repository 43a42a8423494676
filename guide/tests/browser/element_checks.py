"""Checks of the elements of the list in `docs/guide.md`: what each of them does."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import FloatRect, Locator, expect

from guide.tests.browser.chromium import DESKTOP, opened

READY = "micro-batch \u2013 of 4"
FILLED = """async playground => {
    const strip = playground.querySelector('.seen'), seen = new Map(), begun = [];
    await new Promise(done => {
        const watch = new MutationObserver(() => {
            const text = strip.querySelector('.who').textContent;
            const number = text.match(/(\\d) (of 4 micro|of 4: )/)?.[1];
            if (!number || seen.has(number)) return;
            begun.push(performance.now());
            seen.set(number, strip.querySelector('.gradient').getAttribute('d'));
            if (seen.size === 4) { watch.disconnect(); done(); }
        });
        watch.observe(strip, {subtree: true, childList: true, characterData: true, attributes: true});
        [...playground.querySelectorAll('button')].find(one => /^(Play|Train)/.test(one.textContent)).click();
    });
    return [[...seen], begun[3] - begun[0]];
}"""
"""Plays the run, and returns numbers and bars as the first micro-batches are added, and the milliseconds in between."""
BARS = "path => (path.getAttribute('d').match(/v-?[\\d.]+/g) ?? []).map(bar => Number(bar.slice(1)))"
"""Heights of the bars of a strip."""


def slider(place: Locator, name: str) -> Locator:
    """Return a slider."""
    return place.get_by_role("slider", name=name, exact=True)


def phase_of(place: Locator) -> str:
    """Return the phase that the readout of a figure shows."""
    lit = place.locator(".phases [aria-current=step]")
    return lit.inner_text() if lit.count() else ""


def box_of(element: Locator) -> FloatRect:
    """Return the place of an element."""
    box = element.bounding_box()
    assert box is not None
    return box


def heights(path: Locator) -> list[float]:
    """Return the heights of the bars of a strip."""
    found: list[float] = path.evaluate(BARS)
    return found


def number_in(text: str, pattern: str) -> float:
    """Return the number that a pattern finds in a text."""
    found = re.search(pattern, text.replace("\u00a0", " "))
    assert found is not None, text
    return float(found[1].replace(",", ""))


def verdict(title: str, *, words: str, number: str, says: str, details: str = "Rule") -> Callable[[Locator], None]:
    """Return a check of a claim's card: its verdict, number, statement, and words of its details."""

    def check(claims: Locator) -> None:
        card = claims.get_by_role("article", name=title, exact=True)
        expect(card.locator(".verdict")).to_have_text(f"{words}:")
        expect(card.locator(".text")).to_have_text(re.compile(number))
        expect(card.locator("h4")).to_contain_text(says)
        expect(card.locator(".box")).to_have_text(re.compile(details))

    return check


# The first screen


def names_the_field(top: Locator) -> None:
    """The eyebrow is above the title."""
    eyebrow, title = top.locator(".eyebrow"), top.get_by_role("heading", level=1)
    expect(eyebrow).to_have_text("Interactive GPU workshop: memory optimization")
    assert box_of(eyebrow)["y"] + box_of(eyebrow)["height"] <= box_of(title)["y"] + 1


def is_titled(top: Locator) -> None:
    """The title is the page's only heading of the first level."""
    expect(top.page.get_by_role("heading", level=1)).to_have_text("Gradient accumulation")


def promises(top: Locator) -> None:
    """The promise has the GPU's memory, the effective batch and the method."""
    for words in ("GPU", "memory", "effective batch", "add up the gradients", "update once"):
        expect(top.locator(".lead")).to_contain_text(words)


def plays_on_sight(top: Locator) -> None:
    """The text says that the guide is interactive, and the scene starts without a click."""
    expect(top).to_contain_text("interactive")
    with_browser = top.page.context.browser
    assert with_browser is not None
    with opened(with_browser, top.page.url.split("#")[0], **DESKTOP) as fresh:
        position = fresh.page.get_by_role("slider", name="Position in the scene")
        expect(position).not_to_have_value("0")
        expect(position).to_be_in_viewport()


def leads_on(top: Locator) -> None:
    """The button is in the first window and leads to the first chapter."""
    begin = top.get_by_role("link", name=re.compile("^(Start|Begin)"))
    top.page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    expect(begin).to_be_in_viewport(ratio=1)
    begin.click()
    expect(top.page.locator("#gpu-memory h2")).to_be_in_viewport()


# Why a batch does not fit


def ends_with_out_of_memory(top: Locator) -> None:
    """In the scene the whole batch exceeds the limit, and the refused step is named."""
    position = slider(top, "Position in the scene")
    position.fill("5")
    expect(top.locator(".words .head")).to_have_text("Out of memory")
    says = top.locator(".words .detail").inner_text()
    assert number_in(says, r"needs ([\d.]+) MiB") > number_in(says, r"limit is ([\d.]+)\.")


def has_both_sliders(memory: Locator) -> None:
    """Both sliders open at 16, and each changes the verdict."""
    size, gpu, says = slider(memory, "Batch size"), slider(memory, "Memory of the GPU"), memory.locator(".verdict")
    expect(memory.get_by_role("spinbutton", name=re.compile("^Batch size"))).to_have_value("16")
    expect(memory.get_by_role("spinbutton", name=re.compile("^Memory of the GPU"))).to_have_value("16")
    size.press("Home")
    expect(says).to_have_text("Fits")
    size.press("End")
    expect(says).to_have_text("Does not fit")
    typed(memory, "Batch size", 16)
    expect(says).to_have_text("Does not fit")
    gpu.press("End")
    expect(says).to_have_text("Fits")
    typed(memory, "Memory of the GPU", 16)
    expect(says).to_have_text("Does not fit")


def typed(place: Locator, name: str, value: int) -> None:
    """Type a number next to a slider."""
    box = place.get_by_role("spinbutton", name=re.compile(f"^{name}"))
    box.fill(str(value))
    box.press("Enter")


def peaks(memory: Locator) -> dict[int, dict[str, str]]:
    """Return the planned memory by batch size and column, from the figure's table."""
    figure = memory.locator("figure", has_text="Memory needed by a step").first
    figure.locator("button.mark").first.press("Enter")
    box = figure.locator("[popover]").first
    expect(box.locator("tbody tr").first).to_be_visible()
    heads = [text.strip() for text in box.locator("thead th").all_text_contents()]
    rows = [row.locator("th, td").all_text_contents() for row in box.locator("tbody tr").all()]
    memory.page.keyboard.press("Escape")
    return {int(row[0].replace(",", "")): dict(zip(heads, row, strict=True)) for row in rows}


def keeps_a_fixed_part(memory: Locator) -> None:
    """Weights, gradients and optimizer state are equal for all batch sizes."""
    rows = peaks(memory)
    for part in ("weights", "optimizer state"):
        assert len({row[part] for row in rows.values()}) == 1


def grows_with_each_sample(memory: Locator) -> None:
    """Activations grow linearly, on an axis that is to scale, until the step does not fit."""
    rows = peaks(memory)
    parts = {
        size: number_in(row["activations"], r"([\d.,]+) GiB")
        for size, row in rows.items()
        if "GiB" in row["activations"]
    }
    (small, first), (large, last) = min(parts.items()), max(parts.items())
    assert last / first == pytest.approx(large / small, rel=0.02)
    assert "not to scale" not in memory.inner_text()
    slider(memory, "Batch size").press("End")
    expect(memory.locator(".verdict")).to_have_text("Does not fit")


# Split, accumulate, update


def settle(place: Locator) -> None:
    """Finish all transitions."""
    place.page.evaluate("document.getAnimations().forEach(one => one.finish())")


def works_through_a_split(split: Locator) -> None:
    """The split opens ready with one whole batch; then its parts move apart and are added, and one update follows."""
    count, blocks, sums = split.locator(".count"), split.locator("svg:visible .block"), split.locator(".sum .on")
    following = split.get_by_role("button", name="Next")
    settle(split)
    whole = box_of(blocks.nth(3))["x"]
    for number in range(1, 5):
        following.click()
        assert phase_of(split) == "forward"
        expect(count).to_contain_text(f"micro-batch {number} of 4 \u00b7 {number - 1} of 4 added")
        expect(split.locator("svg:visible .runs text")).to_have_text(str(number))
        expect(sums).to_have_count(number - 1)
        following.click()
        assert phase_of(split) == "backward"
        expect(count).to_contain_text(f"micro-batch {number} of 4 \u00b7 {number} of 4 added")
        expect(sums).to_have_count(number)
    settle(split)
    assert box_of(blocks.nth(3))["x"] > whole + 20


def add_all(split: Locator) -> None:
    """Step until all four micro-batches are added, from wherever the split is."""
    for _ in range(8):
        if "4 of 4 added" in (split.locator(".count").text_content() or ""):
            return
        split.get_by_role("button", name="Next").click()


def adds_up(split: Locator) -> None:
    """Each micro-batch adds its term, and the bars of the sum reach the outline of the full batch's gradient."""
    add_all(split)
    sums, goal = (heights(split.locator(f"svg:visible .{name}").first) for name in ("gradient", "goal"))
    assert len(sums) == 64
    assert sums == pytest.approx(goal, abs=0.21)
    expect(split.locator(".sum math")).to_contain_text("p.grad")
    expect(split.locator(".sum mfrac")).to_have_text("nkN")
    expect(split.locator(".sum .on")).to_have_text(["16/64 g1", "+ 16/64 g2", "+ 16/64 g3", "+ 16/64 g4"])


def updates_once(split: Locator) -> None:
    """The last step moves the weights once, and there is no further one."""
    add_all(split)
    weights = split.locator("svg:visible .weights .gradient")
    before = weights.get_attribute("d")
    split.get_by_role("button", name="Next").click()
    assert phase_of(split) == "update"
    expect(split.locator(".count")).to_contain_text("4 of 4 added \u00b7 1 update")
    assert weights.get_attribute("d") != before
    expect(split.get_by_role("button", name="Next")).to_be_disabled()
    split.get_by_role("radio", name="its mean").check(force=True)
    expect(split.locator("figcaption").first).to_contain_text("only rounding")  # the usual loop, with equal parts
    split.get_by_role("radio", name="one sample").check(force=True)
    expect(split.locator("figcaption").first).to_contain_text("The relative error of the sum is 28%")
    expect(split.locator(".sum mfrac")).to_have_text("1K")
    assert split.locator("svg:visible .beyond").first.get_attribute("d")


def is_ready(split: Locator) -> None:
    """Before the first click the phase is ready, the batch is whole, and nothing is added."""
    split.get_by_role("radio", name="same size").check(force=True)
    split.get_by_role("radio", name="its sum").check(force=True)
    while (back := split.get_by_role("button", name="Back")).is_enabled():
        back.click()
    expect(split.locator(".count")).to_have_text(f"{READY} \u00b7 0 of 4 added \u00b7 0 updates")
    assert phase_of(split) == "ready"
    expect(split.locator(".sum .on")).to_have_count(0)
    expect(split.locator("svg:visible .joined")).to_have_count(4)


# Why the sum is exact


def derives(step: int, *, head: str, symbols: str, says: str) -> Callable[[Locator], None]:
    """Return a check of a step of the derivation: heading, symbols of its equation, text and picture."""

    def check(mathematics: Locator) -> None:
        own = mathematics.locator(f".steps > li:nth-child({step})")
        expect(own.locator("h3")).to_have_text(head)
        equation = own.locator("math").first.text_content() or ""
        assert all(symbol in equation for symbol in symbols), equation
        expect(own).to_contain_text(says)
        expect(own.get_by_role("img")).to_be_visible()

    return check


def multiplies(mathematics: Locator) -> None:
    """The product is next to the division, with the numbers of the example."""
    own = mathematics.locator(".steps > li:nth-child(3)")
    expect(own).to_contain_text("samples make an effective batch of N, for example 64 = 16 \u00d7 4")
    assert re.search(r"N\s*=\s*n\u00d7K", own.locator("math").first.text_content() or "")


def is_equivalent(mathematics: Locator) -> None:
    """The statement has its measured error, which is rounding."""
    own = mathematics.locator(".steps > li:nth-child(4)")
    expect(own).to_contain_text("exactly the step of the full batch")
    assert float(own.locator("data[data-from=recorded]").first.get_attribute("value") or 1) < 1e-12


# Memory


def compares_memory(memory: Locator) -> None:
    """Bars show one pass and a split of the same samples; a smaller micro-batch is a shorter bar with a lower share."""
    bars = memory.locator("figure", has_text="The trade").locator("svg[role=img]:visible")
    expect(bars).to_have_attribute(
        "aria-label", re.compile(r"^64\s\u00d7\s1: one pass: 99\.9\sMiB; 16\s\u00d7\s4: 46\.3\sMiB, 46%$")
    )
    slider(memory, "Micro-batch").press("Home")
    expect(bars).to_have_attribute("aria-label", re.compile(r"; 1\s\u00d7\s64: 28\.9\sMiB, 29%$"))


def moves_the_effective_batch(memory: Locator) -> None:
    """At four times the effective batch one pass needs far more, and the micro-batch of 16 hardly more."""
    bars = memory.locator("figure", has_text="The trade").locator("svg[role=img]:visible")
    whole, micro = slider(memory, "Effective batch"), slider(memory, "Micro-batch")
    micro.press("Home")
    for _ in range(4):
        micro.press("ArrowRight")
    whole.press("End")
    expect(bars).to_have_attribute(
        "aria-label", re.compile(r"^256\s\u00d7\s1: one pass: 3\d\d\sMiB; 16\s\u00d7\s16: 46\.4\sMiB, 1\d%$")
    )
    whole.press("Home")
    expect(bars).to_have_attribute("aria-label", re.compile(r"^16\s\u00d7\s1: one pass: .*; 16\s\u00d7\s1: "))
    typed(memory, "Effective batch", 64)


def trades(memory: Locator) -> None:
    """Dragging along the curve to smaller micro-batches lowers memory and raises the measured time of a step."""
    curve = slider(memory, "Split, along the curve")
    says = memory.locator("figure", has_text="The trade").locator("figcaption p").first
    seen = []
    curve.press("Home")
    for _ in range(7):
        spoken = curve.get_attribute("aria-valuetext") or ""
        seen.append((number_in(spoken, r"([\d.]+) MiB"), number_in(spoken, r"([\d.,]+) ms")))
        curve.press("ArrowLeft")
    assert [memory for memory, _ in seen] == sorted((memory for memory, _ in seen), reverse=True)
    assert [time for _, time in seen[2:]] == sorted(time for _, time in seen[2:])
    assert seen[-1][1] > 1.3 * seen[0][1]
    curve.scroll_into_view_if_needed()
    curve.locator("circle").nth(2).hover()
    curve.page.mouse.down()
    expect(says).to_contain_text("16 \u00d7 4 needs 46% of the memory of one pass. A step takes")
    expect(says).to_contain_text("0.93 times as long")
    curve.locator("circle").nth(1).hover()
    expect(says).to_contain_text("32 \u00d7 2 needs")
    says.hover()
    curve.page.mouse.up()
    assert curve.evaluate("() => String(getSelection())") == ""


# The playground


def opens_at_16_times_4(playground: Locator) -> None:
    """It opens with 16 samples, 4 steps, 64 in a step, a predicted peak, 0 updates and the loss of chance."""
    expect(playground.get_by_role("spinbutton", name="Micro-batch, samples")).to_have_value("16")
    expect(playground.get_by_role("spinbutton", name="Accumulation steps")).to_have_value("4")
    expect(playground.locator(".batch strong")).to_have_text("64")
    for name, value in {"current loss": "2.30", "optimizer steps": "0", "peak memory": "1.4\u00a0MiB"}.items():
        expect(readout(playground, name)).to_have_text(value)


def readout(playground: Locator, name: str) -> Locator:
    """Return the value of a read-out."""
    return playground.locator("dl div").filter(has=playground.page.locator(f'dt:text-is("{name}")')).locator("dd").first


def runs_in_real_time(playground: Locator) -> None:
    """While it plays, the gradient fills visibly, steps are counted, and the curve grows from step to step."""
    steps = readout(playground, "optimizer steps")
    seen, milliseconds = playground.evaluate(FILLED)
    assert [number for number, _ in seen] == ["1", "2", "3", "4"]
    assert len({bars for _, bars in seen}) == 4
    assert milliseconds > 600  # three micro-batches of 0.3 s, and no flicker
    expect(steps).to_have_text(re.compile(r"^[1-9]"))
    early, curve = steps.inner_text(), playground.locator("svg path.curve.s0").last
    drawn = curve.get_attribute("d") or ""
    expect(steps).not_to_have_text(early)
    expect(curve).not_to_have_attribute("d", drawn)
    expect(steps).to_have_text("40", timeout=30_000)
    assert float(readout(playground, "current loss").inner_text()) < 1


def shows_the_effect_of_steps(playground: Locator) -> None:
    """More accumulation steps make a larger batch and another loss, with little more memory; pins keep both."""

    def state() -> tuple[str, str, str]:
        return (
            playground.locator(".batch strong").inner_text(),
            readout(playground, "peak memory").inner_text(),
            readout(playground, "current loss").inner_text(),
        )

    if readout(playground, "optimizer steps").inner_text() != "40":  # the check before this one has not run
        runs_in_real_time(playground)
    playground.get_by_role("button", name="Keep this curve").click()
    before = state()
    slider(playground, "Accumulation steps").press("End")
    expect(playground.locator(".batch strong")).not_to_have_text("64")
    after = state()
    assert int(after[0].replace(",", "")) > int(before[0])
    assert after[2] != before[2]
    small, large = (number_in(memory, r"([\d.]+) MiB") for _, memory, _ in (before, after))
    assert large == pytest.approx(small, rel=0.1)
    expect(playground.get_by_text("kept 1: digits 16 \u00d7 4").first).to_be_visible()
