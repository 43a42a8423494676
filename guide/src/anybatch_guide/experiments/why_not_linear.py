"""Why two ranks are not twice as fast: the parts of a step on the digits recipe, and possible improvements."""

from anybatch.core.run_config import RunConfig
from anybatch.diagnostics.scaling.measure import RunSettings
from anybatch.diagnostics.scaling.scale import measure_scaling
from anybatch.recipes.load import MeasuredJob
from anybatch_guide.experiment import Data, Emit, Experiment

RECIPE, EFFECTIVE, MICRO = "digits", 64, 8


def run(emit: Emit) -> Data:
    """Measure a recipe on one rank and on two."""
    emit({"kind": "guide.progress", "done": 0, "of": 1, "what": "steps, interleaved"})
    job = MeasuredJob(recipe=RECIPE, config=RunConfig(effective_batch_size=EFFECTIVE))
    report = measure_scaling(
        job.train_spec, job.data, settings=RunSettings(micro_batch_size=MICRO), most_seconds=10.0, num_cores=2
    )
    return {"recipe": RECIPE, "effective_batch_size": EFFECTIVE, "report": report.as_json(), "text": str(report)}


EXPERIMENT = Experiment(
    name="why_not_linear",
    question="Why are two ranks not twice as fast, and which changes would make them faster?",
    run=run,
    seconds=30,
    runs_here=False,
    noisy=("report", "text"),
)
