"""The mathematics of the page: sums of parts against the full gradient, in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from anybatch_guide.experiments import mathematics


def whole_gradient(loss: str) -> torch.Tensor:
    """Return the gradient of the unsplit batch, as a user would write it."""
    model = mathematics.network(torch.float64)
    inputs, targets = mathematics.data(loss)
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), ignore_index=-100).backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("loss", ["samples", "tokens"])
@pytest.mark.parametrize("cut", list(mathematics.CUTS))
def test_shares_of_the_targets_give_the_gradient_of_the_whole(loss: str, cut: str) -> None:
    """Weighted by shares of the targets, every split gives the batch's gradient to 1e-14 in float64."""
    parts = mathematics.gradient(loss, mathematics.CUTS[cut], mathematics.FACTORS["by_count"], torch.float64)
    whole = whole_gradient(loss)
    assert (parts - whole).norm() <= 1e-14 * whole.norm()


def test_what_the_page_calls_wrong_is_wrong() -> None:
    """Dividing by the number of parts is exact for equal parts, and off by more than 5% for uneven or masked ones."""
    errors = {
        (loss, cut): mathematics.compared(loss, cut, "by_parts", torch.float64)["relative_error"]
        for loss, cut in (("samples", "even"), ("samples", "uneven"), ("tokens", "even"))
    }
    assert errors["samples", "even"] < 1e-14
    assert errors["samples", "uneven"] > 0.05
    assert errors["tokens", "even"] > 0.05


def test_without_a_factor_the_gradient_is_as_many_times_as_long() -> None:
    """Four equal parts without a factor give four times the gradient, in its direction."""
    found = mathematics.compared("samples", "even", "none", torch.float64)
    assert found["length_ratio"] == pytest.approx(4, rel=1e-12)
    assert found["cosine"] == pytest.approx(1, rel=1e-12)


def test_the_sorted_sentences_have_uneven_parts() -> None:
    """Parts with the same number of sentences have different numbers of targets, which add up to the total."""
    counts = mathematics.counts_of("tokens", "even")
    assert len(set(counts)) > 1
    assert sum(counts) == mathematics.counts_of("tokens", "whole")[0]
