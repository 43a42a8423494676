"""Runs a loop on the probe model, as a user would call it. Only for processes that do nothing else."""

import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from anybatch.data.random_state import seed_generators
from anybatch.diagnostics.loop_check.parameters import GuessedSettings, LoopParameters
from anybatch.diagnostics.loop_check.probe import ProbeData, ProbeLoader, RowModel, TargetKind, make_data
from anybatch.diagnostics.loop_check.recorder import LoopTrace, Recorder, time_limit
from anybatch.errors import LoopError
from anybatch.parallel.launchers import set_launch_variables
from anybatch.parallel.torch_internals import HashStore

MICRO_BATCH_SIZE, ACCUMULATION_STEPS, NUM_EPOCHS, NUM_SAMPLES = 4, 3, 2, 31
"""On one rank and on two, the last micro-batch is smaller than the others, and the last window shorter."""
QUIET_GAIN, LOUD_GAIN = 2.0**-20, 2.0**20
"""Gradients that are never clipped, and gradients that always are."""


@dataclass(frozen=True, slots=True)
class JudgedLoop:
    """A loop, and the data that it runs on."""

    function: Callable[..., Any]
    parameters: LoopParameters
    kind: TargetKind
    dtype: torch.dtype
    time_limit_seconds: float

    @property
    def name(self) -> str:
        """The name of its function."""
        return getattr(self.function, "__name__", "the loop")

    @property
    def place(self) -> tuple[str | None, int | None]:
        """The path of its file, and its first line; a callable object has none."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return (None, None) if code is None else (code.co_filename, code.co_firstlineno)

    @property
    def data(self) -> ProbeData:
        """All samples."""
        return make_data(self.kind, is_padded=not self.parameters.is_stream, dtype=self.dtype)

    @property
    def ids(self) -> range:
        """The samples of an epoch: a loop that asks for one batch at a time has full windows only."""
        window = MICRO_BATCH_SIZE * ACCUMULATION_STEPS
        return range(NUM_SAMPLES // window * window if self.parameters.is_stream else NUM_SAMPLES)

    @property
    def knows_steps(self) -> bool:
        """Whether it has a parameter for accumulation steps."""
        return "accumulation_steps" in self.parameters.needed

    @property
    def takes_loader(self) -> bool:
        """Whether it gets micro-batches, and does not make them from a data set."""
        return bool({"loader", "get_batch"} & self.parameters.needed)

    def run(
        self,
        ids: Sequence[int] | None = None,
        *,
        size: int = MICRO_BATCH_SIZE,
        steps: int = ACCUMULATION_STEPS,
        epochs: int = NUM_EPOCHS,
        gain: float = QUIET_GAIN,
        loss_scale: float = 1.0,
        seed: int = 0,
    ) -> LoopTrace:
        """Run it with micro-batches of a size on some samples (None: all), and return its trace.

        A function without a number of epochs is called once for each.
        """
        needed, recorder = self.parameters.needed, Recorder(self.place[0], gain, epochs)
        torch.set_grad_enabled(True)  # an earlier run may have changed these
        torch.set_default_dtype(torch.float32)
        seed_generators(seed)
        model = RowModel(self.data, gain, recorder)
        loader = ProbeLoader(self.data, self.ids if ids is None else ids, size, recorder)
        with _scaled_by(loss_scale), _CudaIsCpu(), recorder, time_limit(self.time_limit_seconds):
            values = self._values(model, loader, steps, epochs)
            values["settings"] = GuessedSettings(values, recorder.trace.guesses)
            recorder.watch(model.table, [values["optimizer"]] if "optimizer" in needed else [])
            for epoch in range(1 if {"epochs", "max_steps"} & needed else epochs):
                bound = self.parameters.bind(self.function, {**values, "epoch": epoch})
                recorder.trace.returned_loss = _loss_in(_call(self.function, bound))
                recorder.trace.call_ends.append(len(recorder.trace.forwards))
        return recorder.trace

    def _values(self, model: nn.Module, loader: ProbeLoader, steps: int, epochs: int) -> dict[str, Any]:
        """Return the value of each role."""
        # Any learning rate will do: the outputs of the model do not depend on its parameters.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {
            "model": DistributedDataParallel(model) if self.parameters.expects_wrapper else model,
            "loader": loader,
            "get_batch": loader.next_batch,
            "dataset": loader.dataset,
            "optimizer": optimizer,
            "accumulation_steps": steps,
            "criterion": nn.MSELoss() if self.kind == "values" else nn.CrossEntropyLoss(),
            # Falls with every step, so that a schedule that runs too fast is seen.
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
            "scaler": torch.amp.GradScaler("cpu"),
            "device": torch.device("cpu"),
            "epochs": epochs,
            "max_steps": -(-len(loader) // steps) * epochs,
            "micro_batch_size": loader.batch_size,
            "max_norm": 1.0,
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        }


def _call(function: Callable[..., Any], bound: inspect.BoundArguments) -> Any:  # noqa: ANN401 (the user's)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*bound.args, **bound.kwargs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (any error of the user's)
        if isinstance(error, SystemExit) and error.code in {None, 0}:
            return None
        trace = error.__traceback__  # without this frame, it begins in the user's loop
        lines = traceback.format_exception(type(error), error, None if trace is None else trace.tb_next)
        raise LoopError("".join(lines).rstrip(), cause=type(error).__name__) from None


def _loss_in(value: Any) -> float | None:  # noqa: ANN401 (the loop's result)
    """Return the loss that a loop returned: a number, the only one in a sequence, or the only one in a dict by name."""
    if isinstance(value, dict):
        value = [entry for name, entry in value.items() if "loss" in str(name).lower()]
    if isinstance(value, list | tuple) and len(value) == 1:
        return _loss_in(value[0])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number or (isinstance(value, Tensor) and value.numel() == 1) else None


class _CudaIsCpu(TorchFunctionMode):
    """Keeps tensors and modules on the CPU that the loop moves to an accelerator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (the function's result)
        """Run a function of torch with its devices replaced."""
        if func in {Tensor.cuda, Tensor.pin_memory}:
            return args[0]
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:  # noqa: ANN401 (any argument)
    device = str(value) if isinstance(value, str | torch.device) else ""
    return torch.device("cpu") if device.split(":")[0] in {"cuda", "mps", "xpu"} else value


def _scaled_by(loss_scale: float) -> Any:  # noqa: ANN401 (a patch of unittest.mock)
    """Give this scale to all gradient scalers that the loop makes."""
    make = torch.amp.GradScaler.__init__

    def make_on_cpu(scaler: Any, device: str = "cpu", init_scale: float = 0.0, **kwargs: Any) -> None:  # noqa: ANN401, ARG001
        make(scaler, "cpu", loss_scale, **kwargs)

    return mock.patch.object(torch.amp.GradScaler, "__init__", make_on_cpu)


def prepare_process(*, in_group: bool) -> None:
    """Replace functions of torch that need a driver or a launcher; join a process group, so that the loop need not."""

    def nothing(*_args: object, **_kwargs: object) -> int:
        return 0

    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch's compiler, which refuses the functions below
    for name in ("synchronize", "set_device", "reset_peak_memory_stats", "init", "current_device"):
        setattr(torch.cuda, name, nothing)
    if in_group:
        if not dist.is_initialized():  # a loop for several ranks also runs alone, to measure unit gradients
            set_launch_variables(0, 1)
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        vars(dist).update(init_process_group=nothing, destroy_process_group=nothing)
