"""Measured sizes are only found under the same circumstances, and never cause an error."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.size_choice import KnownSize
from anybatch.planner.cache.cache_file import MOST_LINES
from anybatch.planner.cache.measured_sizes import KnownSizes

HERE = {"model": "a", "samples": [("torch.float32", 3, 8)], "share": 64, "device": "cpu", "torch": "2.13"}


def known_sizes(folder: Path) -> KnownSizes:
    """Return an empty store in a folder, with a fixed date."""
    return KnownSizes(folder / "deep" / "sizes.jsonl", today=lambda: "2030-12-31")


def test_found_again(tmp_path: Path) -> None:
    """A stored size is found by another process, with its date; the last one counts."""
    assert known_sizes(tmp_path).find(HERE) is None
    assert known_sizes(tmp_path).keep(HERE, 16, 1234.5)
    assert known_sizes(tmp_path).find(HERE) == KnownSize(16, 1234.5, "2030-12-31")
    assert known_sizes(tmp_path).keep(HERE, 8, 2000.0)
    assert known_sizes(tmp_path).find(HERE) == KnownSize(8, 2000.0, "2030-12-31")
    assert len(known_sizes(tmp_path).path.read_text().splitlines()) == 1
    assert os.listdir(known_sizes(tmp_path).path.parent) == ["sizes.jsonl"]  # noqa: PTH208 (names only)


@pytest.mark.parametrize("name", list(HERE))
def test_never_under_other_circumstances(tmp_path: Path, name: str) -> None:
    """A size is not found if any circumstance differs, is missing or is added."""
    known = known_sizes(tmp_path)
    known.keep(HERE, 16, 1.0)

    assert known.find({**HERE, name: "other"}) is None
    assert known.find({key: value for key, value in HERE.items() if key != name}) is None
    assert known.find({**HERE, "more": 1}) is None
    assert known.find(HERE) is not None


DAMAGE = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"null", b"[]", b"{}", b'{"size": 1}', b'{"circumstances": {}}']),
    st.builds(
        lambda size: json.dumps({"circumstances": HERE, "size": size, "samples_per_second": 1, "date": ""}).encode(),
        st.sampled_from([0, -3, None, "16", 1.5, True, [16]]),
    ),
)


@given(damage=DAMAGE, cut=st.integers(0, 200))
@pytest.mark.slow
def test_damage_is_passed_over(tmp_path_factory: pytest.TempPathFactory, damage: bytes, cut: int) -> None:
    """With any content in the file nothing raises, no invalid size is found, and a new size can be stored."""
    known = known_sizes(tmp_path_factory.mktemp("known"))
    known.keep(HERE, 16, 1.0)
    whole = known.path.read_bytes()
    for content in (damage, whole[:cut], whole + damage, damage + b"\n" + whole):
        known.path.write_bytes(content)
        found = known.find(HERE)
        assert found in (None, KnownSize(16, 1.0, "2030-12-31"))
        assert known.keep(HERE, 4, 2.0)
        assert known.find(HERE) == KnownSize(4, 2.0, "2030-12-31")


def test_other_lines_survive_damage(tmp_path: Path) -> None:
    """One damaged line affects no other line."""
    known = known_sizes(tmp_path)
    known.keep(HERE, 16, 1.0)
    known.keep({**HERE, "share": 32}, 4, 1.0)
    lines = known.path.read_text().splitlines()
    known.path.write_text("\n".join([lines[0], lines[0][:30], lines[1]]))

    assert known.find(HERE) == KnownSize(16, 1.0, "2030-12-31")
    assert known.find({**HERE, "share": 32}) == KnownSize(4, 1.0, "2030-12-31")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """If the folder or file cannot be written, nothing is found and storing returns False, without an error."""
    (tmp_path / "deep").write_text("a file where a folder should be")
    assert not known_sizes(tmp_path).keep(HERE, 16, 1.0)
    assert known_sizes(tmp_path).find(HERE) is None

    (tmp_path / "other" / "deep" / "sizes.jsonl").mkdir(parents=True)
    assert not known_sizes(tmp_path / "other").keep(HERE, 16, 1.0)
    assert known_sizes(tmp_path / "other").find(HERE) is None
    assert os.listdir(tmp_path / "other" / "deep") == ["sizes.jsonl"]  # noqa: PTH208 (no temporary file is left)


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    """The oldest lines are dropped."""
    known = known_sizes(tmp_path)
    known.keep(HERE, 16, 1.0)
    lines = "".join(
        json.dumps({"circumstances": {"share": n}, "size": 1, "samples_per_second": 1, "date": ""}) + "\n"
        for n in range(MOST_LINES + 5)
    )
    known.path.write_text(known.path.read_text() + lines)
    known.keep({**HERE, "share": 1}, 4, 1.0)

    assert len(known.path.read_text().splitlines()) == MOST_LINES
    assert known.find(HERE) is None
    assert known.find({"share": MOST_LINES}) is not None


def test_the_users_own_place() -> None:
    """The default path is in the user's cache folder, which tests redirect."""
    path = KnownSizes().path

    assert path.parent.name == "anybatch"
    if sys.platform == "linux":
        assert path.is_relative_to(os.environ["XDG_CACHE_HOME"])
