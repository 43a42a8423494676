"""The playground: a run of the engine, or of a loop with a mistake, streamed to the page."""

from collections.abc import Callable
from contextlib import closing, suppress

from anybatch.errors import DataError
from anybatch_guide.experiment import Data, Emit
from anybatch_guide.held_out import HeldOut
from anybatch_guide.lines import RecordLines
from anybatch_guide.loop_watch import LoopWatch
from anybatch_guide.micro_batch_view import MicroBatchView
from anybatch_guide.native_batch import first_step, first_update_difference, reference_run
from anybatch_guide.programs import as_command, as_python
from anybatch_guide.rank_processes import RankProcesses
from anybatch_guide.run_metrics import RunMetrics
from anybatch_guide.setting import PlaygroundSetting, SettingError, parse_setting
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, load
from anybatch_guide.training import RUN_ENDS, Parts, isolated, make, run_engine, run_loop

__all__ = ["PlaygroundSetting", "SettingError", "as_command", "as_python", "parse_setting", "run", "warm"]


def run(
    setting: PlaygroundSetting,
    emit: Emit,
    *,
    is_stepped: Callable[[], bool] = lambda: False,
) -> Data:
    """Train with a setting, and emit every micro-batch and step; `emit` may block to pause, or raise to end the run.

    The same loop in plain code; `as_python` returns it as a program with equal losses:

    ```python
    torch.manual_seed(setting.seed)
    engine = ab.Engine(model, optimizer, task.loss, micro_batch_size=setting.micro_batch_size, scheduler=scheduler)
    for batch in ab.batches(task.rows, effective_batch_size=..., steps=setting.steps, seed=setting.seed):
        engine.step(batch)
    ```

    A reference run makes the same steps on one rank, without accumulation, memory limit or BatchNorm policy. Before
    each step, the event `guide.native` has its loss and gradient; after each step, `guide.match` has the relative
    difference between the parameters of both runs, which may grow from rounding alone. After the first step,
    `guide.first_update` has the relative difference between their first updates with SGD: if it exceeds rounding, the
    training differs. At intervals, `guide.evaluation` has the accuracy of both on held-out samples. A loss that is not
    finite, or a memory limit that is too low for any micro-batch, ends the run with the status "failed".
    """
    task = load(setting.task, norm=setting.norm)
    with isolated(), closing(reference_run(setting, task)) as reference:
        held_out = HeldOut(task)
        parts = make(setting, task)
        metrics = RunMetrics(
            setting,
            task,
            model=parts[0],
            reference=reference,
            held_out=held_out,
            lines=RecordLines(emit),
            is_stepped=is_stepped,
        )
        metrics.begin()
        if setting.ranks > 1:
            with RankProcesses(setting) as ranks:
                metrics.first_difference = first_update_difference(setting, task, ranks.first_step())
                ranks.run(metrics, parts[0])
        else:
            metrics.first_difference = first_update_difference(setting, task, first_step(setting, task))
            with suppress(*RUN_ENDS):
                (_run_loop if setting.mistake else run_engine)(setting, task, metrics, parts)
        return metrics.data()


def warm() -> None:
    """Load the slow imports (scikit-learn has the images), and make one step."""
    # Without scikit-learn, skip the warm-up.
    with suppress(DataError):
        run(PlaygroundSetting(micro_batch_size=1, accumulation_steps=1, steps=1), lambda _: None)


def _run_loop(setting: PlaygroundSetting, task: PlaygroundTask, metrics: RunMetrics, parts: Parts) -> None:
    """Run a hand-written loop epoch after epoch, until it has made the requested steps."""
    model, optimizer, _ = parts
    loader = MicroBatches(task.rows, setting.micro_batch_size, setting.seed)
    with (
        closing(MicroBatchView(model, task, metrics, steps=setting.steps)) as view,
        LoopWatch(setting, model=model, optimizer=optimizer, metrics=metrics, view=view) as watch,
    ):
        while not watch.is_done:
            run_loop(setting, parts, loader, watch.criterion)
