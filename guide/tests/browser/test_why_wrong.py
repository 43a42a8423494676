"""From a symptom to its cause by mouse or keyboard, and a pasted loop that stays in the page."""

from pathlib import Path

from playwright.sync_api import Browser, Locator, expect

from guide.tests.browser.chromium import DESKTOP, opened


def awake(page_part: Locator) -> Locator:
    """Return the chapter after its script has started."""
    page_part.scroll_into_view_if_needed()
    expect(page_part.get_by_role("textbox", name="Your training loop")).to_be_enabled()
    return page_part


def test_three_answers_lead_to_the_card_of_the_cause(browser: Browser, address: str) -> None:
    """A symptom asks its question; each answer asks another or shows the card, and an earlier answer can be changed."""
    with opened(browser, address, **DESKTOP) as watched:
        part = awake(watched.page.locator("#why-wrong"))
        card = part.get_by_role("article")
        expect(card.get_by_role("heading")).to_have_text("Nothing divides the sum of the micro-batch losses")

        part.get_by_role("radio", name="Only on several ranks").check()
        expect(card).to_have_count(0)
        expect(part.get_by_role("button", name="runs inside no_sync()")).to_be_visible()  # still possible
        part.get_by_role("radio", name="Yes").focus()
        watched.page.keyboard.press("Space")
        part.get_by_role("radio", name="None, but the run is slow").check()

        expect(card.get_by_role("heading")).to_have_text("The forward runs outside no_sync()")
        expect(card).to_contain_text(
            "Bytes sent: 2.0 times as many with 2 micro-batches per rank, 4.0 times as many with 4"
        )
        expect(card.locator(".wrong .marked")).to_contain_text("criterion(model(inputs), targets)")
        expect(card).to_contain_text("anybatch check --loop anybatch_guide.exercises.no_sync_backward:train")

        part.get_by_role("radio", name="NaN or diverging").check()
        part.get_by_role("radio", name="NaN from one step to the next").check()
        expect(card).to_contain_text("not a number instead of 4.40")
        assert watched.faults == []


def test_a_pasted_loop_is_read_but_not_sent(browser: Browser, address: str, tmp_path: Path) -> None:
    """The page names what the check lacks, then builds its command and offers the file; no request is made."""
    with opened(browser, address, **DESKTOP) as watched:
        part = awake(watched.page.locator("#why-wrong"))
        watched.page.wait_for_load_state("networkidle")
        before = len(watched.requests)
        text = part.get_by_role("textbox", name="Your training loop")

        text.fill("for inputs, targets in loader:\n    criterion(model(inputs), targets).backward()\n")
        expect(part).to_contain_text("a function at the left margin")
        expect(part).to_contain_text("a call of optimizer.step()")
        expect(part.get_by_role("button", name="Copy the command")).to_be_disabled()

        loop = "def fit(net, train_loader, opt):\n    net(0).backward()\n    opt.step()\n"
        text.fill(loop)
        part.get_by_role("textbox", name="File").fill("src/fit.py")
        expect(part.get_by_text("anybatch check --loop src/fit.py:fit")).to_be_visible()
        with watched.page.expect_download() as download:
            part.get_by_role("button", name="Download the file").click()
        download.value.save_as(tmp_path / "fit.py")

        assert download.value.suggested_filename == "fit.py"
        assert (tmp_path / "fit.py").read_text(encoding="utf-8") == loop
        others = ("blob:", f"{address}rec/", f"{address}parts/")  # the download, and chapters that come near
        assert [url for url in watched.requests[before:] if not url.startswith(others)] == []
        assert watched.faults == []
