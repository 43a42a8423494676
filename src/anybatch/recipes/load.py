"""Finds the `Job` of a name: a built-in recipe, a function in a file, or a function in a module."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType, TracebackType
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

SMALLEST_RECIPE = """\
import torch
import anybatch as ab


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch), 2 * batch)


def job():
    return ab.Job(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )
"""

_JOB_NAMES = ("job", "recipe")


@dataclass(frozen=True, slots=True)
class _FunctionKind:
    """A kind of function to look for, for messages: its name, its places, its purpose."""

    noun: str
    known: str
    does: str


_PLACES = "a file (file.py:function) or a module (package.module:function)"
_RECIPE = _FunctionKind("recipe", f"A recipe is one of {', '.join(map(repr, RECIPES))}, {_PLACES}", "returns an ab.Job")


def load_recipe(name: str) -> Job:
    """Return the job with this name.

    Like `python file.py`, this puts the file's folder (or the working directory, for a module) at the front of
    `sys.path` and leaves it there, so that later imports of the job's functions and of workers find the same modules.

    Args:
        name: a built-in recipe ("digits", "text", "contrastive", "finetune"), "file.py:function" or
            "package.module:function". Without ":function", the only function that is called `job` or `recipe` or is
            annotated to return a `Job`.

    Raises:
        UserError: the recipe does not exist, importing or calling it fails (with the traceback from the user's own
            file), or it does not return a `Job`.
    """
    place, function_name = _split(RECIPES.get(name, name))
    module = _import_place(place, _RECIPE)
    function = _named(module, function_name, place, _RECIPE) if function_name else _only_one(module, place)
    where = f"{function.__name__} of {place}"
    needed = _needed_arguments(function)
    if needed:
        message = (
            f"{where} needs the arguments {', '.join(needed)}, but a recipe is called without arguments. Give them "
            f"defaults, or choose a function that passes them: def job(): return {function.__name__}(...)"
        )
        raise UserError(message, code="needs_arguments")
    with _users_traceback(f"calling {where} failed"):
        job = function()
    if not isinstance(job, Job):
        message = (
            f"{where} returned {type(job).__name__}; a recipe returns an ab.Job. The smallest recipe is:\n\n"
            f"{SMALLEST_RECIPE}"
        )
        raise UserError(message, code="not_a_job")
    return job


def load_function(name: str, noun: str, does: str) -> Callable[..., Any]:
    """Return the function with this name, imported as by `load_recipe`, without calling it.

    Args:
        name: "file.py:function" or "package.module:function", or ":Class.method"; without it, the only function there.
            A file that does not define the function is refused before it is run.
        noun: name for such a function in messages.
        does: its task, as a verb in the third person.

    Raises:
        UserError: the function does not exist, or importing it fails.
    """
    sought = _FunctionKind(noun, f"A {noun} is in {_PLACES}", does)
    place, function_name = _split(name)
    if function_name and _is_file_name(place):
        _refuse_undefined(Path(place), function_name, sought)
    module = _import_place(place, sought)
    if "." in function_name:
        owner, _, method = function_name.rpartition(".")
        return method_of(cast("type", _named(module, owner, place, sought)), method)
    if function_name:
        return _named(module, function_name, place, sought)
    functions = _functions(module)
    if len(functions) == 1:
        return next(iter(functions.values()))
    message = f"which function of {place} is the {noun}? Choose one: {place}:function. {_listed(functions)}"
    raise UserError(message, code="which_function")


def method_of(owner: type, name: str) -> Callable[..., Any]:
    """Return a method as a function that also accepts the arguments of its class.

    A new object is made only when those arguments change, so it lives for one run of the loop.
    """
    method = inspect.getattr_static(owner, name)
    if isinstance(method, staticmethod | classmethod):
        bound: Callable[..., Any] = getattr(owner, name)
        return bound
    of_class = inspect.signature(owner).parameters
    of_method = dict(list(inspect.signature(method).parameters.items())[1:])
    last: list[tuple[dict[str, Any], Any]] = []

    @functools.wraps(method)
    def loop(**given: Any) -> Any:  # noqa: ANN401 (the method's result)
        arguments = {key: given[key] for key in of_class if key in given}
        if not last or any(last[0][0].get(key) is not value for key, value in arguments.items()):
            last[:] = [(arguments, owner(**arguments))]
        return getattr(last[0][1], name)(**{key: given[key] for key in of_method if key in given})

    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in {**of_class, **of_method}.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    loop.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return loop


def _import_place(place: str, sought: _FunctionKind) -> ModuleType:
    """Import a file or a module."""
    return _import_file(Path(place), sought) if _is_file_name(place) else _import_module(place, sought)


def _split(name: str) -> tuple[str, str]:
    """Split "place:function", ignoring the colon of a Windows drive."""
    place, _, function = name.rpartition(":")
    is_name = all(part.isidentifier() for part in function.split("."))
    return (place, function) if place and is_name else (name, "")


def _is_file_name(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _import_file(path: Path, sought: _FunctionKind) -> ModuleType:
    """Import a file under its own name, so that worker processes can find its definitions."""
    if not path.is_file():
        message = f"there is no file {str(path)!r} (looked in {Path.cwd()}). {sought.known}."
        raise UserError(message, code="no_file")
    path, name = path.resolve(), path.stem
    _find_first(path.parent)
    loaded = sys.modules.get(name)
    # Workers import by name, so two files of one name would replace each other.
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
        message = (
            f"{path.name} cannot be imported as {name!r}: a module of that name is already loaded, from "
            f"{getattr(loaded, '__file__', None) or 'Python itself'}. Rename the file."
        )
        raise UserError(message, code="name_is_taken")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        message = f"{str(path)!r} is not a Python source file: its name must end in .py. {sought.known}."
        raise UserError(message, code="not_python")
    module = importlib.util.module_from_spec(spec)
    # Registered before execution, as Python does: dataclasses and pickling look the module up.
    sys.modules[name] = module
    try:
        with _users_traceback(f"importing {path} failed"):
            spec.loader.exec_module(module)
    # A module that failed half-way must not be found by the next import.
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str, sought: _FunctionKind) -> ModuleType:
    _find_first(Path.cwd())
    with _users_traceback(f"importing {name} failed"):
        if not all(part.isidentifier() for part in name.split(".")) or _is_missing(name):
            message = f"there is no {sought.noun} and no module {name!r}. {sought.known}."
            raise UserError(message, code="unknown_recipe")
        return importlib.import_module(name)


def _is_missing(name: str) -> bool:
    """Return whether the module, or a package around it, cannot be found."""
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return True
        raise  # the module exists, but a package around it imports a missing one


def _refuse_undefined(path: Path, name: str, sought: _FunctionKind) -> None:
    """Refuse a file that cannot define a function or a class's method, without running it."""
    if not path.is_file():
        return  # the import raises the error
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    # Names may also come from an import or assignment; a star import may define anything.
    for part in name.split("."):
        body = tree.body
        if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in body):
            return
        named = {getattr(node, "name", ""): node for node in body}
        words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        words |= {
            alias.asname or alias.name
            for node in ast.walk(tree)
            for alias in getattr(node, "names", ())
            if isinstance(alias, ast.alias)
        }
        if part not in named and part not in words:
            functions = [each for each, node in named.items() if isinstance(node, ast.FunctionDef) and each[:1] != "_"]
            has = f"It has: {', '.join(sorted(functions))}." if functions else "It defines no functions."
            message = f"{path} has no {sought.noun} {name!r}, and was not run. {has}"
            raise UserError(message, code="no_function")
        if not isinstance(node := named.get(part), ast.ClassDef) or node.bases:
            return  # inherited methods are not visible here
        tree = ast.Module(node.body, [])


