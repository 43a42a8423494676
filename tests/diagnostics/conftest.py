"""Ranks for the tests of diagnostics."""

from tests.ranks_fixture import two_ranks

__all__ = ["two_ranks"]
