"""Rebuild the page if Node is installed: the same bytes, clean types, and checks that can fail."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from guide.tests.page import DIST, WEB, account
from tests.architecture.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.published]

MIN_NODE = 20
OUT_OF_REACH = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH|ENOTCACHED")
APART = shutil.ignore_patterns("node_modules", ".svelte-kit", ".vite")


@dataclass(frozen=True)
class Rebuilt:
    """A copy of the page's sources and tools, and the result of checking it."""

    root: Path
    status: int
    output: str


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Rebuilt:
    """Copy the sources of the page and run `make web-check` on them: from the lock file, into an empty folder."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"the page cannot be built again: no {program} on the PATH")
    version = run(ROOT, str(shutil.which("node")), "--version")[1].strip()
    if int(version.lstrip("v").split(".")[0]) < MIN_NODE:
        pytest.skip(f"the page cannot be built again: it needs Node {MIN_NODE}, and this is {version}")
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(WEB, root / WEB.relative_to(ROOT), ignore=APART)
    shutil.copytree(DIST, root / DIST.relative_to(ROOT))
    for name in ("make.py", *account()["quoted"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    status, output = run(root, sys.executable, "make.py", "web-check")
    if OUT_OF_REACH.search(output):
        pytest.skip("the page cannot be built again: the index of npm is out of reach")
    return Rebuilt(root, status, output)


def run(root: Path, *command: str) -> tuple[int, str]:
    """Run a program in a folder, and return its status and its output."""
    environment = {**os.environ, "npm_config_prefer_offline": "true", "NO_COLOR": "1"}
    done = subprocess.run(  # noqa: S603 (runs only commands that are written in this file)
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def test_the_same_sources_give_the_same_bytes(rebuilt: Rebuilt) -> None:
    """A build in another folder equals the committed page, and its types and tests pass."""
    assert rebuilt.status == 0, rebuilt.output
    assert "web-check: all well" in rebuilt.output
