"""The complete page in a real browser, on every device and with every display preference.

Read-only tests share two hydrated pages, one on a desktop and one on a phone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from guide.tests.browser.chromium import (
    AXE,
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


@dataclass(frozen=True)
class Look:
    """A way to view the page.

    Attributes:
        device: the page to view.
        media: media features to emulate; others stay as the page was opened.
        size: of the window, if different.
        rules: axe rules whose result can differ from earlier looks; None for all.
        planted: extra faults that axe must find: rule -> (element, style).
    """

    device: str
    media: dict[str, Any] = field(default_factory=dict)
    size: dict[str, Any] | None = None
    rules: Sequence[str] | None = None
    planted: dict[str, tuple[str, str]] = field(default_factory=dict)


COLOURS = ("color-contrast", "link-in-text-block")
LIGHT = {"color_scheme": "light", "reduced_motion": "no-preference"}
PALE = ("p", "color: #cccccc; background: #ffffff")
GREY = ("p", "color: #333333; background: #121316")
FORCED = ("p", "forced-color-adjust: none; color: #cccccc; background: #ffffff")
CUT_OFF = ("div", "overflow: auto; width: 2rem; height: 1rem; white-space: nowrap")
PICTURE = ("img", "width: 1rem")
LOOKS: dict[str, Look] = {
    "light": Look("desktop", planted={"image-alt": PICTURE, "color-contrast": PALE}),
    # Only colors depend on the scheme; the dark phone covers everything else.
    "dark": Look("desktop", {"color_scheme": "dark"}, rules=COLOURS, planted={"color-contrast": GREY}),
    "forced colours": Look("desktop", {"forced_colors": "active"}, rules=COLOURS, planted={"color-contrast": FORCED}),
    # Phones show other drawings and sizes.
    "phone, dark, reduced motion": Look("phone", planted={"image-alt": PICTURE, "color-contrast": GREY}),
    "phone": Look("phone", LIGHT, rules=()),  # covered by the next
    # The same elements as on a phone (`test_a_small_phone_shows_what_a_phone_does`), in the other scheme and smaller.
    "small": Look(
        "phone",
        LIGHT,
        size=SMALL["viewport"],
        rules=(*COLOURS, "scrollable-region-focusable", "target-size"),
        planted={"scrollable-region-focusable": CUT_OFF, "color-contrast": PALE},
    ),
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
AXE_RUN = """async ([rules, within]) => {
    const which = rules ? {runOnly: {type: 'rule', values: rules}} : {};
    return (await axe.run(within ?? document, {resultTypes: ['violations'], ...which})).violations
        .map(found => found.id + ': ' + found.nodes.slice(0, 3).map(node => node.target.join(' ')).join(' | '))
}"""
PLANT = """planted => {
    const place = Object.assign(document.createElement('div'), {id: 'planted'});
    for (const [kind, style] of planted) {
        place.append(Object.assign(document.createElement(kind), {textContent: 'planted and seen'}));
        place.lastChild.style.cssText = style;
    }
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
def desktop(browser: Browser, address: str) -> Iterator[Watched]:
    """The page on a desktop in the light scheme, fully hydrated."""
    with opened(browser, address, **DESKTOP, color_scheme="light") as watched:
        scroll_through(watched.page)
        bring_to_life(watched.page)  # or a request would be in progress on close
        yield watched


@pytest.fixture(scope="module")
def phone(browser: Browser, address: str) -> Iterator[Watched]:
    """The page on a phone in the dark scheme with reduced motion, fully hydrated."""
    with opened(browser, address, **PHONE, color_scheme="dark", reduced_motion="reduce") as watched:
        scroll_through(watched.page)
        bring_to_life(watched.page)
        yield watched


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
    # Finish color transitions.
    page.evaluate("""async () => {
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        for (const one of document.getAnimations()) if (one instanceof CSSTransition) one.finish();
    }""")
    try:
        yield watched
    finally:
        page.emulate_media(**as_opened)
        page.set_viewport_size(size)


@pytest.fixture(scope="module")
def pages(desktop: Watched, phone: Watched) -> dict[str, Watched]:
    """Both pages, by name."""
    return {"desktop": desktop, "phone": phone}


@pytest.fixture(scope="module")
def judged(pages: dict[str, Watched]) -> dict[str, Watched]:
    """Both pages, with axe loaded."""
    if not AXE.exists():
        absent(f"ACCESSIBILITY IS NOT TESTED: {AXE} is missing; `make browser` installs it if npm is available")
    for watched in pages.values():
        watched.page.evaluate(AXE.read_text(encoding="utf-8"))
    return pages


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_goes_wrong(pages: dict[str, Watched], look: str, address: str) -> None:
    """In every look the page has no errors, policy violations, foreign requests or horizontal overflow."""
    with looked_at(pages, look) as watched:
        scroll_through(watched.page)
        width, room = watched.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")

        assert watched.faults == []
        assert {urlsplit(url).netloc for url in watched.requests if not url.startswith("data:")} == {
            urlsplit(address).netloc
        }
        assert width <= room


def axe(page: Page, rules: Sequence[str] | None, within: str | None = None) -> list[str]:
    """Return axe's violations."""
    return list(page.evaluate(AXE_RUN, [rules, within]))


@pytest.mark.parametrize("look", [name for name, look in LOOKS.items() if look.rules != ()])
def test_it_is_accessible(judged: dict[str, Watched], look: str) -> None:
    """Axe finds no violations with every fold open, and does find planted ones."""
    with looked_at(judged, look) as watched, unfolded(watched.page):
        page, rules = watched.page, LOOKS[look].rules
        assert axe(page, rules) == []

        page.evaluate(PLANT, list(LOOKS[look].planted.values()))
        try:
            found = axe(page, rules, "#planted")
            assert {one.split(":")[0] for one in found} == set(LOOKS[look].planted)
        finally:
            page.evaluate("document.querySelector('#planted').remove()")


def test_every_number_says_where_it_is_from(desktop: Watched) -> None:
    """Each digit in the text is inside an element with `data-from`; code and equations are exempt."""
    page = desktop.page
    with unfolded(page):
        main = page.locator("main")
        kinds = page.evaluate("[...new Set([...document.querySelectorAll('[data-from]')].map(e => e.dataset.from))]")

        assert main.evaluate(ORPHANS) == []
        assert set(kinds) <= {"recorded", "live", "calculated", "chosen", "source", "exact"}
        main.evaluate("main => main.querySelector('p:not([aria-hidden])').append(' 42 times')")
        try:
            assert main.evaluate(ORPHANS) == ["42 times"]
        finally:
            main.evaluate("main => main.querySelector('p:not([aria-hidden])').lastChild.remove()")


def test_every_control_has_a_name_and_can_be_reached(desktop: Watched) -> None:
    """The tab key reaches every control of the text, and each control has a name."""
    page = desktop.page
    main = page.locator("main")
    page.evaluate(REACHED)
    main.focus()
    count = main.locator(CONTROLS).count()
    for _ in range(count + 20):
        page.keyboard.press("Tab")

    assert main.evaluate(NAMES) == []
    assert main.evaluate(MISSED) == []


def test_scripts_add_no_words(browser: Browser, address: str) -> None:
    """Without scripts the text, equations, code and drawings are already complete."""
    with opened(browser, address, **DESKTOP, java_script_enabled=False) as still:
        words = still.page.locator("main").evaluate(WORDS)
        drawings = still.page.locator("main figure svg").count()
        equations = still.page.locator("main math").count()
        expect(still.page.locator(".still")).to_be_visible()
    with opened(browser, address, **DESKTOP) as alive:
        main = alive.page.locator("main")

        assert drawings
        assert (main.locator("figure svg").count(), main.locator("math").count()) == (drawings, equations)
        assert main.evaluate(WORDS).split() == words.split()


@pytest.mark.parametrize("look", ["light", "phone", "small"])
def test_no_text_is_cut(pages: dict[str, Watched], look: str) -> None:
    """No text is cut off by its container, except in scrollable tables and code, and cut text is detected."""
    with looked_at(pages, look) as watched, unfolded(watched.page):
        page = watched.page

        assert page.evaluate(CLIPPED) == []
        caption = page.locator("main table caption:not(.unseen) span").first
        caption.evaluate("one => Object.assign(one.style, {maxWidth: 'none', whiteSpace: 'pre', paddingLeft: '80rem'})")
        assert page.evaluate(CLIPPED) == [caption.inner_text()]
        caption.evaluate("one => one.removeAttribute('style')")


def test_the_first_screen_is_the_machine(browser: Browser, address: str) -> None:
    """On the first screen a slider splits the batch and lowers the memory with equal loss, and a switch breaks it."""
    with opened(browser, address, **DESKTOP) as watched:
        page = watched.page
        top = page.locator("#top")
        summary = top.locator("figcaption p").first
        expect(top.get_by_role("link", name="Start")).to_be_in_viewport()
        expect(summary).to_contain_text("1.37 MiB")
        top.get_by_role("slider", name="Micro-batch").press("End")
        expect(summary).to_contain_text("64 parts of a single sample")
        expect(summary).to_contain_text("The loss of every step matches")
        top.get_by_role("switch", name="Forget to divide").check()
        expect(summary).to_contain_text("Without dividing by 64")
        top.get_by_role("spinbutton").fill("3")
        top.get_by_role("spinbutton").press("Enter")
        expect(top.get_by_role("status")).to_have_text("3 is not available; the nearest value is 4.")


def test_sliders_of_an_exported_playground_move_at_once(browser: Browser, address: str) -> None:
    """Without an engine a slider works as the first control, and pins survive a reload and can be removed."""
    with opened(browser, f"{address}#playground", **DESKTOP) as watched:
        page = watched.page
        part = page.locator("#playground")
        expect(part.locator(".which")).to_have_text("digits 16 \u00d7 4, SGD (ready, at step 0)")
        expect(part.locator("dl dd").first).to_have_text("2.30")
        slider = part.get_by_role("slider", name="Micro-batch")
        expect(slider).to_have_attribute("max", "3")
        slider.press("End")
        expect(part.locator(".which")).to_have_text("digits 64 \u00d7 4, SGD (recorded)")
        part.get_by_role("button", name="Pin this run").click()
        page.reload()
        expect(part.get_by_text("pin 1: digits 64 \u00d7 4").first).to_be_visible()
        part.get_by_role("button", name="Unpin").click()
        expect(part.get_by_text("pin 1")).to_have_count(0)
