"""Starting a run from a job: the source of each setting and their order."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import anybatch as ab
from anybatch.core.run_config import RunConfig
from anybatch.core.schedules import BatchRamp
from anybatch.errors import AnyBatchWarning, BatchSizeError, DataError, UserError
from anybatch.recipes.start import LEARNED, JobRun, resolve_settings, start
from tests.raising import raises


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance from twice the input."""
    return nn.functional.mse_loss(model(batch), 2 * batch)


JOB = ab.Job(
    model=lambda: nn.Linear(1, 1),
    optimizer=torch.optim.SGD,
    loss=ab.mean_over_samples(loss),
    dataset=lambda: torch.arange(10.0)[:, None] / 10,
    defaults=ab.RunConfig(effective_batch_size=4, learning_rate=0.1, base_batch_size=2, epochs=2),
)


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1)


class Unheard(torch.optim.Optimizer):
    """An optimizer without a known scaling rule."""

    def __init__(self, parameters: object, rate: float) -> None:
        super().__init__(parameters, {"lr": rate})  # type: ignore[arg-type]


def parameters_of(run: JobRun) -> dict[str, torch.Tensor]:
    """Return copies of the parameters of a run's model."""
    assert isinstance(run.engine.model, nn.Module)
    return {name: parameter.detach().clone() for name, parameter in run.engine.model.named_parameters()}


def rates_of(run: JobRun) -> list[float]:
    """Return the learning rate of each step of a run."""
    return [float(run.engine.step(batch).learning_rates[0]) for batch in run.batches]


def test_a_run_equals_the_plain_loop() -> None:
    """Model, data, learning rate and number of steps match a hand-written loop."""
    torch.manual_seed(3)
    plain, data = nn.Linear(1, 1), JOB.dataset()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1 * 4 / 2)
    for batch in ab.batches(data, effective_batch_size=4, epochs=2, seed=3):
        optimizer.zero_grad()
        loss(plain, data[list(batch.sample_ids)]).backward()
        optimizer.step()
    run = start(JOB, RunConfig(seed=3, micro_batch_size=3))
    assert len(rates_of(run)) == 6
    torch.testing.assert_close(parameters_of(run), dict(plain.named_parameters()))


def test_given_values_override_the_defaults() -> None:
    """Explicit batch size, learning rate and steps override the defaults; the rate is still scaled."""
    run = start(JOB, RunConfig(effective_batch_size=8, learning_rate=0.01, steps=3))
    assert run.batches.effective_batch_size == 8
    assert rates_of(run) == pytest.approx([0.01 * 8 / 2] * 3)
    assert str(run.rates[0]) == "lr 0.04 = 0.01 x 4 (linear, 8 / 2 samples)"


def test_the_learning_rate_follows_what_a_step_sees() -> None:
    """If steps are larger than the data set, the rate is scaled to the size of the data set, with a warning."""
    run = start(JOB, RunConfig(effective_batch_size=4000))
    with pytest.warns(AnyBatchWarning):
        assert rates_of(run) == pytest.approx([0.1 * 10 / 2] * 2)
    assert run.engine.decisions["samples"].startswith("steps of 10 samples (the whole data set) instead of 4,000")
    assert "samples" not in start(JOB).engine.decisions
    same = dataclasses.replace(JOB.defaults, effective_batch_size=100, base_batch_size=100)
    assert start(dataclasses.replace(JOB, defaults=same, optimizer=Unheard)).rates[0].factor == 1.0


def test_the_rate_is_scaled_only_with_a_base_batch_size() -> None:
    """Without a base batch size the learning rate is not scaled, for any optimizer."""
    defaults = ab.RunConfig(effective_batch_size=4, learning_rate=0.1)
    assert start(dataclasses.replace(JOB, defaults=defaults, optimizer=Unheard)).rates[0].factor == 1.0
    named = dataclasses.replace(JOB.defaults, learning_rate_rule="none")
    assert start(dataclasses.replace(JOB, defaults=named, optimizer=Unheard)).rates[0].factor == 1.0
    with pytest.raises(UserError):
        start(dataclasses.replace(JOB, optimizer=Unheard))


def test_the_scheduler_starts_from_the_scaled_rate_and_knows_the_length() -> None:
    """The learning rates match torch's scheduler with the scaled rate and the run's number of steps."""
    run = start(dataclasses.replace(JOB, scheduler=CosineAnnealingLR))
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.2)
    scheduler = CosineAnnealingLR(plain, T_max=6)
    expected = []
    for _ in range(6):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert rates_of(run) == pytest.approx(expected)


