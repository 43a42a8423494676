"""The guide without a server: whole, under a policy of its own, asking nobody for anything."""

import base64
import hashlib
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser

from anybatch.errors import UserError
from anybatch_guide.built import MAX_BYTES, Asset, read_page, recordings, with_transport
from anybatch_guide.export import export_file, export_folder, single_file
from guide.tests.browser.chromium import Watched, opened
from guide.tests.served import PAGE, Served
from tests.faults import sees

NO_FONT = ("OTS parsing error", "Failed to decode downloaded font")  # what the small page has for a font is none
SAID = "#said:not(:empty)"


def complaints(watched: Watched) -> list[str]:
    """Return what a browser complained about, but for the small page's font."""
    return [text for text in watched.faults if not text.startswith(NO_FONT)]


def test_single_file_holds_everything(tmp_path: Path) -> None:
    """One file refers to nothing but itself, says that it is static, and keeps each recording once."""
    html = export_file(PAGE, tmp_path / "guide.html").read_text(encoding="utf-8")

    assert '<meta name="anybatch-guide" content="static">' in html
    references = re.findall(r"""(?:src|href)\s*=\s*"([^"]*)"|url\("?([^")]*)""", html)
    assert all("".join(reference).startswith("data:") for reference in references)
    assert html.count('id="rec-small"') == html.count('id="rec-later"') == 1
    assert "data:font/woff2;base64,d09GMg==" in html


@sees(
    "parts_left_out_of_the_file",
    "guide/src/anybatch_guide/export.py",
    '*(path for path in sorted(page) if path.startswith("parts/")), ',
    "",
)
def test_policy_of_a_single_file() -> None:
    """Exactly the scripts and styles that stand in the file may run, by their digests, and nothing may be asked for."""
    html = single_file(read_page(PAGE))
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    part, script = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)

    assert len(policy) == 1
    for kind, texts in (("script", (part, script)), ("style", (style,))):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"{kind}-src {allowed};" in policy[0]
    assert "default-src 'none'" in policy[0]
    assert "connect-src 'none'" in policy[0]
    assert "unsafe" not in policy[0]
    assert html.index("Content-Security-Policy") < html.index("<script")


def test_hostile_recording_stays_data() -> None:
    """A recording that holds the end of a script stands in the file as data, and is read as it was."""
    html = single_file(read_page(PAGE))

    assert "onerror=alert(1)></script>" not in html
    assert r"\u003cimg src=x onerror=alert(1)>\u003c/script>" in html


def test_single_file_from_a_disk(tmp_path: Path, browser: Browser) -> None:
    """Opened from a disk, the one file runs its script, finds its recordings, and asks for nothing; loopback least."""
    file = export_file(PAGE, tmp_path / "guide.html")
    with opened(browser, file.as_uri(), SAID) as watched:
        page = watched.page

        page.locator(f"body[data-far='{len('</script>')}']").wait_for()
        assert page.inner_text("#said") == f"static rec-later rec-small {len('</script><!--<script>')}"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(1, 2, 3)"
        assert [url for url in watched.requests if not url.startswith("data:")] == [file.as_uri()]
        assert complaints(watched) == []


def test_single_file_cannot_ask(tmp_path: Path, browser: Browser) -> None:
    """Even a script of the page could not reach a server: the policy forbids it, and the watch above would see it."""
    shutil.copytree(PAGE, tmp_path / "page")
    script = tmp_path / "page" / "app.js"
    script.write_text('fetch("http://127.0.0.1:1/").catch(() => { document.body.dataset.refused = ""; });')
    file = export_file(tmp_path / "page", tmp_path / "guide.html")
    with opened(browser, file.as_uri(), "body[data-refused]") as watched:
        assert any("Content Security Policy" in text for text in complaints(watched))


def test_served_page_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    """A browser that opens the printed address gets the page and its stream, all from the server, without complaint."""
    with Served(tmp_path) as server, opened(browser, server.address, "#said[data-status]") as watched:
        assert watched.page.url == f"http://{server.host}/"
        assert watched.page.inner_text("#said").startswith("live rec-small")
        assert {urlsplit(url).netloc for url in watched.requests} == {server.host}
        assert complaints(watched) == []


def test_folder(tmp_path: Path) -> None:
    """The exported folder is the page, with its recordings, with another word and a policy in it."""
    folder = export_folder(PAGE, tmp_path / "a" / "guide")
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    assert paths == {
        "index.html",
        "app.js",
        "app.css",
        "icon.svg",
        "math.woff2",
        "parts/far.js",
        "rec/small.json",
        "rec/later.json",
    }
    html = (folder / "index.html").read_text()
    assert 'content="static"' in html
    assert "script-src 'self'; style-src 'self'" in html
    assert (folder / "app.js").read_bytes() == (PAGE / "app.js").read_bytes()


def test_folder_that_is_not_empty(tmp_path: Path) -> None:
    """Nothing that is there already is touched."""
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(UserError, match="no empty folder"):
        export_folder(PAGE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name="anybatch-guide"', 'name="other"', "0 times"),
        ("<title>", '<meta name="anybatch-guide" content="live"><title>', "2 times"),
        ('src="app.js"', 'src="other.js"', "other.js"),
        ('<meta charset="utf-8">', "", "charset"),
    ],
)
def test_page_that_cannot_be_exported(old: str, new: str, said: str) -> None:
    """A page without its word, or that refers to what is not there, is refused, and nothing is written."""
    page = read_page(PAGE)
    html = page["index.html"].content.decode()
    assert old in html
    broken = {**page, "index.html": Asset(html.replace(old, new).encode(), "text/html")}

    with pytest.raises(UserError, match=said):
        single_file(broken)


def test_no_page(tmp_path: Path) -> None:
    """Where there is no page, it is said how to get one."""
    with pytest.raises(UserError, match="holds no built page"):
        read_page(tmp_path)


def test_only_the_page_is_the_page(tmp_path: Path) -> None:
    """Links, other kinds of files and names that no build gives are no part of a page, wherever they lie."""
    shutil.copytree(PAGE, tmp_path / "page")
    page = tmp_path / "page"
    (tmp_path / "secret.js").write_text("secret")
    (page / "linked.js").symlink_to(tmp_path / "secret.js")
    (page / "rec" / "..%2f.json").write_text("{}")
    (page / "rec" / "<img onerror=alert(1)>.json").write_text("{}")
    (page / "rec" / "Small.json").write_text("{}")
    (page / "BUILD.json").write_text("{}")
    (page / "notes.txt").write_text("notes")
    (page / ".hidden.js").write_text("hidden")

    assert read_page(page).keys() == read_page(PAGE).keys()
    assert recordings(read_page(page)).keys() == {"small", "later"}


def test_page_that_is_too_large(tmp_path: Path) -> None:
    """A folder that holds more than any page is not read into memory."""
    shutil.copytree(PAGE, tmp_path / "page")
    with (tmp_path / "page" / "large.js").open("wb") as file:
        file.truncate(MAX_BYTES)

    with pytest.raises(UserError, match="no page of the guide"):
        read_page(tmp_path / "page")


def test_word_of_the_page() -> None:
    """The word is changed from either to either, in whatever way the element ends."""
    for html in ('<meta name="anybatch-guide" content="live">', '<meta name="anybatch-guide" content="static" />'):
        assert 'content="static"' in with_transport(html, "static")
        assert 'content="live"' in with_transport(html, "live")
