"""Set up, test and check anybatch: `python make.py VERB`, with Python 3.11 or newer and nothing else installed.

```text
setup    create .venv and install anybatch and its guide into it, editable, with the tools for tests and checks
train    train the digits recipe at effective batch size 256; passes arguments on: python make.py train text
guide    open the guide in a browser; passes arguments on: python make.py guide --no-browser
test     run the tests, up to four files in parallel; with pytest arguments, in one process: make.py test -k accumulate
test-published  recreate the outputs in pages and documents, and run the longest tests; --draw 0.3 draws some, by --seed
test-fast  run the tests without ranks that take less than a quarter of a second each, in about a minute
gpu      run the benchmarks for a GPU, in nine minutes: docs/gpu.md; passes arguments on: make.py gpu --device cpu
matrix   run the fast and the exactness tests on every supported and installable torch and Python
check    lint, formatting, types, import layers and the tests of the architecture
format   rewrite the sources as `check` requires
docs     build the documentation site into build/site/, strictly; make.py docs serve: show it while you write
web      build the guide's page from guide/web/ into its package; this and the next need Node
web-check  types and tests of guide/web/; then build the page and compare it with the committed one, byte by byte
browser  install system packages for the page's tests: Chromium (as root, with apt), and axe-core by npm
release  write wheels and sources of both packages, and the guide as one file, into dist/, with their digests
clean    remove .venv, caches and build products; runs/ stays
```

`train`, `guide`, `test`, `gpu`, `check`, `format`, `docs` and `release` set up first, which is free if nothing changed.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PROGRAMS = VENV / ("Scripts" if os.name == "nt" else "bin")
STAMP = VENV / "anybatch-setup"
TRAIN_STAMP = VENV / "anybatch-train"
DOCS_STAMP = VENV / "anybatch-docs"
CPU_CONSTRAINTS = ROOT / "constraints-cpu.txt"
CACHES = (
    ".hypothesis",
    ".import_linter_cache",
    ".matrix",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "build",
    "dist",
)
GUIDE = ROOT / "guide"  # a separate package
WEB = GUIDE / "web"
PAGE = GUIDE / "src" / "anybatch_guide" / "dist"
MOST_WORKERS = 4  # many tests start ranks
RELEASE = ROOT / "dist"
CHROMIUM = ("chromium", "fonts-dejavu-core", "fonts-liberation")  # Debian packages
SOURCES = ("src", "tests", "guide/src", "guide/tests", "benchmarks", "examples")
VERSIONS = "import sys, torch; print('python', sys.version.split()[0], '| torch', torch.__version__)"


def setup(arguments: Sequence[str] = ()) -> int:
    """Install everything into .venv, unless the last set-up is current."""
    refuse(arguments)
    install(STAMP, ".[dev]", "./guide")
    return 0


def install(stamp: Path, *packages: str) -> None:
    """Install packages of this folder into .venv, editable, and torch; unless the stamp says that they are there."""
    accelerated = shutil.which("nvidia-smi") is not None
    key = setup_key(accelerated=accelerated)
    if any(path.exists() and path.read_text(encoding="utf-8") == key for path in (stamp, STAMP)):
        return
    constraints = [] if accelerated else ["--constraint", CPU_CONSTRAINTS.name]
    if accelerated:
        print("set-up: NVIDIA driver found, so torch comes as the package index gives it, with CUDA")
    else:
        pin = CPU_CONSTRAINTS.read_text(encoding="utf-8").splitlines()[-1]
        print(f"set-up: no NVIDIA driver found, so torch is held at the CPU build: {pin}")
    if not Path(venv_program("python")).exists():
        run([sys.executable, "-m", "venv", VENV.name], stop=True)
    pip = [venv_program("python"), "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, *constraints, *(word for package in packages for word in ("--editable", package))], stop=True)
    run([venv_program("python"), "-c", VERSIONS], stop=True)
    stamp.write_text(key, encoding="utf-8")


def setup_key(*, accelerated: bool) -> str:
    """Return a key that changes if the set-up would give another result."""
    word = hashlib.sha256(f"{sys.version_info[:2]} {accelerated}".encode())
    for path in (ROOT / "pyproject.toml", GUIDE / "pyproject.toml", CPU_CONSTRAINTS):
        word.update(path.read_bytes())
    return word.hexdigest()


def train(arguments: Sequence[str]) -> int:
    """Install what training needs, and train; arguments are passed to `anybatch train`."""
    install(TRAIN_STAMP, ".[plot,recipes]")
    return run([venv_program("anybatch"), "train", *arguments])


def guide(arguments: Sequence[str]) -> int:
    """Serve the guide; arguments are passed to `anybatch guide`."""
    setup()
    former = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C stops the server
    try:
        return run([venv_program("anybatch"), "guide", *arguments])
    finally:
        signal.signal(signal.SIGINT, former)


def run_tests(arguments: Sequence[str]) -> int:
    """Run all tests in several processes, file by file, or with pytest arguments in one process."""
    setup()
    keep_what_is_compiled()
    return run(
        [
            venv_program("python"),
            "-m",
            "pytest",
            *(arguments or [*side_by_side(), "--durations", "40", "-m", "not published"]),
        ]
    )


def run_published_tests(arguments: Sequence[str]) -> int:
    """Recreate the outputs in pages and documents, and run the longest tests; takes pytest arguments: `--draw 0.3`."""
    setup()
    keep_what_is_compiled()
    return run([venv_program("python"), "-m", "pytest", *side_by_side(), "-m", "published", *arguments])


def run_fast_tests(arguments: Sequence[str]) -> int:
    """Run the tests for everyday development: one rank, none slow."""
    refuse(arguments)
    setup()
    keep_what_is_compiled()
    fast = "not slow and not ranks and not published"
    return run([venv_program("python"), "-m", "pytest", *side_by_side(), "-q", "-m", fast])


def keep_what_is_compiled() -> None:
    """Let Python write compiled files, even if disabled, as tests start hundreds of processes."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def side_by_side() -> list[str]:
    """Return pytest options that run test files in several processes."""
    # One more than the cores: a process waits a third of the time for others that it started.
    workers = str(min(MOST_WORKERS, 1 + (os.cpu_count() or 1)))
    # In conftest.py's order, which starts long files first; by default files with few tests, often long, come last.
    return ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


