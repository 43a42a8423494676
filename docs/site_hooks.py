"""Hooks of mkdocs: add pages from outside of docs/, API pages and lists of pages, and adapt links to the site.

Pages keep the links that work in the repository. A link to a file outside of docs/ adds that file to the site: markdown
as a page, a program as a listing.
"""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*sorted(path.name for path in ROOT.glob("*.md")), "examples/from_scratch/README.md")
LISTS = {"docs/decisions": "Decisions", "benchmarks/results": "Results of benchmarks"}
PAGE_SUFFIXES = (".md", ".png", ".svg")
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(?=(?:#[^()\s]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the addresses, anchors as on GitHub, and the pages of `folder/*` in the navigation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    if repository:
        owner, name = repository.removeprefix("https://github.com/").split("/")
        config.repo_url, config.site_url = repository, f"https://{owner.lower()}.github.io/{name}/"
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.nav = [expanded(entry) for entry in config.nav or []]
    return config


def expanded(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the navigation with the pages of a folder instead of `folder/*`."""
    ((title, pages),) = entry.items()
    if isinstance(pages, str) and pages.endswith("/*"):
        folder = f"docs/{pages.removesuffix('/*')}"
        pages = [site_path(path) for path in folder_pages(folder)]
        pages.insert(0, site_path(ROOT / folder))
    return {title: pages}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside of docs/, those that they link to, API pages and lists of pages."""
    pages = [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in PAGES), *folder_pages("benchmarks/results")]
    for page in pages:  # which grows by the targets of links
        if files.get_file_from_path(site_path(page)) is None:
            files.append(generated(page, config))
        if page.suffix == ".md":
            pages += [path for path in linked_files(page) if path not in pages]
    for folder, title in LISTS.items():
        lines = [f"- [{title_of(path)}]({path.name})" for path in folder_pages(folder)]
        files.append(File.generated(config, site_path(ROOT / folder), content="\n".join([f"# {title}\n", *lines])))
    for name in re.findall(r"api/([\w.]+)\.md", str(config.nav)):
        files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    return files


def generated(path: Path, config: MkDocsConfig) -> File:
    """Return a file from outside of docs/ as a page: markdown as it is, others as a listing."""
    if path.suffix in PAGE_SUFFIXES:
        return File.generated(config, site_path(path), abs_src_path=str(path))
    language = {".py": "python"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    return File.generated(config, site_path(path), content=f"# {path.name}\n\n````{language}\n{text}````\n")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace links between files of the repository by links between pages of the site."""
    if page.file.src_uri.startswith(("benchmarks/", "src/", "license.md", "log.md", "mkdocs.yml")):
        page.meta["search"] = {"exclude": True}  # a search leads to pages for users, which link to these
    elif page.file.src_uri.startswith(("api/", "decisions/", "examples/")):
        page.meta["search"] = {"boost": 0.2}  # after other pages
    if page.file.abs_src_path is None:  # written above
        return markdown
    source, folder = Path(page.file.abs_src_path), posixpath.dirname(page.file.src_uri) or "."

    def adapted(link: re.Match[str]) -> str:
        path = target(source, link[0])
        return link[0] if path is None else posixpath.relpath(site_path(path), folder)

    return LINK.sub(adapted, markdown)


def target(page: Path, link: str) -> Path | None:
    """Return the file or folder of the repository to which a page links, if there is one."""
    path = (page.parent / link).resolve()
    return path if path.exists() and ROOT in path.parents else None


def linked_files(page: Path) -> list[Path]:
    """Return the files to which a page links."""
    paths = [target(page, link) for link in LINK.findall(page.read_text(encoding="utf-8"))]
    return [path for path in paths if path is not None and path.is_file()]


def site_path(path: Path) -> str:
    """Return the place of a file of the repository in the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in LISTS:
        name += "/index.md"
    elif path.suffix not in PAGE_SUFFIXES:
        name += ".md"
    if "/" not in name:
        name = "index.md" if name == "README.md" else name.lower()
    return name.removeprefix("docs/")


def folder_pages(folder: str) -> list[Path]:
    """Return the pages of a folder in order."""
    return sorted((ROOT / folder).glob("*.md"))


def title_of(page: Path) -> str:
    """Return the heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
