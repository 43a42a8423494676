"""`anybatch init`: write a recipe that runs as it is, to be changed line by line."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.parser import Parser
from anybatch.cli.status import Status
from anybatch.errors import UserError

TEMPLATE = '''\
"""A recipe: `anybatch train {file}` runs it. Change one line at a time; it keeps running."""

import torch

import anybatch as ab


def loss(model, batch):  # an ordinary loss: the mean over the samples it is given
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def dataset():  # anything with __getitem__ and __len__, or an iterable
    inputs = torch.linspace(-3, 3, 1000)[:, None]
    return torch.utils.data.TensorDataset(inputs, torch.sin(inputs))


def job():
    return ab.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)),
        optimizer=torch.optim.AdamW,  # a function of (named parameters, learning rate)
        loss=ab.mean_over_samples(loss),  # says what the loss is a mean over: this makes every cut exact
        dataset=dataset,
        evaluate=ab.Evaluation(dataset=dataset),  # better: data that is not trained on
        defaults=ab.Defaults(effective_batch_size=100, learning_rate=3e-3, epochs=20),
    )
'''


def run(words: Sequence[str]) -> int:
    """Write a recipe to a new file; return the exit status."""
    parser = Parser("init", "Write a recipe of about 20 lines that runs as it is.")
    parser.add_argument("file", type=Path, metavar="FILE.py", help="where to; must not exist")
    file = parser.parse(words).file
    write_recipe(file)
    sys.stdout.write(f"wrote {file}. Run it: anybatch train {shlex.quote(str(file))}\n")
    return Status.DONE


def write_recipe(file: Path) -> None:
    """Write the recipe.

    Raises:
        UserError: the file exists, its folder does not, or its name is none that Python can import.
    """
    if file.suffix != ".py" or not file.stem.isidentifier():
        message = f"{file.name!r} must be a name that Python can import, such as train.py: letters, digits, _ and .py."
        raise UserError(message)
    try:
        # "x" refuses an existing file, even one that was made a moment ago.
        with file.open("x", encoding="utf-8") as opened:
            opened.write(TEMPLATE.replace("{file}", file.name))
    except FileExistsError:
        message = f"{file} exists and is left as it is. Name another file."
        raise UserError(message) from None
    except FileNotFoundError:
        message = f"there is no folder {file.parent} to write {file.name} into. Make it first."
        raise UserError(message) from None
