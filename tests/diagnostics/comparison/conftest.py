"""Ranks for the tests of comparisons."""

from tests.ranks_fixture import two_ranks

__all__ = ["two_ranks"]
