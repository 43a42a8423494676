"""The example for Ray Train, on a local cluster."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anybatch.checkpoints import list_checkpoints, load
from anybatch.testing import relative_error
from tests.architecture.source_tree import PACKAGE, ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'anybatch[ray]'")
def test_workers_of_ray(tmp_path: Path) -> None:
    """Two Ray workers end with the parameters of one, up to rounding; a finished run is not repeated."""
    env = {**os.environ, "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = []
    for workers in (1, 2, 2):
        folder = tmp_path / f"workers-{workers}"
        command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers", str(workers)]
        subprocess.run([*command, "--folder", str(folder)], env=env, check=True, timeout=300)  # noqa: S603
        found.append(load(list_checkpoints(folder)[-1])["model"])
    assert relative_error(found[1], found[0]) < 1e-6
    assert relative_error(found[2], found[1]) == 0.0