def _find_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _named(module: ModuleType, name: str, place: str, sought: _FunctionKind) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        message = f"{place} has no function {name!r}. {_listed(_functions(module))}"
        raise UserError(message, code="no_function")
    if not callable(function):
        message = (
            f"{name} of {place} is an object of type {type(function).__name__}; a {sought.noun} is a function that "
            f"{sought.does}. {_listed(_functions(module))}"
        )
        raise UserError(message, code="not_a_function")
    return cast("Callable[..., Any]", function)


def _only_one(module: ModuleType, place: str) -> Callable[..., Any]:
    """Return the only function that qualifies."""
    functions = _functions(module)
    likely = {name: function for name, function in functions.items() if name in _JOB_NAMES or _returns_job(function)}
    ready = {name: function for name, function in likely.items() if not _needed_arguments(function)}
    # A function without required arguments takes precedence.
    found = ready or likely
    if len(found) == 1:
        return next(iter(found.values()))
    what = "several functions may be" if found else "no function is called 'job' or 'recipe', or annotated '-> Job', as"
    message = f"in {place} {what} the recipe. Choose one: {place}:function. {_listed(found or functions)}"
    raise UserError(message, code="which_function")


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions that the module itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _returns_job(function: Callable[..., Any]) -> bool:
    """Return whether the annotation is `Job`, also as text, and with or without its module."""
    # Annotations are text under `from __future__ import annotations`, perhaps with quotes inside.
    annotation = getattr(function, "__annotations__", {}).get("return")
    return annotation is Job or (isinstance(annotation, str) and annotation.strip("'\"").rpartition(".")[2] == "Job")


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def _listed(functions: Mapping[str, Callable[..., Any]]) -> str:
    return f"It has: {', '.join(sorted(functions))}." if functions else "It defines no functions."


@contextmanager
def _users_traceback(what: str) -> Iterator[None]:
    """Convert an error of the user's code to one with the user's part of the traceback; anybatch's pass unchanged."""
    try:
        yield
    except AnyBatchError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code may raise anything)
        lines = traceback.format_exception(type(error), error, _user_frames(error.__traceback__))
        # `from None`: the message has the relevant part of the traceback.
        message = f"{what}:\n\n{''.join(lines).rstrip()}"
        raise UserError(message, code="user_code") from None


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the top frames of this file and of Python's import system."""
    ours = (__file__, importlib.__file__)
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in ours and not file.startswith("<frozen importlib"):
            return trace
        trace = trace.tb_next
    return None


_SMALL = 1e-6
"""Factor of the learning rate: repeated steps on one batch may diverge at the full rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """A recipe with settings that replace its defaults; can be pickled."""

    recipe: str
    config: RunConfig = dataclasses.field(default_factory=RunConfig)

    def train_spec(self) -> TrainSpec:
        """Build the `TrainSpec`, with a learning rate at which parameters hardly move."""
        job = load_recipe(self.recipe)
        assert job.defaults.learning_rate is not None
        return job.train_spec(
            seed=self.config.seed or 0,
            learning_rate=_SMALL * job.defaults.learning_rate,
            effective_batch_size=self._size(job),
            precision=self.config.precision,
        )

    def data(self, *, steps: int) -> Callable[[int], Batches]:
        """Return a function that maps a number of loading processes to the first `steps` effective batches.

        The data set is made once, here.
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
        return self.config.over(job.defaults).largest_batch_size