def test_a_job_is_evaluated_by_its_averaged_weights() -> None:
    """With an average, metrics use the averaged weights, which follow the formula at every step."""
    held_out = ab.Evaluation(dataset=lambda: torch.ones(1, 1), metric=lambda model, batch: model(batch)[:, 0])
    run = start(dataclasses.replace(JOB, evaluate=held_out), RunConfig(average_decay=0.5))
    average = parameters_of(run)
    for batch in run.batches:
        run.engine.step(batch)
        average = {name: 0.5 * average[name] + 0.5 * value for name, value in parameters_of(run).items()}
    expected = float(sum(value.sum() for value in average.values()))
    assert next(iter(run.evaluate().values())) == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(float(sum(value.sum() for value in parameters_of(run).values())), rel=1e-3)


def test_evaluation_is_over_all_held_out_samples_once() -> None:
    """The metric is a mean over the held-out data, with the job's collate function; None means the loss."""

    def value(_: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": batch.squeeze(1)}

    held_out = ab.Evaluation(dataset=lambda: [1.0, 2.0, 6.0], metric=value, effective_batch_size=2)
    job = dataclasses.replace(JOB, evaluate=held_out, collate=lambda samples: torch.tensor(samples).reshape(-1, 1))
    assert start(job).evaluate() == {"mean": 3.0}
    by_loss = dataclasses.replace(job, evaluate=dataclasses.replace(held_out, metric=None))
    assert set(start(by_loss).evaluate()) == {"loss"}
    assert start(JOB).evaluate() == {}


def test_streams() -> None:
    """A job on an iterable dataset needs shuffle=False, and its scheduler the number of steps."""
    defaults = dataclasses.replace(JOB.defaults, epochs=None)
    job = dataclasses.replace(JOB, dataset=Endless, shuffle=False, defaults=defaults)
    assert len(rates_of(start(job, RunConfig(steps=2)))) == 2
    scheduled = dataclasses.replace(job, scheduler=CosineAnnealingLR)
    assert len(rates_of(start(scheduled, RunConfig(steps=2)))) == 2
    with raises(DataError, "needs_length"):
        start(scheduled)


RAMP = BatchRamp((2, 6), (4, None))


def test_a_job_is_ramped_like_its_batches() -> None:
    """A ramped job has the steps of `ab.batches`, and the first stage's learning rate throughout."""
    job = dataclasses.replace(JOB, defaults=dataclasses.replace(JOB.defaults, effective_batch_size=RAMP))
    run = start(job, RunConfig(seed=3, micro_batch_size=2))
    reports = [run.engine.step(batch) for batch in run.batches]
    plain = ab.batches(JOB.dataset(), effective_batch_size=RAMP, epochs=2, seed=3)
    assert [report.num_samples for report in reports] == [len(batch.sample_ids) for batch in plain]
    assert [report.num_samples for report in reports] == [2, 2, 2, 4, 4, 4, 2]
    assert [float(report.learning_rates[0]) for report in reports] == pytest.approx([0.1] * 7)
    said = "steps of 2 for 6 samples, then 4; the learning rate is scaled to 2 and stays constant over the ramp"
    assert run.engine.decisions["samples"] == said
    assert job.train_spec().effective_batch_size == job.defaults.largest_batch_size == 4


def test_a_stage_that_contradicts_is_refused_before_the_first_step() -> None:
    """A ramp stage that contradicts the other sizes or the data raises before the first step."""
    choices = RunConfig(effective_batch_size=RAMP, micro_batch_size=2, accumulation_steps=1)
    with pytest.raises(BatchSizeError):
        resolve_settings(JOB, choices, None, world_size=1)
    with pytest.raises(BatchSizeError):
        start(JOB, RunConfig(effective_batch_size=BatchRamp((2, 6), (16, None))))


def test_settings_with_a_ramp() -> None:
    """A ramp comes from the job or the request, and survives JSON; two contradicting sizes are refused."""
    job = dataclasses.replace(JOB, defaults=ab.RunConfig(effective_batch_size=RAMP, learning_rate=0.1))
    settings = resolve_settings(job, RunConfig(micro_batch_size=2), None, world_size=1)
    assert (settings.effective_batch_size, settings.base_batch_size) == (RAMP, 2)
    assert settings.as_json()["effective_batch_size"] == "2,4@6"
    assert RunConfig.from_json(settings.as_json()) == settings
    with pytest.raises(BatchSizeError):
        resolve_settings(job, RunConfig(micro_batch_size=2, accumulation_steps=3), None, world_size=1)
    resumed = resolve_settings(JOB, RunConfig(effective_batch_size=8), settings, world_size=1)
    assert settings.differences(resumed, LEARNED) == ("effective_batch_size 2 for 6 samples, then 4 -> 8",)