def gpu(arguments: Sequence[str]) -> int:
    """Run the measurements that need a GPU, with this Python if it can import anybatch, else with .venv."""
    script = "benchmarks/on_a_gpu.py"
    if importable("anybatch"):
        return run([sys.executable, script, *arguments])
    setup()
    return run([venv_program("python"), script, *arguments])


def importable(package: str) -> bool:
    """Return whether this Python can import a package, tested in a subprocess to avoid importing torch here."""
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False)
    return done.returncode == 0


def matrix(arguments: Sequence[str]) -> int:
    """Test on several versions of torch and Python in separate environments, which takes long."""
    return run([sys.executable, "benchmarks/version_matrix.py", *arguments])


def check(arguments: Sequence[str]) -> int:
    """Run every check, even after one failed, and fail if any did."""
    refuse(arguments)
    setup()
    commands = {
        "lint": [venv_program("ruff"), "check"],
        "format": [venv_program("ruff"), "format", "--check"],
        "types": [venv_program("mypy")],
        "names in benchmarks": [venv_program("mypy"), "--config-file", "benchmarks/mypy.ini", "benchmarks"],
        "layers": [venv_program("lint-imports"), "--no-logo"],
        "architecture": [venv_program("python"), "-m", "pytest", "-q", "tests/architecture"],
    }
    failed = [name for name, command in commands.items() if run(command)]
    print(f"check: failed: {', '.join(failed)}" if failed else "check: all well")
    return int(bool(failed))


def format_sources(arguments: Sequence[str]) -> int:
    """Rewrite the sources: imports, safe fixes of ruff, formatting."""
    refuse(arguments)
    setup()
    unmended = run([venv_program("ruff"), "check", "--fix"])
    return run([venv_program("ruff"), "format"]) or unmended


def docs(arguments: Sequence[str]) -> int:
    """Build the documentation site, or run mkdocs with other arguments."""
    setup()
    key = STAMP.read_text(encoding="utf-8")
    if not DOCS_STAMP.exists() or DOCS_STAMP.read_text(encoding="utf-8") != key:
        pip = [venv_program("python"), "-m", "pip", "--disable-pip-version-check", "install"]
        run([*pip, "--editable", ".[docs]"], stop=True)
        DOCS_STAMP.write_text(key, encoding="utf-8")
    # Without --quiet, with which mkdocs counts no warnings, so that --strict has no effect.
    return run([venv_program("mkdocs"), *(arguments or ["build", "--strict"])])


def web(arguments: Sequence[str]) -> int:
    """Build the guide's page into its package."""
    refuse(arguments)
    npm("ci")
    return npm("run", "build", stop=False)


