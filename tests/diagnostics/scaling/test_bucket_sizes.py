"""Bucket sizes to try: sizes that give the same buckets are merged, and buckets match the strategy's."""

import torch
from torch import nn

from anybatch.diagnostics.scaling_ranks import USUAL_SIZES, bucket_cuts, buckets_of
from anybatch.parallel.gradient_buckets import GradientBuffers

SIZES = (8, 400, 40, 4, 4000, 100, 12)


def test_buckets_are_those_of_the_strategy() -> None:
    """`buckets_of` and `GradientBuffers` give the same bytes per bucket, for the same parameters in the same order."""
    parameters = [nn.Parameter(torch.zeros(size // 4)) for size in SIZES]
    for bucket_bytes in (1, 12, 100, 113, 4000, 4100, 10**6):
        buffers = GradientBuffers(parameters, bucket_bytes=bucket_bytes)
        found = tuple(flat.numel() * flat.itemsize for flat in buffers.flats)
        buffers.close()
        assert buckets_of(SIZES, bucket_bytes) == found


def test_sizes_that_make_the_same_buckets_are_one_trial() -> None:
    """For a small model all default sizes give one bucket; model-specific sizes and the size in use are added."""
    cuts = bucket_cuts(SIZES, None, current=1)

    total = sum(SIZES)
    assert [cut.num_buckets for cut in cuts] == sorted((cut.num_buckets for cut in cuts), reverse=True)
    assert (cuts[0].num_buckets, cuts[0].sizes) == (len(SIZES), (1,))
    assert cuts[-1].num_buckets == 1
    assert set(USUAL_SIZES) <= set(cuts[-1].sizes)
    assert total in cuts[-1].sizes
    assert len({buckets_of(SIZES, cut.sizes[0]) for cut in cuts}) == len(cuts)


def test_sizes_that_were_asked_for() -> None:
    """Only the requested sizes and the one in use are tried, without sizes below the strategy's minimum."""
    assert {size for cut in bucket_cuts(SIZES, [50, 200], current=7) for size in cut.sizes} == {7, 50, 200}
    assert {size for cut in bucket_cuts(SIZES, [50, 200], current=7, least=60) for size in cut.sizes} == {7, 200}
