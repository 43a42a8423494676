"""`anybatch guide`: serving, exporting, recording, and error messages."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch_guide.command import make_parser
from guide.tests.served import PAGE, Served, wait_for_end
from tests.architecture.source_tree import ROOT

SERVE = (sys.executable, "-m", "anybatch", "guide", "--no-browser", "--page", str(PAGE))
LIGHT = """
import sys
from anybatch.cli.main import main
import anybatch_guide.server
main(["guide", "export", "--page", sys.argv[1], "--single-file", sys.argv[2]])
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """Ctrl-C ends server and worker, during a run and with a connected page, with a message and status 0."""
    with Served(tmp_path, command=SERVE) as server:
        server.until_idle()
        worker = server.worker()
        with server.events() as events:
            server.begin("mathematics", paused=True)
            next(data for event, data, _ in events if event == "status" and data["worker"] == "running")
            server.process.send_signal(signal.SIGINT)
            assert [event for event, _, _ in events][-1] == "close"
        said, errors = server.process.communicate(timeout=60)
        assert server.process.returncode == 0
        assert said.endswith("guide  stopped\n")
        assert errors == ""
        assert wait_for_end(worker)


@pytest.mark.slow
def test_secret_is_printed_once(tmp_path: Path) -> None:
    """The address with the secret is printed once, and requests are not logged."""
    with Served(tmp_path, command=SERVE) as server:
        for path in (f"/?k={server.secret}", "/?k=wrong", "/", "/nothing"):
            server.ask("GET", path)
        secret = server.secret
    printed = "".join(server.said)
    assert secret not in printed
    assert "wrong" not in printed
    assert "GET" not in printed


@pytest.mark.slow
def test_taken_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An occupied port is reported, with status 2."""
    with Served(tmp_path, command=SERVE) as server:
        assert main(["guide", "--no-browser", "--page", str(PAGE), "--port", str(server.port)]) == Status.USAGE
    assert f"cannot listen on 127.0.0.1, port {server.port}" in capsys.readouterr().err


def test_a_public_address_needs_confirmation(capsys: pytest.CaptureFixture[str]) -> None:
    """A public address is refused, with an alternative, until the user confirms it."""
    for host in ("0.0.0.0", "192.0.2.7", "::"):  # noqa: S104 (refused)
        assert main(["guide", "--no-browser", "--page", str(PAGE), "--host", host]) == Status.USAGE
        assert "ssh -L" in capsys.readouterr().err
    assert main(["guide", "--no-browser", "--page", str(PAGE), "--host", "192.0.2.7", "--i-understand"]) == Status.USAGE
    assert "cannot listen on 192.0.2.7" in capsys.readouterr().err


@pytest.mark.slow
def test_server_and_export_are_light(tmp_path: Path) -> None:
    """Neither the server nor an export imports torch; only the worker does."""
    done = subprocess.run(  # noqa: S603 (a fixed program)
        [sys.executable, "-c", LIGHT, str(PAGE), str(tmp_path / "guide.html")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "guide.html").exists()


def test_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that needs the page reports a missing build, with status 2."""
    for words in (
        ["--no-browser"],
        ["export", str(tmp_path / "out")],
        ["export", "--single-file", str(tmp_path / "a")],
    ):
        assert main(["guide", *words, "--page", str(tmp_path)]) == Status.USAGE
        assert "make web" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export` writes a folder or one file, and prints it; neither or both is a usage error."""
    assert main(["guide", "export", "--page", str(PAGE), str(tmp_path / "out")]) == Status.DONE
    assert main(["guide", "export", "--page", str(PAGE), "--single-file", str(tmp_path / "a.html")]) == Status.DONE
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out'}\nwrote {tmp_path / 'a.html'}\n"
    for words in ([], ["out", "--single-file", "a.html"]):
        assert main(["guide", "export", *words]) == Status.USAGE
        assert "--single-file FILE" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.published
def test_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`record` runs and writes the given experiments; an unknown name is refused before any run."""
    assert main(["guide", "record", "mathematics", "--to", str(tmp_path)]) == Status.DONE
    assert capsys.readouterr().out == f"mathematics ... {tmp_path / 'mathematics.json'}\n"
    assert main(["guide", "record", "mathematics", "split_sum", "--to", str(tmp_path)]) == Status.DONE
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mathematics.json", "split_sum.json"]
    assert capsys.readouterr().out.count("\n") == 2
    assert main(["guide", "record", "mathematics", "nothing", "--to", str(tmp_path)]) == Status.USAGE
    assert "unknown experiment 'nothing'" in capsys.readouterr().err
    assert main(["guide", "record", "--to", str(tmp_path / "none")]) == Status.USAGE
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_options_are_documented() -> None:
    """docs/command_line.md has exactly the options of `guide`."""
    options = [action.option_strings[-1] for action in make_parser()._actions if action.option_strings]  # noqa: SLF001
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    section = text.partition("\n## `anybatch guide")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(--[a-z-]+)", section, flags=re.MULTILINE)
    assert sorted(options) == sorted(["--help", *documented])
