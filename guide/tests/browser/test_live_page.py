"""The page of `anybatch guide` in use: it shows the state of the engine."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from anybatch_guide.playground import PlaygroundSetting, run
from guide.tests.browser.chromium import DESKTOP, ORPHANS, Watched, come_to, opened
from guide.tests.browser.element_checks import runs_in_real_time
from guide.tests.served import Served
from tests.extras import skip_without

SERVE = (sys.executable, "-m", "anybatch", "guide", "--no-browser")
PATIENCE = 180_000.0  # milliseconds
BRIGHT = """canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data
    .filter((level, at) => at % 4 === 0 && level > 100).length"""
"""Number of bright pixels in a picture."""
PAUSED = """async part => {
    const press = name => [...part.querySelectorAll('button')].find(one => one.textContent === name).click();
    await new Promise(done => {
        const watch = new MutationObserver(() => {
            if (!part.querySelector('.seen .who').textContent.startsWith('micro-batch 2 of 4')) return;
            watch.disconnect();
            done();
        });
        watch.observe(part.querySelector('.seen'), {subtree: true, childList: true, characterData: true});
        press('Train');
    });
    press('Pause');
}"""
"""Trains, and pauses at the second micro-batch."""

skip_without("sklearn", "anybatch[guide]")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the guide as a user does."""
    with Served(tmp_path_factory.mktemp("served"), command=SERVE) as server:
        yield server


@pytest.fixture
def guide(browser: Browser, server: Served) -> Iterator[Watched]:
    """Open the printed address; afterwards, check for errors and foreign requests."""
    with visited(browser, server) as watched:
        yield watched

        assert watched.faults == []
        assert {urlsplit(url).netloc for url in watched.requests if not url.startswith("data:")} == {server.host}
        assert watched.page.locator("main").evaluate(ORPHANS) == []


@contextmanager
def visited(browser: Browser, server: Served) -> Iterator[Watched]:
    """Open the printed address, with a long timeout for the start of the engine."""
    with opened(browser, server.address, **DESKTOP) as watched:
        watched.page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield watched


def button(part: Locator, name: str) -> Locator:
    """Return a button by its full name."""
    return part.get_by_role("button", name=name, exact=True)


def playground(page: Page, setting: PlaygroundSetting) -> Locator:
    """Apply a setting like a link, and wait until it can be trained."""
    words = f"v=1&micro={setting.micro_batch_size}&accumulation={setting.accumulation_steps}&steps={setting.steps}"
    words += f"&seed={setting.seed}&task={setting.task}&norm={setting.norm}&policy={setting.norm_policy}"
    words += f"&ranks={setting.ranks}&limit={setting.memory_limit_kib}"
    # Until the page handles the change, Train would use the previous setting.
    page.evaluate(
        """words => new Promise(done => {
            const hash = '#playground?' + words
            if (location.hash === hash) return done()
            addEventListener('hashchange', () => setTimeout(done), { once: true })
            location.hash = hash
        })""",
        words,
    )
    part = page.locator("#playground")
    expect(button(part, "Train")).to_be_enabled()
    return part


def steps(part: Locator) -> Locator:
    """Return the displayed number of optimizer steps."""
    return part.locator("dl div", has_text="optimizer steps").locator("data")


def test_a_run_equals_the_library(guide: Watched) -> None:
    """Train runs the chosen setting in the engine, with the same losses as in Python."""
    setting = PlaygroundSetting(micro_batch_size=8, accumulation_steps=2, steps=12, seed=5)
    part = playground(guide.page, setting)
    button(part, "Train").click()
    expect(steps(part)).to_have_text("12")
    expect(button(part, "Train")).to_be_enabled()
    expect(part.locator("figure .mark").first).to_contain_text("live")
    part.locator("figure .mark").first.click()
    shown = [float(text) for text in part.locator("figure tbody td:nth-of-type(1)").all_inner_texts()]

    assert shown == pytest.approx(run(setting, lambda _: None)["losses"], rel=5.1e-4)  # four digits are shown
    expect(part.locator(".judged.same")).to_contain_text("the same, up to rounding")


def test_the_stage_keeps_its_place(guide: Watched) -> None:
    """The first step, the note of a preset and an out-of-memory retry move nothing, and no run bar covers the run."""
    part = playground(guide.page, PlaygroundSetting(steps=60, seed=7))
    bar = guide.page.get_by_role("complementary", name="Run in progress")

    def top() -> float:
        return float(part.locator(".stage").evaluate("stage => stage.getBoundingClientRect().top + scrollY"))

    part.locator(".stage").scroll_into_view_if_needed()
    before = top()
    button(part, "Train").click()
    expect(steps(part)).to_have_text(re.compile(r"[1-9]"))
    expect(bar).to_have_count(0)
    assert top() == before
    guide.page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    button(part, "Pause").evaluate("pause => pause.click()")
    expect(bar).to_be_visible()
    button(part, "Stop").evaluate("stop => stop.click()")
    button(part, "Out of memory, repeated").click()
    expect(part.locator(".readouts")).to_contain_text("Each sample counts once.")
    assert top() == before
    expect(button(part, "Train")).to_be_enabled()


