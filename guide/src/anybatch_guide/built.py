"""The built page: its files by path, and the meta element that selects live or static mode."""

import re
from collections.abc import Mapping
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

    Links and files with other kinds of names are ignored.
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


def with_transport(html: str, word: Literal["live", "static"]) -> str:
    """Return the page with its mode set: "live" with a server, "static" without."""
    changed, num_places = _TRANSPORT.subn(rf"\g<1>{word}\g<2>", html)
    if num_places != 1:
        message = (
            f'index.html has {num_places} elements <meta name="anybatch-guide" ...> instead of one: build it again.'
        )
        raise UserError(message)
    return changed
