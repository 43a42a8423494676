"""`core` has no side effects, and an import changes nothing; ruff and import-linter restrict environment and clocks."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import (
    PACKAGE,
    Found,
    dotted_name,
    imported_modules,
    is_within,
    parse,
    python_files,
)

ACTING_MODULES = (
    *("time", "datetime"),
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


def test_core_has_no_side_effects() -> None:
    """`core` uses no clock, file, environment, device, random state, other process or terminal."""
    found = [
        Found(path, getattr(node, "lineno", 1), what)
        for path in python_files(PACKAGE / "core")
        for node in ast.walk(parse(path))
        for what in acts(node)
    ]

    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "fault",
    [
        "import torch.distributed as dist",
        "def read(path):\n    with open(path) as file:\n        return file.read()",
        "print(1)",
    ],
)
def test_faults_are_detected(fault: str) -> None:
    """The check finds side effects, also inside functions and in other forms of import."""
    assert [what for node in ast.walk(ast.parse(fault)) for what in acts(node)]


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
