"""Runs a user's loop on the probe model, as a user would call it, and restores all global state."""

import inspect
import io
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.data.random_state import preserved_random_state
from anybatch.diagnostics.loop_check.cuda_on_cpu import cuda_on_cpu
from anybatch.diagnostics.loop_check.loop_trace import LoopTrace, numbers_in
from anybatch.diagnostics.loop_check.probe_model import ProbeData, ProbeLoader, RowModel, RowSet
from anybatch.diagnostics.loop_check.recorder import Recorder
from anybatch.diagnostics.loop_check.roles import AskedSettings, LoopParameters
from anybatch.errors import UserError
from anybatch.parallel.torch_internals import HashStore

LearningLoop = Callable[..., Any]
QUIET_GAIN, LOUD_GAIN = 2.0**-20, 2.0**20
"""Gradients that no clipping would touch, and gradients that every clipping would."""


class LoopFailedError(UserError):
    """The loop itself raised; the message has its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """One run of a loop.

    Attributes:
        data: the samples.
        ids: those that the loader or data set holds, on this rank where the loop gets a loader.
        micro_batch_size: samples of one batch of the loader.
        accumulation_steps: given to the loop, where it has a parameter for them.
        num_epochs: how often it goes through them, in one call or in several.
        gain: size of the gradients.
        loss_scale: of gradient scalers, the loop's own ones too.
        seed: of what the loop draws.
        time_limit_seconds: after so long it is ended.
    """

    data: ProbeData
    ids: Sequence[int]
    micro_batch_size: int
    accumulation_steps: int
    num_epochs: int
    gain: float = QUIET_GAIN
    loss_scale: float = 1.0
    seed: int = 0
    time_limit_seconds: float = 20.0


def run_loop(function: LearningLoop, needs: LoopParameters, settings: LoopSettings) -> LoopTrace:
    """Run a loop, and return its trace.

    A function that knows no number of epochs is called once for each, with the same model and optimizer.

    Raises:
        LoopFailedError: the loop raised.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = None if code is None else code.co_filename  # a callable object has no code, and its lines are not named then
    recorder = Recorder(file, settings.gain, settings.time_limit_seconds, settings.num_epochs)
    # A loop without a number of epochs is one epoch, so it is called once for each.
    num_calls = 1 if "epochs" in needs or "max_steps" in needs else settings.num_epochs
    with state_kept(), redirect_stdout(io.StringIO()), cuda_on_cpu(settings.loss_scale):
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)
        model = RowModel(settings.data, settings.gain, recorder)
        table = model.table
        values = _arguments_by_role(model, settings, recorder, wrapped=needs.wrapped)
        with recorder:
            recorder.watch(table, [values["optimizer"]] if "optimizer" in needs else [])
            for call in range(num_calls):
                bound = needs.bind(function, {**values, "epoch": call})
                value = _call(function, bound.args, bound.kwargs)
                recorder.end_call()
                recorder.trace.returned = numbers_in(value)
    return recorder.trace


def _arguments_by_role(
    model: nn.Module, settings: LoopSettings, recorder: Recorder, *, wrapped: bool
) -> dict[str, Any]:
    """Return the argument for each role."""
    # Any learning rate will do: the outputs of the probe model do not depend on the values of its parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ProbeLoader(settings.data, settings.ids, settings.micro_batch_size, recorder)
    num_windows = -(-len(loader) // settings.accumulation_steps)
    grouped = dist.is_initialized()
    values = {
        "model": DistributedDataParallel(model) if wrapped else model,
        "loader": loader,
        "batch_function": loader.next_batch,
        "dataset": RowSet(settings.data, settings.ids),
        "optimizer": optimizer,
        "accumulation_steps": settings.accumulation_steps,
        "criterion": nn.MSELoss() if settings.data.kind == "values" else nn.CrossEntropyLoss(),
        # It falls with every step, so that a schedule that runs too fast is seen.
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
        "scaler": torch.amp.GradScaler("cpu"),
        "device": torch.device("cpu"),
        "epochs": settings.num_epochs,
        "max_steps": num_windows * settings.num_epochs,
        "micro_batch_size": settings.micro_batch_size,
        "max_norm": 1.0,
        "rank": dist.get_rank() if grouped else 0,
        "world_size": dist.get_world_size() if grouped else 1,
    }
    return {**values, "settings": AskedSettings(values, recorder.trace.guesses)}


def _call(function: LearningLoop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 (the user's)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says it better than the user's own loop can
            return function(*args, **kwargs)
    except SystemExit as error:
        if error.code in (None, 0):  # a script that ends itself has come to its end
            return None
        message = f"the loop ended its program with {error.code!r}"
        raise LoopFailedError(message) from None
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the loop's own, and is shown)
        trace = error.__traceback__
        # Without the frame of this function, the traceback begins in the user's loop.
        lines = traceback.format_exception(type(error), error, None if trace is None else trace.tb_next)
        raise LoopFailedError("".join(lines).rstrip()) from None


@contextmanager
def group_of_one() -> Iterator[None]:
    """Be the only rank of a process group, so that a loop for several ranks can be run alone.

    Raises:
        UserError: this process is a rank already.
    """
    if dist.is_initialized():
        message = "check_loop starts ranks of its own: call it in a process that has not joined a process group."
        raise UserError(message)
    # In memory: a group of one rank needs no port.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def state_kept() -> Iterator[None]:
    """Put back the random states and settings of torch and Python that a loop may change."""
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        # The caller may be within `no_grad`, where no backward runs.
        with preserved_random_state(), torch.enable_grad():
            yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