def test_pause_one_micro_batch_and_stop(guide: Watched) -> None:
    """A run can start with one micro-batch, step by single micro-batches, resume, and stop."""
    part = playground(guide.page, PlaygroundSetting(micro_batch_size=4, accumulation_steps=3, steps=400, seed=6))
    where, one = part.locator(".where"), button(part, "Run one micro-batch")
    for step, position in ((1, 1), (1, 2), (1, 3), (2, 1)):
        one.click()
        expect(where).to_have_text(f"step {step}, micro-batch {position} of 3, paused")
        expect(part.locator(".seen .who")).to_have_text(f"micro-batch {position} of 3: 4 samples")
        expect(part.locator(".seen .head")).to_have_text(f"Gradient step {step}")
        expect(part.locator(".seen path.gradient")).to_have_count(2)
        assert part.locator(".seen canvas").evaluate(BRIGHT) > 50
    button(part, "Resume").click()
    expect(steps(part)).to_have_text(re.compile(r"[1-9]\d+"))
    button(part, "Pause").click()
    expect(where).to_contain_text("paused")
    button(part, "Stop").click()
    expect(button(part, "Train")).to_be_enabled()
    assert int(steps(part).inner_text()) < 400


def test_gradients_fill_in_every_run(guide: Watched) -> None:
    """Without stepping, the strip shows the sums of micro-batches in the outline of the native batch, and changes."""
    part = playground(guide.page, PlaygroundSetting(micro_batch_size=4, accumulation_steps=4, steps=60, seed=8))
    button(part, "Train").click()
    strip = part.locator(".seen path.gradient")
    expect(part.locator(".seen .who")).to_contain_text("of 4: 4 samples")
    expect(part.locator(".seen path.goal")).to_have_attribute("d", re.compile("M"))
    first = strip.get_attribute("d")
    expect(strip).not_to_have_attribute("d", first or "")
    expect(steps(part)).to_have_text("60")
    # The last sum fills the outline: both paths have nearly the same bars.
    tops = "path => path.getAttribute('d').match(/v-?[\\d.]+/g).map(bar => Number(bar.slice(1)))"
    filled, outline = (part.locator(f".seen path.{name}").evaluate(tops) for name in ("gradient", "goal"))
    assert filled == pytest.approx(outline, abs=0.21)


def test_the_first_steps_are_held(guide: Watched) -> None:
    """The page shows each micro-batch of the first steps for a while, as a replay does."""
    runs_in_real_time(playground(guide.page, PlaygroundSetting()))


def test_pause_and_stop_in_the_first_steps(guide: Watched) -> None:
    """Pause holds the display at its micro-batch, and single micro-batches follow it; Stop shows all computed steps."""
    part = playground(guide.page, PlaygroundSetting(steps=400, seed=9))
    where, who = part.locator(".where"), part.locator(".seen .who")
    part.evaluate(PAUSED)
    expect(where).to_have_text("step 1, micro-batch 2 of 4, paused")
    expect(steps(part)).to_have_text("0")
    button(part, "Run one micro-batch").click()
    expect(who).to_have_text("micro-batch 3 of 4: 16 samples")
    button(part, "Resume").click()
    expect(steps(part)).to_have_text(re.compile(r"[1-9]"))
    button(part, "Stop").click()
    expect(button(part, "Train")).to_be_enabled()
    expect(part.locator(".which")).to_contain_text("(stopped)")
    assert 0 < int(steps(part).inner_text()) < 400


def test_a_preset_trains_in_one_click(guide: Watched) -> None:
    """A preset sets the controls and trains; its text says what to look at; Train is in the first window."""
    part = playground(guide.page, PlaygroundSetting())
    guide.page.evaluate("document.getElementById('playground').scrollIntoView({behavior: 'instant'})")
    expect(button(part, "Train")).to_be_in_viewport(ratio=1)
    button(part, "Forgot to divide").click()
    expect(part.get_by_label("Mistake", exact=True)).to_have_value("no_division")
    expect(part.locator(".next")).to_contain_text("the loss leaves the chart")
    expect(steps(part)).to_have_text("40")
    expect(button(part, "Train")).to_be_enabled()
    expect(part.locator(".judged.other")).to_contain_text("not divided")
    highest = max(run(PlaygroundSetting(mistake="no_division"), lambda _: None)["losses"])
    expect(part.locator("text.beyond").first).to_have_text(f"{highest:.3g}")


