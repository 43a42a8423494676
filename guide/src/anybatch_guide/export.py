"""Read the built page from its folder, and export it as a folder for any web server or as one local file.

The exported page is in static mode: it computes nothing and sends no requests, but shows all recordings.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from anybatch.errors import UserError

DIST: Final = Path(__file__).with_name("dist")
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/vnd.microsoft.icon",
}
MAX_BYTES: Final = 16 * 2**20
_TRANSPORT: Final = re.compile(r'(<meta name="anybatch-guide" content=")(?:live|static)(")')
_RECORDING: Final = re.compile(r"rec/[a-z][a-z0-9_]{0,63}\.json")
_ASSET: Final = re.compile(r"(?:parts/)?[a-z][a-z0-9_-]{0,63}(?:\.[a-z0-9]+)+")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    content: bytes  # the bytes of the file
    media_type: str  # value of the Content-Type header

    @property
    def is_text(self) -> bool:
        """Whether to compress the file; fonts and pictures are already compressed."""
        return self.media_type.startswith(("text/", "application/json", "image/svg"))


def read_page(folder: Path) -> dict[str, Asset]:
    """Return the files of the page by path: index.html, scripts, styles, pictures, parts/NAME.js, rec/NAME.json.

    Symbolic links, and files with other names, are ignored.
    """
    if not (folder / "index.html").is_file():
        message = f"{folder} has no built page (index.html). Build it with `make web`, or install a release."
        raise UserError(message)
    page: dict[str, Asset] = {}
    num_bytes = 0
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder).as_posix()
        pattern = _RECORDING if file.suffix == ".json" else _ASSET
        # A link could point to a file outside of the folder.
        if file.suffix not in MEDIA_TYPES or not pattern.fullmatch(path) or file.is_symlink() or not file.is_file():
            continue
        num_bytes += file.stat().st_size
        if num_bytes > MAX_BYTES:
            message = f"{folder} has more than {MAX_BYTES} bytes, so it is not a page of the guide."
            raise UserError(message)
        page[path] = Asset(file.read_bytes(), MEDIA_TYPES[file.suffix])
    return page


def recordings(page: Mapping[str, Asset]) -> dict[str, str]:
    """Return the recordings of a page, by name, as text."""
    names = {path: path.removeprefix("rec/").removesuffix(".json") for path in page if path.startswith("rec/")}
    return {name: page[path].content.decode().strip() for path, name in names.items()}


def with_mode(html: str, mode: Literal["live", "static"]) -> str:
    """Return the page with its mode set: "live" with a server, "static" without."""
    changed, num_matches = _TRANSPORT.subn(rf"\g<1>{mode}\g<2>", html)
    if num_matches != 1:
        message = (
            f'index.html has {num_matches} elements <meta name="anybatch-guide" ...> instead of one: build it again.'
        )
        raise UserError(message)
    return changed


__all__ = ["DIST", "export_file", "export_folder", "single_file", "write_page"]

_TRUST: Final = (
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types svelte-trusted-html"
)
_FOLDER_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    f"connect-src 'self'; {_TRUST}"
)
_SCRIPT: Final = re.compile(r'<script\b[^>]*?\bsrc="(?:\./|/)?([^"]+)"[^>]*></script>')
_LINK: Final = re.compile(r"<link\b[^>]*>")
_HREF: Final = re.compile(r'\bhref="(?:\./|/)?([^"]+)"')
_URL: Final = re.compile(r"""url\(\s*(["']?)(?:\./|/)?([^"')]+)\1\s*\)""")
_TAG_IN_SCRIPT: Final = re.compile(r"<(?=/?script)", re.IGNORECASE)


def export_folder(page: Path, folder: Path) -> Path:
    """Write the guide as files into a new or empty folder, and return the folder."""
    files = read_page(page)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} exists and is not an empty folder. Choose a new one, or empty it."
        raise UserError(message)
    html = with_policy(with_mode(files["index.html"].content.decode(), "static"), _FOLDER_POLICY)
    for path, content in {
        **{path: asset.content for path, asset in files.items()},
        "index.html": html.encode(),
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def export_file(page: Path, file: Path) -> Path:
    """Write the guide as one file, replacing an older one, and return the file."""
    return write_page(single_file(read_page(page)), file)


def write_page(html: str, file: Path) -> Path:
    """Write a page into a file, replacing an older one, and return the file."""
    if file.is_dir() or not file.parent.is_dir():
        message = f"{file} is a folder, or its folder does not exist. Give a file name, such as guide.html."
        raise UserError(message)
    file.write_text(html, encoding="utf-8", newline="\n")
    return file


def single_file(page: Mapping[str, Asset]) -> str:
    """Return the page as one HTML text, with inline scripts, styles, fonts, pictures and recordings."""
    html = with_mode(page["index.html"].content.decode(), "static")
    scripts: list[str] = []
    styles: list[str] = []

    def inline_script(match: re.Match[str]) -> str:
        # Data that the page would fetch on demand comes before the script that uses it.
        paths = [*(path for path in sorted(page) if path.startswith("parts/")), match.group(1)]
        texts = [_script_text(page, path) for path in paths]
        scripts.extend(texts)
        # Inline modules run after the page, like deferred scripts; browsers do not load module files from a disk.
        return "".join(f'<script type="module">{text}</script>' for text in texts)

    def inline_link(match: re.Match[str]) -> str:
        href = _HREF.search(match.group())
        if href is None or href.group(1).startswith("data:"):
            return match.group()
        # Scripts become inline, so preloading is not needed.
        if "modulepreload" in match.group():
            return ""
        if "stylesheet" in match.group():
            styles.append(_style_text(page, href.group(1)))
            return f"<style>{styles[-1]}</style>"
        return match.group().replace(href.group(), f'href="{_data_url(page, href.group(1))}"')

    # Replace links first, because an inline script may contain text that looks like a link.
    html = _LINK.sub(inline_link, html)
    html = _SCRIPT.sub(inline_script, html)
    html = html.replace("</body>", f"{''.join(_missing_recordings(page, html))}</body>", 1)
    return with_policy(html, _file_policy(scripts, styles))


def with_policy(html: str, policy: str) -> str:
    """Return the page with a content security policy; the policy precedes all elements that it applies to."""
    changed, num_matches = re.subn(
        r'<meta charset="utf-8"\s*/?>',
        lambda match: f'{match.group()}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        html,
        count=1,
        flags=re.IGNORECASE,
    )
    if not num_matches:
        message = 'index.html has no <meta charset="utf-8">, which has to precede the policy: build it again.'
        raise UserError(message)
    return changed


def _file_policy(scripts: list[str], styles: list[str]) -> str:
    """Return the policy of a single file: allow its inline scripts and styles, and no connections."""
    allowed = {name: " ".join(map(_hash, texts)) or "'none'" for name, texts in (("js", scripts), ("css", styles))}
    return (
        f"default-src 'none'; script-src {allowed['js']}; style-src {allowed['css']}; img-src data:; font-src data:; "
        f"connect-src 'none'; {_TRUST}"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script_text(page: Mapping[str, Asset], path: str) -> str:
    """Return a script for inline use, with `<` replaced in `<script` and `</script`."""
    text = _asset(page, path).content.decode()
    # These tags occur only in strings, where \x3c is the same character.
    return _TAG_IN_SCRIPT.sub(lambda _match: r"\x3c", text)


def _style_text(page: Mapping[str, Asset], path: str) -> str:
    """Return a style sheet for inline use, with inline fonts and pictures."""
    text = _URL.sub(lambda match: f'url("{_url(page, match.group(2))}")', _asset(page, path).content.decode())
    return re.sub(r"<(?=/style)", r"\\3c ", text, flags=re.IGNORECASE)


def _url(page: Mapping[str, Asset], path: str) -> str:
    return path if path.startswith(("data:", "#")) else _data_url(page, path)


def _data_url(page: Mapping[str, Asset], path: str) -> str:
    asset = _asset(page, path)
    return f"data:{asset.media_type.replace(' ', '')};base64,{base64.b64encode(asset.content).decode()}"


def _asset(page: Mapping[str, Asset], path: str) -> Asset:
    if path not in page:
        message = f"the page refers to the missing file {path}: build it again."
        raise UserError(message)
    return page[path]


def _missing_recordings(page: Mapping[str, Asset], html: str) -> Iterator[str]:
    """Yield the recordings that are not in the page yet, as JSON script elements."""
    for name, text in recordings(page).items():
        if f'id="rec-{name}"' not in html:
            # The data must not contain text that ends the element.
            safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
            yield f'<script type="application/json" id="rec-{name}">{safe}</script>\n'
