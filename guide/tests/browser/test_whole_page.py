"""The complete page in a real browser, on every device and with every display preference.

Read-only tests share two hydrated pages, one on a desktop and one on a phone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from guide.tests.browser.chromium import (
    AXE,
    AXE_RUN,
    CLIPPED,
    DESKTOP,
    ORPHANS,
    PHONE,
    SMALL,
    Watched,
    absent,
    bring_to_life,
    opened,
    scroll_through,
    unfolded,
)


class Look(NamedTuple):
    """A way to view the page: its device, media features to emulate, the window's size, and axe's rules.

    None keeps the size of the device, or all rules.
    """

    device: str
    media: dict[str, Any]
    size: dict[str, Any] | None = None
    rules: Sequence[str] | None = None


COLOURS = ("color-contrast", "link-in-text-block")  # only colors depend on the scheme
LOOKS: dict[str, Look] = {
    "light": Look("desktop", {}),
    "dark": Look("desktop", {"color_scheme": "dark"}, rules=COLOURS),
    "forced colours": Look("desktop", {"forced_colors": "active"}, rules=COLOURS),
    "phone, dark, reduced motion": Look("phone", {}),
    "small": Look("phone", {"color_scheme": "light", "reduced_motion": "no-preference"}, SMALL["viewport"]),
}
WORDS = """main => {
    const copy = main.cloneNode(true);  // without the ticks of charts, which follow their size
    for (const drawing of copy.querySelectorAll('svg[aria-hidden]')) drawing.remove();
    return copy.textContent.replace(/\\s+/g, ' ');
}"""
CONTROLS = "button, input, select, textarea, summary, a[href], [role=slider]"
NAMES = f"""main => [...main.querySelectorAll('{CONTROLS}')].filter(element => {{
    const labels = [...(element.labels ?? [])].map(label => label.textContent).join(' ');
    return !(element.getAttribute('aria-label') ?? (labels || element.textContent)).trim();
}}).map(element => element.outerHTML)"""
PLANT = """() => {
    const place = Object.assign(document.createElement('div'), {id: 'planted'});
    const pale = Object.assign(document.createElement('p'), {textContent: 'planted and seen'});
    pale.style.cssText = 'color: #cccccc; background: #ffffff';
    place.append(document.createElement('img'), pale);
    document.querySelector('main').prepend(place);
    place.scrollIntoView({behavior: 'instant'});
}"""
REACHED = """() => {
    document.documentElement.style.scrollBehavior = 'auto';  // or the page would be drawn on its way to each
    window.reached = new Set();
    document.addEventListener('focusin', event => window.reached.add(event.target));
}"""
MISSED = f"""main => [...main.querySelectorAll('{CONTROLS}')].filter(element => {{
    const group = element.type === 'radio' && main.querySelectorAll(`[name="${{element.name}}"]`);
    const reached = group ? [...group].some(one => window.reached.has(one)) : window.reached.has(element);
    return element.checkVisibility() && !element.disabled && !element.closest('fieldset:disabled') && !reached;
}}).map(element => element.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def pages(browser: Browser, address: str) -> Iterator[dict[str, Watched]]:
    """The page on a desktop in the light scheme, and on a phone in the dark scheme, fully hydrated."""
    with (
        opened(browser, address, **DESKTOP, color_scheme="light") as desktop,
        opened(browser, address, **PHONE, color_scheme="dark", reduced_motion="reduce") as phone,
    ):
        for watched in (desktop, phone):
            scroll_through(watched.page)
            bring_to_life(watched.page)  # or a request would be in progress on close
        yield {"desktop": desktop, "phone": phone}


def finish_transitions(page: Page) -> None:
    """Finish color transitions."""
    page.evaluate("""async () => {
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        for (const one of document.getAnimations()) if (one instanceof CSSTransition) one.finish();
    }""")


@contextmanager
def looked_at(pages: dict[str, Watched], name: str) -> Iterator[Watched]:
    """View a page in some way, and restore it afterwards."""
    look = LOOKS[name]
    watched = pages[look.device]
    page, size = watched.page, watched.page.viewport_size
    as_opened: dict[str, Any] = dict.fromkeys(look.media, "null")
    assert size is not None
    page.set_viewport_size(look.size or size)  # type: ignore[arg-type]
    page.emulate_media(**look.media)
    finish_transitions(page)
    try:
        yield watched
    finally:
        page.emulate_media(**as_opened)
        page.set_viewport_size(size)


@pytest.mark.parametrize("look", LOOKS)
def test_no_errors_in_any_look(pages: dict[str, Watched], look: str, address: str) -> None:
    """In every look the page has no errors, policy violations, foreign requests or horizontal overflow."""
    with looked_at(pages, look) as watched:
        scroll_through(watched.page)
        width, room = watched.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")

        assert watched.faults == []
        assert {urlsplit(url).netloc for url in watched.requests if not url.startswith("data:")} == {
            urlsplit(address).netloc
        }
        assert width <= room


@pytest.fixture(scope="module")
def judged(pages: dict[str, Watched]) -> dict[str, Watched]:
    """Both pages, with axe loaded."""
    if not AXE.exists():
        absent(f"ACCESSIBILITY IS NOT TESTED: {AXE} is missing; `make browser` installs it if npm is available")
    for watched in pages.values():
        watched.page.evaluate(AXE.read_text(encoding="utf-8"))
    return pages


@pytest.mark.parametrize("look", LOOKS)
def test_it_is_accessible(judged: dict[str, Watched], look: str) -> None:
    """Axe finds no violations with every fold open."""
    with looked_at(judged, look) as watched, unfolded(watched.page):
        finish_transitions(watched.page)  # parts that were not drawn before begin theirs now
        assert watched.page.evaluate(AXE_RUN, [LOOKS[look].rules, None]) == []


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_axe_finds_planted_faults(judged: dict[str, Watched], device: str) -> None:
    """Axe finds a picture without words, and pale text."""
    page = judged[device].page
    page.evaluate(PLANT)
    try:
        found = page.evaluate(AXE_RUN, [None, "#planted"])
        assert {one.split(":")[0] for one in found} == {"image-alt", "color-contrast"}
    finally:
        page.evaluate("document.querySelector('#planted').remove()")


def test_every_number_has_its_source(pages: dict[str, Watched]) -> None:
    """Each digit in the text is inside an element with `data-from`; code and equations are exempt."""
    page = pages["desktop"].page
    with unfolded(page):
        main = page.locator("main")
        kinds = page.evaluate("[...new Set([...document.querySelectorAll('[data-from]')].map(e => e.dataset.from))]")

        assert main.evaluate(ORPHANS) == []
        assert set(kinds) <= {"recorded", "live", "calculated", "forecast", "chosen", "source", "exact"}
        main.evaluate("main => main.querySelector('p:not([aria-hidden])').append(' 42 times')")
        try:
            assert main.evaluate(ORPHANS) == ["42 times"]
        finally:
            main.evaluate("main => main.querySelector('p:not([aria-hidden])').lastChild.remove()")


def test_every_control_has_a_name_and_can_be_reached(pages: dict[str, Watched]) -> None:
    """The tab key reaches every control of the text, and each control has a name."""
    page = pages["desktop"].page
    main = page.locator("main")
    page.evaluate(REACHED)
    main.focus()
    count = main.locator(CONTROLS).count()
    for _ in range(count + 20):
        page.keyboard.press("Tab")

    assert main.evaluate(NAMES) == []
    assert main.evaluate(MISSED) == []


def test_text_is_complete_without_scripts(browser: Browser, address: str) -> None:
    """Without scripts the text, equations, code and drawings are already complete."""
    with opened(browser, address, **DESKTOP, java_script_enabled=False) as still:
        words = still.page.locator("main").evaluate(WORDS)
        drawings = still.page.locator("main figure svg").count()
        equations = still.page.locator("main math").count()
        expect(still.page.locator(".still")).to_be_visible()
    with opened(browser, address, **DESKTOP) as alive:
        main = alive.page.locator("main")
        alive.page.get_by_role("slider", name="Position in the scene").press("Home")  # as before scripts run

        assert drawings
        assert (main.locator("figure svg").count(), main.locator("math").count()) == (drawings, equations)
        assert main.evaluate(WORDS).split() == words.split()


@pytest.mark.parametrize("look", ["light", "small"])
def test_no_text_is_cut(pages: dict[str, Watched], look: str) -> None:
    """No text is cut off by its container, except in scrollable tables and code, and cut text is detected."""
    with looked_at(pages, look) as watched, unfolded(watched.page):
        page = watched.page

        assert page.evaluate(CLIPPED) == []
        caption = page.locator("main table caption:not(.unseen) span").first
        caption.evaluate("one => Object.assign(one.style, {maxWidth: 'none', whiteSpace: 'pre', paddingLeft: '80rem'})")
        assert page.evaluate(CLIPPED) == [caption.inner_text()]
        caption.evaluate("one => one.removeAttribute('style')")


def test_the_scene_plays_once_and_follows_the_reader(browser: Browser, address: str) -> None:
    """The scene plays when visible; split and limit change its outcome; the same moment is the same picture."""
    with opened(browser, address, **DESKTOP) as watched:
        page = watched.page
        top = page.locator("#top")
        position, words = top.get_by_role("slider", name="Position in the scene"), top.locator(".words .head")
        expect(top.get_by_role("link", name="Start")).to_be_in_viewport()
        expect(position).not_to_have_value("0")
        position.press("End")
        expect(words).to_have_text("Same gradient as the full batch.\n46% of its memory.")
        expect(top.locator(".phases .on")).to_have_text("done")
        position.press("Home")
        expect(words).to_have_text("Train on 64 digits at once")
        expect(top.locator(".phases .on")).to_have_text("ready")
        before = top.locator(".stage svg").first.inner_html()
        position.fill("5")
        assert top.locator(".stage svg").first.inner_html() != before
        position.fill("0")
        assert top.locator(".stage svg").first.inner_html() == before

        summary = top.locator("figcaption p").first
        top.get_by_role("radio", name="32 \u00d7 2").check(force=True)
        expect(summary).to_contain_text("more than the limit of 2.5 MiB")
        top.get_by_role("slider", name="memory limit").fill("3")
        position.press("End")
        expect(words).to_contain_text("Same gradient as the full batch.")
        expect(summary).to_contain_text("In 2 micro-batches the step needs 2.69 MiB")


def test_the_scene_without_motion_is_four_pictures(pages: dict[str, Watched]) -> None:
    """With reduced motion nothing moves: four moments tell the story, until the reader plays it."""
    top = pages["phone"].page.locator("#top")
    expect(top.locator(".frames > li")).to_have_count(4)
    expect(top.locator(".frames strong").first).to_have_text("Out of memory")


def test_sliders_of_an_exported_playground_work_first(browser: Browser, address: str) -> None:
    """Without an engine a slider works as the first control, pins survive a reload, and a link resets the setting."""
    with opened(browser, f"{address}#playground", **DESKTOP) as watched:
        page = watched.page
        part = page.locator("#playground")
        expect(part.locator(".which")).to_have_text("digits 16 \u00d7 4, SGD (ready, at step 0)")
        expect(part.locator("dl div", has_text="current loss").locator("dd").first).to_have_text("2.30")
        slider = part.get_by_role("slider", name="Micro-batch")
        expect(slider).to_have_attribute("max", "3")
        slider.press("End")
        expect(part.locator(".which")).to_have_text("digits 64 \u00d7 4, SGD (recorded)")
        part.get_by_role("spinbutton", name="Micro-batch").fill("8")
        part.get_by_role("spinbutton", name="Micro-batch").press("Enter")
        expect(part.get_by_text("8 is not available; the nearest value is 4.")).to_be_visible()
        expect(part.locator(".which")).to_have_text("digits 4 \u00d7 4, SGD (recorded)")
        slider.press("End")
        part.get_by_role("button", name="Keep this curve").click()
        page.reload()
        expect(part.get_by_text("kept 1: digits 64 \u00d7 4").first).to_be_visible()
        part.get_by_role("combobox", name="Data").select_option("spirals")
        expect(part.locator(".which")).to_contain_text("spirals")
        expect(part.get_by_text("kept 1")).to_have_count(0)
        part.get_by_role("combobox", name="Data").select_option("digits")
        part.get_by_role("button", name="Remove").click()
        expect(part.get_by_text("kept 1")).to_have_count(0)
        part.get_by_role("combobox", name="Mistake").select_option("no_division")
        expect(part.locator(".which")).to_contain_text("forget to divide")
        page.locator("#top").get_by_role("link", name="Open in the playground").click()
        expect(part.locator(".which")).to_have_text("digits 16 \u00d7 4, SGD (recorded)")