def test_a_foreign_run_sets_the_controls(browser: Browser, server: Served, guide: Watched) -> None:
    """A run that another tab has started is shown with its setting, also in a page that opens while it runs."""
    setting = PlaygroundSetting(task="spirals", micro_batch_size=8, accumulation_steps=2, steps=400, seed=3)
    part = playground(guide.page, setting)
    button(part, "Train").click()
    expect(steps(part)).to_have_text(re.compile(r"[1-9]"))
    with visited(browser, server) as other:
        place = come_to(other.page, "playground")
        expect(place.get_by_label("Data", exact=True)).to_have_value("spirals")
        expect(place.get_by_role("slider", name="Micro-batch")).to_have_attribute("aria-valuetext", "8 samples")
        expect(place.locator("dl div", has_text="peak memory").locator(".note")).to_have_text("measured")
        expect(place.locator("dl div", has_text="update error, step 1").locator("data")).to_be_visible()
        assert other.faults == []
    button(part, "Stop").click()
    expect(button(part, "Train")).to_be_enabled()


def test_two_ranks_run_live(guide: Watched) -> None:
    """On two ranks the page shows the losses of an equivalent run on one rank, and the bytes each rank sends."""
    setting = PlaygroundSetting(micro_batch_size=4, accumulation_steps=2, steps=4, seed=11, ranks=2)
    part = playground(guide.page, setting)
    button(part, "Run one micro-batch").click()
    expect(part.locator(".seen .who").first).to_contain_text("micro-batch 1 of 2: 4 samples")
    expect(part.locator(".where")).to_contain_text("on each rank, paused")
    button(part, "Resume").click()
    expect(steps(part)).to_have_text("4")
    expect(button(part, "Train")).to_be_enabled()
    expect(part.locator(".batch")).to_contain_text("4 \u00d7 2 \u00d7 2 = 16")
    expect(part.locator(".which")).to_have_text("digits 4 \u00d7 2 \u00d7 2 ranks, SGD (run here)")
    expect(part.get_by_text("Each rank sends 259 KiB of gradients per step")).to_be_visible()
    expect(part.locator(".judged.same")).to_contain_text("the same, up to rounding")
    one = replace(setting, ranks=1, accumulation_steps=4)  # the same samples per step
    assert part.locator("dl data").first.inner_text() == f"{run(one, lambda _: None)['losses'][-1]:.3g}"


@pytest.mark.parametrize(
    ("kib", "told", "judged"),
    [
        (2048, "repeated in micro-batches of 32, then 16. Each sample counts once.", "the same, up to rounding"),
        (512, "To reduce memory: precision='bf16'; activation checkpointing;", "nothing to compare yet"),
    ],
)
def test_memory_runs_out(guide: Watched, kib: int, told: str, judged: str) -> None:
    """With a low limit, the engine retries in smaller parts, or fails, and the page shows it."""
    setting = PlaygroundSetting(micro_batch_size=64, accumulation_steps=2, steps=3, seed=12, memory_limit_kib=kib)
    part = playground(guide.page, setting)
    expect(part.locator(".next").first).to_contain_text("will run out of memory, and is repeated")
    button(part, "Train").click()
    expect(part.locator(".readouts")).to_contain_text(told)
    expect(button(part, "Train")).to_be_enabled()
    expect(part.locator(".judged")).to_contain_text(judged)


def test_a_figure_runs_live(guide: Watched) -> None:
    """The figure shows live data, marked as such, and can return to the recording."""
    figure = come_to(guide.page, "split").locator("figure", has_text="sum in p.grad")
    chip = figure.locator(".mark").first
    expect(chip).to_contain_text("recorded")
    chip.click()
    expect(figure.get_by_text("stops after 120 s at the latest")).to_be_visible()
    expect(figure.get_by_role("button", name="Run it here")).to_be_enabled()
    figure.get_by_role("button", name="Run it here").click()
    expect(chip).to_contain_text("live")
    expect(figure).to_have_attribute("data-from", "live")
    figure.get_by_role("button", name="Back to the recording").click()
    expect(chip).to_contain_text("recorded")


def test_a_lost_server_is_reported(browser: Browser, tmp_path: Path) -> None:
    """When the server stops, the page reports it, and keeps its data."""
    with Served(tmp_path, command=SERVE) as server, visited(browser, server) as watched:
        part = playground(watched.page, PlaygroundSetting())
        server.process.send_signal(signal.SIGINT)
        note = watched.page.get_by_role("status", name="The server")
        expect(note).to_contain_text("The server has stopped")

        expect(button(part, "Train")).to_be_disabled()
        expect(part.locator(".which")).to_have_text("digits 16 \u00d7 4, SGD (ready, at step 0)")
