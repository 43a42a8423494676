"""Ranks for the tests of the examples."""

from tests.ranks_fixture import one_rank, ranks, three_ranks, two_ranks

__all__ = ["one_rank", "ranks", "three_ranks", "two_ranks"]
