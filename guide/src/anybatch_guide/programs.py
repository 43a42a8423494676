"""Programs and command lines that repeat a playground run. The page fills in the same templates."""

from collections.abc import Mapping
from dataclasses import fields
from string import Template

from anybatch_guide.mistakes.mistake import MISTAKES, source_of
from anybatch_guide.setting import GHOST_SAMPLES, PlaygroundSetting

_HEADER = '''"""$task, $cut = $effective_batch_size samples a step.

Run it: $launch program.py
"""
'''
_MODEL = """
torch.set_num_threads(1)
task = load("$task", norm="$norm")
torch.manual_seed($seed)
model = task.model()
optimizer = torch.optim.$optimizer_class(model.parameters(), lr=$learning_rate)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=$steps)
"""
_ENGINE = f"""{_HEADER}
import torch

import anybatch as ab
from anybatch.norms import Ghost
from anybatch.testing import memory_budget
from anybatch_guide.tasks.task import load
{_MODEL}
engine = ab.Engine(
    model,
    optimizer,
    task.loss,
    micro_batch_size=$micro_batch_size,
    scheduler=scheduler,
    precision="$precision",
    norms=$norms,
)
rows = task.rows  # which a limit is beside
for batch in ab.batches(task.rows, effective_batch_size=$effective_batch_size, steps=$steps, seed=$seed):
    with memory_budget($limit + rows.num_bytes, model, optimizer, rows.inputs, rows.targets):
        report = engine.step(batch)
    if engine.world.is_first:
        print(report.loss)
"""
_WITHOUT_LIMIT: Mapping[str, str] = {
    "from anybatch.testing import memory_budget\n": "",
    "rows = task.rows  # which a limit is beside\n": "",
    "    with memory_budget($limit + rows.num_bytes, model, optimizer, rows.inputs, rows.targets):\n        report": (
        "    report"
    ),
}
_WITHOUT_GROUPS: Mapping[str, str] = {"from anybatch.norms import Ghost\n": ""}
_LOOP = f"""{_HEADER}
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch_guide.mistakes.windows import Pair, items, share, windows
from anybatch_guide.tasks.task import MicroBatches, cross_entropy, load


$source

means = []  # of the micro-batches of a step, with what each counts


def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(outputs, targets)
    means.append((loss.item(), items(targets)))
    return loss


def show(*_: object) -> None:
    global left
    print(sum(mean * count for mean, count in means) / sum(count for _, count in means))
    means.clear()
    left -= 1
    if not left:
        raise SystemExit

{_MODEL}
loader = MicroBatches(task.rows, micro_batch_size=$micro_batch_size, seed=$seed)
left = $steps
optimizer.register_step_post_hook(show)
while True:
    train(
        model,
        loader,
        optimizer=optimizer,
        scheduler=scheduler,
        criterion=criterion,
        accumulation_steps=$accumulation_steps,
        max_norm=$max_norm,
    )
"""
_CLASSES: Mapping[str, str] = {"sgd": "SGD", "adamw": "AdamW"}


def templates() -> Mapping[str, str]:
    """Return the program templates by name (see `template_of`), with `$name` for values of the setting.

    There is one for each mistake, and one for each combination of optional engine features.
    """
    engines = {
        "": _without(_without(_ENGINE, _WITHOUT_LIMIT), _WITHOUT_GROUPS),
        "limit": _without(_ENGINE, _WITHOUT_GROUPS),
        "ghost": _without(_ENGINE, _WITHOUT_LIMIT),
        "ghost limit": _ENGINE,
    }
    loops = {name: _LOOP.replace("$source", source_of(name)) for name in MISTAKES}
    return engines | {
        name: text.replace("$max_norm", "1.0" if name == "clip_each" else 'float("inf")')
        for name, text in loops.items()
    }


def as_python(setting: PlaygroundSetting) -> str:
    """Return a complete program that prints the loss of each step; the losses are bitwise equal to `run(setting)`."""
    return Template(templates()[template_of(setting)]).substitute(values_of(setting))


def template_of(setting: PlaygroundSetting) -> str:
    """Return the name of the template for a setting."""
    needs = ["ghost"] * (setting.norm_policy == "ghost") + ["limit"] * (setting.memory_limit_kib > 0)
    return setting.mistake or " ".join(needs)


def _without(text: str, replacements: Mapping[str, str]) -> str:
    for part, rest in replacements.items():
        assert part in text
        text = text.replace(part, rest)
    return text


def as_command(setting: PlaygroundSetting) -> str:
    """Return a command line for the setting, without default values."""
    default = PlaygroundSetting()
    changed = [
        f"{field.name}={getattr(setting, field.name)}"
        for field in fields(setting)
        if getattr(setting, field.name) != getattr(default, field.name)
    ]
    return " ".join(["python -m anybatch_guide.play", *changed])


def values_of(setting: PlaygroundSetting) -> Mapping[str, str]:
    """Return the values to fill into a template, by name."""
    values = {field.name: str(getattr(setting, field.name)) for field in fields(setting)}
    return {
        **values,
        "effective_batch_size": str(setting.effective_batch_size),
        "cut": setting.cut,
        "launch": "python" if setting.ranks == 1 else f"torchrun --nproc-per-node {setting.ranks}",
        "norms": f"Ghost({GHOST_SAMPLES})" if setting.norm_policy == "ghost" else f'"{setting.norm_policy}"',
        "limit": f"{setting.memory_limit_kib} * 2**10",
        "optimizer_class": _CLASSES[setting.optimizer],
    }