def web_check(arguments: Sequence[str]) -> int:
    """Check the sources of the page, and that they build the committed one."""
    refuse(arguments)
    npm("ci")
    failed = [verb for verb in ("check", "test") if npm("run", verb, stop=False)]
    with tempfile.TemporaryDirectory() as folder:
        npm("run", "build", "--", folder)
        other = files_that_differ(Path(folder), PAGE)
    failed += [f"{name} is not what the sources give: run `make web`" for name in other]
    print(f"web-check: failed: {', '.join(failed)}" if failed else "web-check: all well")
    return int(bool(failed))


def browser(arguments: Sequence[str]) -> int:
    """Install Chromium and fonts if missing, and axe-core; fail if the tests of the page cannot run."""
    refuse(arguments)
    if shutil.which("chromium") is None and "ANYBATCH_CHROMIUM" not in os.environ:
        apt = shutil.which("apt-get")
        if apt is None or os.geteuid() != 0:
            print("browser: no Chromium, and only root can install one with apt. Install it, or name it in the")
            print("browser: environment as ANYBATCH_CHROMIUM; without it the tests of the page are skipped.")
            return 1
        run([apt, "update"], stop=True)
        run([apt, "install", "--yes", "--no-install-recommends", *CHROMIUM], stop=True)
    if shutil.which("npm") is None:
        print("browser: no npm, so axe-core is not installed, and the test of accessibility is skipped.")
        return 0
    return npm("ci", stop=False)


def release(arguments: Sequence[str]) -> int:
    """Write the files of a release into dist/."""
    refuse(arguments)
    setup()
    shutil.rmtree(RELEASE, ignore_errors=True)
    for project in (ROOT, GUIDE):
        run([venv_program("python"), "-m", "build", "--outdir", str(RELEASE), str(project)], stop=True)
    run([venv_program("anybatch"), "guide", "export", "--single-file", str(RELEASE / "guide.html")], stop=True)
    files = sorted(RELEASE.iterdir())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (RELEASE / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    for path in files:
        print(f"release: {path.relative_to(ROOT)}, {path.stat().st_size / 1e6:.2f} MB")
    return 0


def npm(*arguments: str, stop: bool = True) -> int:
    """Run npm on guide/web/."""
    program = shutil.which("npm")
    if program is None:
        sys.exit("make.py: the page is built with Node 20 or newer, and there is no npm on the PATH.")
    return run([program, "--prefix", str(WEB), *arguments], stop=stop)


def files_that_differ(one: Path, other: Path) -> list[str]:
    """Return the names of files that differ between two folders, or are only in one."""
    here, there = (
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    )
    return sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))


def clean(arguments: Sequence[str]) -> int:
    """Restore a fresh clone, except for the logs and checkpoints in runs/."""
    refuse(arguments)
    compiled = [path for folder in SOURCES for path in (ROOT / folder).rglob("__pycache__")]
    for path in (VENV, *(ROOT / name for name in CACHES), *compiled):
        shutil.rmtree(path, ignore_errors=True)
    return 0


def refuse(arguments: Sequence[str]) -> None:
    """Exit if a verb without arguments was given some."""
    if arguments:
        sys.exit(
            f"make.py: unexpected arguments {' '.join(arguments)}; "
            "only `train`, `guide`, `test`, `gpu`, `docs` and `matrix` take any."
        )


def run(command: Sequence[str], *, stop: bool = False) -> int:
    """Print a command, run it in the project's root, and return its exit status; exit on failure if `stop`."""
    shown = [Path(command[0]).name, *command[1:]]
    print("$", " ".join(shown), flush=True)
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if stop and status:
        sys.exit(status)
    return status


def venv_program(name: str) -> str:
    """Return the path of a program in .venv."""
    return str(PROGRAMS / (f"{name}.exe" if os.name == "nt" else name))


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "setup": setup,
    "train": train,
    "guide": guide,
    "test": run_tests,
    "test-published": run_published_tests,
    "test-fast": run_fast_tests,
    "gpu": gpu,
    "matrix": matrix,
    "check": check,
    "format": format_sources,
    "docs": docs,
    "web": web,
    "web-check": web_check,
    "browser": browser,
    "release": release,
    "clean": clean,
}


def main(arguments: Sequence[str]) -> int:
    """Run a verb and return the exit status of the program."""
    if sys.version_info < (3, 11):  # noqa: UP036 (the user's Python may be older)
        sys.exit(f"anybatch needs Python 3.11 or newer, and this is {sys.version.split()[0]} ({sys.executable}).")
    if not arguments or arguments[0] not in VERBS:
        print(__doc__)
        return 0 if arguments in ([], ["help"]) else 2
    return VERBS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
