"""The guide without a server: complete, with its own policy, and without requests."""

import base64
import hashlib
import re
import shutil
from pathlib import Path

import pytest

from anybatch.errors import UserError
from anybatch_guide.export import MAX_BYTES, Asset, export_file, export_folder, read_page, recordings, single_file
from guide.tests.served import PAGE


def test_single_file_holds_everything(tmp_path: Path) -> None:
    """One file refers only to itself, is marked as static, and contains each recording once."""
    html = export_file(PAGE, tmp_path / "guide.html").read_text(encoding="utf-8")

    assert '<meta name="anybatch-guide" content="static">' in html
    references = re.findall(r"""(?:src|href)\s*=\s*"([^"]*)"|url\("?([^")]*)""", html)
    assert all("".join(reference).startswith("data:") for reference in references)
    assert html.count('id="rec-small"') == html.count('id="rec-later"') == 1
    assert "data:font/woff2;base64,d09GMg==" in html


def test_policy_of_a_single_file() -> None:
    """The policy allows exactly the inline scripts and styles, by digest, and no requests."""
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
    """A recording that contains the end of a script is embedded as data, and read unchanged."""
    html = single_file(read_page(PAGE))

    assert "onerror=alert(1)></script>" not in html
    assert r"\u003cimg src=x onerror=alert(1)>\u003c/script>" in html


def test_folder_that_is_not_empty(tmp_path: Path) -> None:
    """Existing files are not changed."""
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(UserError):
        export_folder(PAGE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name="anybatch-guide"', 'name="other"'),
        ("<title>", '<meta name="anybatch-guide" content="live"><title>'),
        ('src="app.js"', 'src="other.js"'),
        ('<meta charset="utf-8">', ""),
    ],
)
def test_page_that_cannot_be_exported(old: str, new: str) -> None:
    """A page without its mode, or with missing files, is refused, and nothing is written."""
    page = read_page(PAGE)
    html = page["index.html"].content.decode()
    assert old in html
    broken = {**page, "index.html": Asset(html.replace(old, new).encode(), "text/html")}

    with pytest.raises(UserError):
        single_file(broken)


def test_only_the_page_is_the_page(tmp_path: Path) -> None:
    """Links, other kinds of files and unusual names are not part of a page, in any folder."""
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
    """A folder that is larger than any page is not read into memory."""
    shutil.copytree(PAGE, tmp_path / "page")
    with (tmp_path / "page" / "large.js").open("wb") as file:
        file.truncate(MAX_BYTES)

    with pytest.raises(UserError):
        read_page(tmp_path / "page")
