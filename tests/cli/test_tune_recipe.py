"""`anybatch tune RECIPE`: prints the table of a recipe, and draws it."""

from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from tests.cli.small import SPEC


@pytest.mark.slow
def test_tune_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The requested sizes are in the table, one is recommended, loading is judged, and the picture is written."""
    picture = tmp_path / "curves.png"
    words = (
        f"{SPEC} --effective-batch-size 20 --micro-batch-size 5 --micro-batch-size 20 --workers 0 --figure {picture}"
    )
    status = main(["tune", *words.split()])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "20 samples per step" in printed
    rows = [line.split()[:2] for line in printed.splitlines() if line.strip()[:1].isdigit()]
    assert ["5", "4"] in rows
    assert ["20", "1"] in rows
    assert "recommended: micro_batch_size=" in printed
    assert "loading" in printed.splitlines()[-2]
    assert picture.exists()
