"""The committed page: built from these sources, small, and compliant with its policy. Needs no Node."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from guide.tests.page import DIST, WEB, account, digest, files, sources
from tests.architecture.source_tree import ROOT

KB = 1000
BUDGETS = {
    "app.js": 47 * KB,
    "app.css": 15 * KB,
    "math.woff2": 36 * KB,
    "watch/app.js": 40 * KB,
    "watch/app.css": 8 * KB,
}
"""Maximum gzipped bytes of the files that are loaded first."""
TEXT_BUDGET, EMBEDDED_BUDGET, RECORDINGS_BUDGET, FOLDER_BUDGET = 102 * KB, 13 * KB, 1200 * KB, 2900 * KB
SCRIPT_BUDGET = 180 * KB
"""Maximum gzipped bytes of all scripts of the guide."""
FIRST_LOAD_BUDGET = 215 * KB
"""Maximum gzipped bytes before scrolling, with both fonts."""
EMBEDDED = re.compile(rb'<script type="application/json" id="[\w-]+">.*?</script>', re.DOTALL)
NOT_PROSE = re.compile(r"<(script|style|code|pre)\b.*?</\1>|<[^>]*>", re.DOTALL)
FORBIDDEN = {
    "raw markup": re.compile(r"\{@html|innerHTML|outerHTML|insertAdjacentHTML|document\.write"),
    "code from text": re.compile(r"\beval\(|new Function\(|setTimeout\(\s*[\"'`]"),
    "an inline style": re.compile(r"(?<![\w-])style(=|:)|setAttribute\(\s*[\"'`]style"),
    "an inline handler": re.compile(r"<[a-z][^>]*\son[a-z]+=[\"']"),
    "something loaded from elsewhere": re.compile(r"(src|srcset|@import|url\()\s*=?\s*[\"']?(https?:)?//"),
}
"""Constructs that the page's policy refuses, or would have to allow."""


def gzipped(content: bytes) -> int:
    """Return the compressed size."""
    return len(gzip.compress(content, 9, mtime=0))


def forbidden(text: str) -> list[str]:
    """Return the forbidden constructs in a source."""
    return [name for name, pattern in FORBIDDEN.items() if pattern.search(text)]


def script_sources() -> list[Path]:
    """Return the sources of the page."""
    return [path for path in (WEB / "src").rglob("*") if path.suffix in {".svelte", ".ts", ".css"}]


def test_the_page_is_built_from_these_sources() -> None:
    """The digest in the build matches the current sources, so nobody forgot `make web`."""
    build = account()

    assert digest(sources(ROOT, build["quoted"])) == build["sources"], "guide/web/ has changed since `make web`"


def test_every_quoted_file_counts() -> None:
    """Quoted project files are part of the digest."""
    quoted = {
        name
        for path in (WEB / "src").rglob("*.svelte")
        for name in re.findall(r'<Code\s[^>]*?file="([^"]+)"', path.read_text(encoding="utf-8"))
    }

    assert quoted == set(account()["quoted"])


def test_nothing_built_was_changed_by_hand() -> None:
    """Every file is unchanged since the build, without extra files."""
    build = account()["files"]
    found = {name: hashlib.sha256(text).hexdigest() for name, text in files(DIST).items() if name != "BUILD.json"}

    assert found == build


def test_the_page_contains_every_recording() -> None:
    """The page contains every recording of guide/web/recordings, unchanged."""
    recorded = {f"rec/{path.name}": path.read_bytes() for path in (WEB / "recordings").glob("*.json")}

    assert {name: text for name, text in files(DIST).items() if name.startswith("rec/")} == recorded


def test_the_page_is_light() -> None:
    """The first files, individually and in sum, all recordings and the whole folder are within their budgets."""
    built = files(DIST)
    page = built["index.html"]
    embedded = sum(map(gzipped, EMBEDDED.findall(page)))

    for name, budget in BUDGETS.items():
        assert gzipped(built[name]) <= budget, name
    assert gzipped(EMBEDDED.sub(b"", page)) <= TEXT_BUDGET
    assert embedded <= EMBEDDED_BUDGET
    first = sum(gzipped(built[name]) for name in ("app.js", "app.css", "math.woff2", "raised.woff2"))
    assert first + gzipped(EMBEDDED.sub(b"", page)) + embedded <= FIRST_LOAD_BUDGET
    parts = sum(gzipped(text) for name, text in built.items() if name.startswith("parts/"))
    assert gzipped(built["app.js"]) + parts <= SCRIPT_BUDGET
    assert sum(gzipped(text) for name, text in built.items() if name.startswith("rec/")) <= RECORDINGS_BUDGET
    assert sum(map(len, built.values())) <= FOLDER_BUDGET


def test_code_is_marked_as_code() -> None:
    """No text of the page shows the back-ticks of code, not even in a closed popover."""
    text = NOT_PROSE.sub("", (DIST / "index.html").read_text(encoding="utf-8"))

    assert re.findall(".{20}`.{20}", text) == []


def test_sources_follow_the_policy() -> None:
    """No raw markup, code from text, inline style or handler, and nothing from elsewhere, in any source."""
    found = {path.name: forbidden(path.read_text(encoding="utf-8")) for path in script_sources()}

    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("folder", [DIST, DIST / "watch"], ids=["guide", "watch"])
def test_the_built_page_follows_the_policy(folder: Path) -> None:
    """The page has no inline style or handler, and all its scripts are its own files or data."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    body = EMBEDDED.sub(b"", page.encode()).decode()

    assert not re.search(r"<style|\sstyle=|<[a-z][^>]*\son[a-z]+=", body)
    assert re.findall(r"<script[^>]*>", body) == ['<script defer src="app.js">']
    assert re.findall(r'<link rel="stylesheet" href="([^"]+)">', body) == ["app.css"]
    assert 'name="anybatch-guide" content="live"' in body
