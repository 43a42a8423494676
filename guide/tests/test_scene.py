"""The moving scene: its sums against plain torch, its memory against an enforced budget, and its recording."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from anybatch.testing import memory_budget
from anybatch_guide.claims.measuring import relative
from anybatch_guide.experiments import scene
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")


@pytest.mark.parametrize("sizes", scene.SPLITS, ids=str)
def test_the_last_sum_is_the_gradient_of_the_batch(sizes: tuple[int, ...]) -> None:
    """For every split, also an uneven one, the sum after the last micro-batch is the gradient of 64 digits."""
    inputs, labels = scene.first_digits()
    model, _ = scene.model_with_state()
    cross_entropy(model(inputs[:64]), labels[:64]).backward()
    expected = scene.flat(scene.gradients_of(model))
    made = scene.train(sizes, inputs, labels)

    assert relative(made.sums[0][-1], expected) < 1e-6
    assert [len(sums) for sums in made.sums] == [len(sizes)] * scene.NUM_STEPS


@pytest.mark.parametrize("sizes", [(64,), (16,) * 4], ids=str)
def test_a_step_needs_its_recorded_peak(sizes: tuple[int, ...]) -> None:
    """A budget of the recorded peak is enough for the step; one byte less runs out of memory."""
    inputs, labels = scene.first_digits()
    (peak,) = (one["peak"] for one in scene.run(lambda _: None)["splits"] if tuple(one["sizes"]) == sizes)

    def step(step_bytes: int) -> None:
        model, optimizer = scene.model_with_state()
        parts = list(zip(inputs[:64].split(list(sizes)), labels[:64].split(list(sizes)), strict=True))
        with memory_budget(step_bytes + inputs.nbytes + labels.nbytes, model, optimizer):  # it counts the data set, too
            for x, y in parts:
                x, y = x.clone(), y.clone()  # noqa: PLW2901 (as a copy to a device)
                loss = cross_entropy(model(x), y) * (len(x) / 64)
                loss.backward()
                del loss
            del x, y
            optimizer.step()

    step(peak)
    with pytest.raises(torch.OutOfMemoryError):
        step(peak - 1)
