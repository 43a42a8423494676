"""`core` has no side effects, few files read the environment, and an import changes nothing."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.architecture.source_tree import (
    GUIDE,
    PACKAGE,
    PACKAGES,
    Found,
    dotted_name,
    imported_modules,
    is_within,
    parse,
    python_files,
)

Check = Callable[[ast.AST], Iterator[str]]
CLOCKS = ("time", "datetime")
ACTING_MODULES = (
    *CLOCKS,
    *("asyncio", "concurrent", "multiprocessing", "signal", "subprocess", "threading"),
    *("glob", "io", "os", "pathlib", "shutil", "sys", "tempfile"),
    *("http", "logging", "random", "secrets", "socket", "urllib", "warnings"),
    *("torch.cuda", "torch.distributed", "torch.multiprocessing", "torch.random"),
)
ACTING_CALLS = ("breakpoint", "exec", "eval", "input", "open", "print", "torch.load", "torch.manual_seed", "torch.save")


def acts(node: ast.AST) -> Iterator[str]:
    """Yield the side effects of a node of `core`."""
    for module in imported_modules(node):
        if any(is_within(module, acting) for acting in ACTING_MODULES):
            yield f"imports {module}"
    if isinstance(node, ast.Call) and dotted_name(node.func) in ACTING_CALLS:
        yield f"calls {dotted_name(node.func)}"
    if isinstance(node, ast.Attribute) and dotted_name(node) in ACTING_MODULES:
        yield f"reaches {dotted_name(node)}"


def reads_environment(node: ast.AST) -> Iterator[str]:
    """Yield the uses of environment variables in a node."""
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    yield from (f"imports {module}" for module in imported_modules(node) if module in names)
    if isinstance(node, ast.Attribute) and dotted_name(node) in names:
        yield f"uses {dotted_name(node)}"


def reads_clock(node: ast.AST) -> Iterator[str]:
    """Yield the imports of clocks in a node."""
    yield from (f"imports {name}" for name in imported_modules(node) if any(is_within(name, c) for c in CLOCKS))


def asks_clock(node: ast.AST) -> Iterator[str]:
    """Yield direct calls of a clock in a node."""
    name = dotted_name(node.func) if isinstance(node, ast.Call) else None
    if name is not None and any(is_within(name, clock) for clock in CLOCKS):
        yield f"calls {name}"


def findings(check: Check, files: Sequence[Path]) -> list[Found]:
    """Return all findings of a check in files."""
    return [
        Found(path, getattr(node, "lineno", 1), what)
        for path in files
        for node in ast.walk(parse(path))
        for what in check(node)
    ]


def found_in_text(check: Check, source: str) -> list[str]:
    """Return all findings of a check in a source text."""
    return [what for node in ast.walk(ast.parse(source)) for what in check(node)]


def test_core_acts_on_nothing() -> None:
    """`core` uses no clock, file, environment, device, random state, other process or terminal."""
    found = findings(acts, python_files(PACKAGE / "core"))

    assert not found, "\n".join(map(str, found))


@pytest.mark.slow
def test_environment_is_read_in_one_file() -> None:
    """Only parallel/launchers.py reads environment variables, and only the program sets one, before torch is imported.

    Other code gets settings as arguments. The guide's server passes its environment to its worker, and the launcher of
    local ranks a folder to its fork server.
    """
    known = [
        PACKAGE / "parallel" / "launchers.py",
        PACKAGE / "cli" / "command.py",
        GUIDE / "worker_process.py",
    ]
    found = findings(reads_environment, [path for path in python_files(*PACKAGES) if path not in known])

    assert not found, "\n".join(map(str, found))
    assert all(findings(reads_environment, [path]) for path in known), "the check no longer sees what these surely do"


def test_the_engine_reads_a_clock_in_one_file() -> None:
    """Only engine/micro_batch_size/search.py uses a clock, as a replaceable default.

    No other decision of the engine can depend on speed; observers timestamp records.
    """
    known = PACKAGE / "engine" / "micro_batch_size" / "search.py"
    found = findings(reads_clock, [path for path in python_files(PACKAGE / "engine") if path != known])

    assert not found, "\n".join(map(str, found))
    assert findings(reads_clock, [known]), "the check no longer sees what this surely does"
    assert not findings(asks_clock, [known]), "a clock is asked by its name, and could not be replaced"


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (acts, "import torch.distributed as dist"),
        (acts, "def read(path):\n    with open(path) as file:\n        return file.read()"),
        (acts, "print(1)"),
        (reads_environment, "import os\nos.environ.get('RANK')"),
        (reads_clock, "def now():\n    import time\n    return time.monotonic()"),
        (asks_clock, "import time\ndef now():\n    return time.monotonic()"),
    ],
)
def test_faults_are_seen(check: Check, fault: str) -> None:
    """Each check finds its faults, also inside functions and in other forms of import."""
    assert found_in_text(check, fault)


IMPORT_WATCH = """
import os, random, threading
import torch
import torch.distributed as dist

def world():
    return {
        "environment": dict(os.environ),
        "threads": threading.active_count(),
        "python's random state": random.getstate(),
        "torch's random state": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "process group": dist.is_initialized(),
        "device context": torch.cuda.is_initialized(),
    }

before = world()
import anybatch
changed = [name for name, value in world().items() if value != before[name]]
assert not changed, f"import anybatch changed: {', '.join(changed)}"
"""


@pytest.mark.slow
def test_import_changes_nothing() -> None:
    """`import anybatch` changes nothing in the process: no seed, variable, setting, thread, group or device."""
    done = subprocess.run(  # noqa: S603 (a fixed program)
        [sys.executable, "-c", IMPORT_WATCH], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert not done.stdout


FIRST_STEP = """
import sys
import torch
import anybatch as ab
from anybatch.recipes.digits import Network, loss

model = Network()
engine = ab.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ab.mean_over_samples(loss))
data = [{"image": torch.zeros(1, 8, 8), "label": torch.tensor(0)} for _ in range(4)]
for batch in ab.batches(data, effective_batch_size=4):
    engine.step(batch)
print(*sys.modules)
"""
RUNS = r"recipes\.(run_folder|prepare|session)"
LAUNCH = "import sys, anybatch.cli.launch; print(*sys.modules)"
OTHER_WINGS = (
    r"anybatch\.(diagnostics|testing|recipes\.planning|planner\.(trace|cost|proposals))|matplotlib|tensorboard"
)


@pytest.mark.parametrize(
    ("program", "needs", "does_without"),
    [
        (
            FIRST_STEP,
            "anybatch.engine.step",
            rf"{OTHER_WINGS}|anybatch\.(cli|events|planner|{RUNS})|rich",
        ),
        (LAUNCH, "anybatch.recipes.start", OTHER_WINGS),
    ],
    ids=["step", "train"],
)
@pytest.mark.slow
def test_a_first_step_imports_nothing_that_it_does_not_use(program: str, needs: str, does_without: str) -> None:
    """A step, and `anybatch train`, do not import the modules to check, compare, plan and plot, which takes time."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603 (a fixed program)

    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert needs in imported
    assert not {name for name in imported if re.match(rf"({does_without})(\.|$)", name)}
