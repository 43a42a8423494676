"""Metadata of a package that depend on the address of the repository, which only the root's pyproject.toml has.

With an address, the package has project URLs, and links and pictures of its README are absolute, as a package index
needs. Without, it has no URLs, and the README is as it is. Both packages have this file, as each is built alone.
"""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")


class ProjectAddress(MetadataHookInterface):  # type: ignore[misc]  # without types
    """Write `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields that a source archive does not have already."""
        root = Path(self.root)
        repository = address(root)
        if "urls" not in metadata:
            metadata["urls"] = project_urls(repository)
        if "readme" not in metadata:
            text = (root / "README.md").read_text(encoding="utf-8")
            folder = "" if (root / "guide").is_dir() else root.name
            metadata["readme"] = {
                "content-type": "text/markdown",
                "text": absolute_links(text, repository, folder) if repository else text,
            }


def address(root: Path) -> str:
    """Return the address of the repository, from the pyproject.toml of a package or the folder above it."""
    for folder in (root, root.parent):
        file = folder / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        hook = project.get("tool", {}).get("hatch", {}).get("metadata", {}).get("hooks", {}).get("custom", {})
        if "repository" in hook:
            return str(hook["repository"])
    return ""


def project_urls(repository: str) -> dict[str, str]:
    """Return the project URLs of a repository on GitHub, none without one."""
    if not repository:
        return {}
    return {
        "Documentation": site(repository),
        "Source": repository,
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def site(repository: str) -> str:
    """Return the address of the documentation site, which .github/workflows/site.yml publishes."""
    owner, name = repository.removeprefix("https://github.com/").split("/")
    return f"https://{owner.lower()}.github.io/{name}/"


def absolute_links(text: str, repository: str, folder: str) -> str:
    """Return a page of a folder of the repository with absolute links and pictures."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, text)
