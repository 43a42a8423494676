"""Read the committed page and its sources without Node."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tests.architecture.source_tree import GUIDE, ROOT

WEB = ROOT / "guide" / "web"
DIST = GUIDE / "dist"
APART = re.compile(r"guide/web/(node_modules|tests|\.[^/]*)/|.*\.md$|guide/web/vitest\.config\.js$")
"""Files of guide/web/ that are not part of the page; the same as in guide/web/make/digest.js."""


def account(dist: Path = DIST) -> dict[str, Any]:
    """Return BUILD.json."""
    return dict(json.loads((dist / "BUILD.json").read_text(encoding="utf-8")))


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sources(root: Path, quoted: list[str]) -> dict[str, bytes]:
    """Return the source files of the page, by path relative to `root`."""
    own = {
        path.relative_to(root).as_posix(): path
        for child in (root / "guide" / "web").iterdir()
        if child.name != "node_modules"
        for path in (child.rglob("*") if child.is_dir() else [child])
        if path.is_file()
    }
    used = {name: path for name, path in own.items() if not APART.match(name)}
    return {name: path.read_bytes() for name, path in sorted({**used, **{q: root / q for q in quoted}}.items())}


def digest(contents: dict[str, bytes]) -> str:
    """Return one digest of files and their names, as `sha256sum` would list them."""
    lines = "".join(f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in contents.items())
    return hashlib.sha256(lines.encode()).hexdigest()
