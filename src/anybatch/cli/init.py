"""`anybatch init`: write a starter recipe that runs as written."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anybatch.cli.command import Parser, print_report
from anybatch.errors import UserError

TEMPLATE = '''\
"""A recipe: run it with `anybatch train {file}`. Change one line at a time."""

import torch

import anybatch as ab


def loss(model, batch):  # an ordinary loss: the mean over the samples of the batch
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def dataset():  # anything with __getitem__ and __len__, or an iterable
    inputs = torch.linspace(-3, 3, 1000)[:, None]
    return torch.utils.data.TensorDataset(inputs, torch.sin(inputs))


def job():
    return ab.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)),
        optimizer=torch.optim.AdamW,  # a function of (named parameters, learning rate)
        loss=ab.mean_over_samples(loss),  # declares what the loss is a mean over, so that every split is exact
        dataset=dataset,
        evaluate=ab.Evaluation(dataset=dataset),  # better: data that is not in the training set
        defaults=ab.RunConfig(effective_batch_size=100, learning_rate=3e-3, epochs=20),
    )
'''


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    """The new file."""

    file: Path

    @property
    def command(self) -> str:
        """The command that runs it."""
        return f"anybatch train {shlex.quote(str(self.file))}"


def run(argv: Sequence[str]) -> int:
    """Write a recipe to a new file; return the exit status."""
    args = make_parser().parse(argv)
    write_recipe(args.file)
    written = WrittenRecipe(args.file)
    return print_report(f"wrote {args.file}. Run it: {written.command}", written, args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    description = "Write a starter recipe that runs as written: a file with a function that returns an ab.Job."
    parser = Parser("init", description)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="file to write; must not exist")
    return parser


def write_recipe(file: Path) -> None:
    """Write the recipe to a new file, whose name must be one that Python can import."""
    if file.suffix != ".py" or not file.stem.isidentifier():
        message = f"{file.name!r} must be a name that Python can import, such as train.py: letters, digits, _ and .py."
        raise UserError(message)
    try:
        # Mode "x" raises if the file exists, even if another program has just created it.
        with file.open("x", encoding="utf-8") as opened:
            opened.write(TEMPLATE.replace("{file}", file.name))
    except FileExistsError:
        message = f"{file} already exists. Choose another name."
        raise UserError(message) from None
    except FileNotFoundError:
        message = f"folder {file.parent} does not exist. Create it first."
        raise UserError(message) from None
