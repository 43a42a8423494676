"""Ranks for the tests of norms."""

from tests.ranks_fixture import two_ranks

__all__ = ["two_ranks"]
