"""Ranks for the tests of the planner."""

from tests.ranks_fixture import two_ranks

__all__ = ["two_ranks"]
