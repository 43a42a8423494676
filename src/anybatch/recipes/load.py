"""Loads a `Job` by name: a built-in recipe, a function in a file, or a function in a module."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, cast

from anybatch.core.run_config import RunConfig
from anybatch.data.batches import Batches
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import AnyBatchError, UserError
from anybatch.recipes.job import Job

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "digits": "anybatch.recipes.digits:digits",
        "text": "anybatch.recipes.text:text",
        "contrastive": "anybatch.recipes.contrastive:contrastive",
        "finetune": "anybatch.recipes.finetune:finetune",
    }
)


def load_recipe(name: str) -> Job:
    """Return the job with this name.

    Like `python file.py`, this puts the file's folder (or the working directory, for a module) at the front of
    `sys.path` and leaves it there, so that later imports by the job's functions and by workers find the same modules.

    Args:
        name: a built-in recipe ("digits", "text", "contrastive", "finetune"), "file.py:function" or
            "package.module:function". Without ":function", the function `job`, or the only function that can be called
            without arguments.

    Raises:
        UserError: the recipe does not exist, needs arguments, or does not return a `Job`. Errors of its own code
            propagate unchanged.
    """
    source, function_name = _split(RECIPES.get(name, name))
    function = _function(_import_source(source, "recipe"), function_name, source, "recipe")
    where = f"{function.__name__} of {source}"
    if needed := _needed_arguments(function):
        message = (
            f"{where} needs the arguments {', '.join(needed)}, but a recipe is called without arguments. Give them "
            f"defaults, or choose a function that passes them: def job(): return {function.__name__}(...)"
        )
        raise UserError(message, code="needs_arguments")
    job = function()
    if not isinstance(job, Job):
        message = (
            f"{where} returned {type(job).__name__}; a recipe returns an ab.Job. `anybatch init train.py` writes one."
        )
        raise UserError(message, code="not_a_job")
    return job


def load_function(name: str, noun: str) -> Callable[..., Any]:
    """Return the function with this name, imported as by `load_recipe`, without calling it.

    Args:
        name: "file.py:function" or "package.module:function"; without ":function", the only function in it. A file
            that does not contain the function's name is refused before it is run.
        noun: word for such a function in messages, such as "loop".

    Raises:
        UserError: the function does not exist, or importing it fails; the message has the traceback.
    """
    source, function_name = _split(name)
    file = Path(source)
    if _is_file_name(source) and file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b{function_name}\b|import \*", text):
            message = f"{source} has no {noun} {function_name!r}, and was not run. Check the name."
            raise UserError(message, code="no_function")
    try:
        module = _import_source(source, noun)
    except AnyBatchError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 (the user's code may raise anything)
        message = f"importing {source} failed:\n\n{traceback.format_exc().rstrip()}"
        raise UserError(message, code="user_code") from None
    return _function(module, function_name, source, noun)


def _split(name: str) -> tuple[str, str]:
    """Split "source:function", ignoring the colon of a Windows drive."""
    source, _, function = name.rpartition(":")
    return (source, function) if source and function.isidentifier() else (name, "")


def _is_file_name(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _import_source(source: str, noun: str) -> ModuleType:
    """Import a file or a module."""
    forms = "file.py:function or package.module:function"
    known = f"A recipe is one of {', '.join(RECIPES)}, {forms}." if noun == "recipe" else f"Pass {forms}."
    if _is_file_name(source):
        return _import_file(Path(source), known)
    _find_first(Path.cwd())
    if not all(part.isidentifier() for part in source.split(".")) or _is_missing(source):
        message = f"there is no {noun} and no module {source!r}. {known}"
        raise UserError(message, code="unknown_recipe")
    return importlib.import_module(source)


def _import_file(path: Path, known: str) -> ModuleType:
    """Import a file under its own name, so that worker processes can find its definitions."""
    if not path.is_file():
        message = f"there is no file {str(path)!r} (looked in {Path.cwd()}). {known}"
        raise UserError(message, code="no_file")
    path, name = path.resolve(), path.stem
    _find_first(path.parent)
    loaded = sys.modules.get(name)
    # Workers import by name, so two files with the same name would replace each other.
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file == str(path):
            return loaded
        message = (
            f"{path.name} cannot be imported as {name!r}: a module with this name is already loaded from "
            f"{file or 'Python itself'}. Rename the file."
        )
        raise UserError(message, code="name_is_taken")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        message = f"{str(path)!r} is not a Python source file: its name must end in .py. {known}"
        raise UserError(message, code="not_python")
    module = importlib.util.module_from_spec(spec)
    # Registered before execution, as Python does, because dataclasses and pickle look up the module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    # The next import must not find a module that failed half-way.
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_missing(name: str) -> bool:
    """Return whether the module, or a package around it, cannot be found."""
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return True
        raise  # the module exists, but a package around it imports a missing module


def _find_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _function(module: ModuleType, name: str, source: str, noun: str) -> Callable[..., Any]:
    """Return the function with this name; without a name the only function, or for a recipe preferably `job`."""
    # Public functions that are defined in this module.
    functions: dict[str, Callable[..., Any]] = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    listed = f"It has: {', '.join(sorted(functions))}." if functions else "It defines no functions."
    if name:
        function = getattr(module, name, None)
        if not callable(function):
            message = f"{source} has no function {name!r}. {listed}"
            raise UserError(message, code="no_function")
        return cast("Callable[..., Any]", function)
    free = {key: value for key, value in functions.items() if not _needed_arguments(value)}
    named = {key: value for key, value in functions.items() if key == "job"}
    for found in (named, functions, free) if noun == "recipe" else (functions,):
        if len(found) == 1:
            return next(iter(found.values()))
    message = f"{source} has several functions that could be the {noun}. Choose one: {source}:function. {listed}"
    raise UserError(message, code="which_function")


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


_RATE_FACTOR = 1e-6
"""Factor that reduces the learning rate, because repeated steps on one batch may diverge at the full rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """A recipe with settings that replace its defaults; picklable, so that ranks can build the job."""

    recipe: str
    config: RunConfig = dataclasses.field(default_factory=RunConfig)

    def train_spec(self) -> TrainSpec:
        """Return a new `TrainSpec`, with a learning rate at which parameters hardly change."""
        job = load_recipe(self.recipe)
        assert job.defaults.learning_rate is not None
        return job.train_spec(
            seed=self.config.seed or 0,
            learning_rate=_RATE_FACTOR * job.defaults.learning_rate,
            effective_batch_size=self._size(job),
            precision=self.config.precision,
        )

    def data(self, *, steps: int) -> Callable[[int], Batches]:
        """Return a function of the number of loading processes that returns the first `steps` effective batches.

        The data set is created once, in this call.
        """
        job = load_recipe(self.recipe)
        dataset = job.dataset()
        return lambda num_workers: job.train_batches(
            dataset,
            effective_batch_size=self._size(job),
            steps=steps,
            seed=self.config.seed or 0,
            num_workers=num_workers,
        )

    def _size(self, job: Job) -> int:
        return self.config.with_defaults(job.defaults).largest_batch_size
