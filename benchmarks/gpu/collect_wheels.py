"""Collect the wheels that a GPU machine without a network lacks, for `make gpu` to run there.

Takes the list of packages that the machine has (`pip list` or `pip freeze`, or one name a line) and downloads what
anybatch and the stages need in addition, dependencies included:

    python benchmarks/gpu/collect_wheels.py --installed packages.txt --python 3.12 --out wheels

There, `python -m pip install --no-index --no-deps wheels/*.whl`, then `python make.py gpu`.
"""

import argparse
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("2_28", "2_27", "2_17", "2_12", "2_5")  # of manylinux, newest first
STAGES_NEED = ("accelerate", "lightning", "numpy", "psutil", "torchvision", "transformers")
MAX_BYTES = 45 * 2**20


def normal(name: str) -> str:
    """Return a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(path: Path) -> set[str]:
    """Return the names in a list of packages from either command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {normal(found[0]) for line in lines if (found := re.match(r"[A-Za-z0-9][\w.-]*", line.strip()))}


def download(requirement: str, python: str, folder: Path) -> Path:
    """Download one wheel without its dependencies, and return its file."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [word for number in PLATFORMS for word in ("--platform", f"manylinux_{number}_x86_64")]
    subprocess.run([*command, requirement], check=True)
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def requirements_of(wheel: Path, python: str) -> list[Requirement]:
    """Return a wheel's dependencies on that Python, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    environment = {"python_version": python, "sys_platform": "linux", "platform_system": "Linux", "extra": ""}
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [one for one in found if one.marker is None or one.marker.evaluate(environment)]


def collect(wanted: Iterable[Requirement], have: set[str], python: str, folder: Path) -> list[Path]:
    """Download the missing packages and their dependencies, and return the files."""
    queue, found = list(wanted), []
    known = set(have)
    while queue:
        one = queue.pop()
        if normal(one.name) in known:
            continue
        known.add(normal(one.name))
        wheel = download(f"{one.name}{one.specifier}", python, folder)
        found.append(wheel)
        queue += requirements_of(wheel, python)
    return found


def main() -> int:
    """Collect the wheels; fail if their total size is too large to transfer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", type=Path, required=True, help="list of the packages that the machine has")
    parser.add_argument("--python", default="3.12", help="version of Python there (default: 3.12)")
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="folder for the wheels (default: wheels)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    have = installed(given.installed)
    if "torch" not in have:
        parser.error(f"{given.installed} lists no torch: the machine needs a torch that fits its GPU driver.")
    wanted = [Requirement(line) for line in (*project["dependencies"], *STAGES_NEED)]
    wheels = collect(wanted, have, given.python, given.out)
    size = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:8.2f} MiB  {wheel.name}")
    print(f"{size / 2**20:8.2f} MiB in {len(wheels)} wheels in {given.out}")
    if size > MAX_BYTES:
        print(f"more than the {MAX_BYTES / 2**20:.0f} MiB that can be carried: leave out a package of STAGES_NEED")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
