"""`anybatch guide`: the page that explains the batch, served, exported, or recorded again."""

import argparse
import asyncio
import contextlib
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from anybatch.cli.parser import Parser, integer, output_file
from anybatch.cli.status import Status
from anybatch.cli.threads import let_threads_sleep
from anybatch.errors import UserError
from anybatch_guide.built import DIST
from anybatch_guide.export import export_file, export_folder

_DESCRIPTION = (
    "Open the guide in a browser: what gradient accumulation does, computed by PyTorch on this machine or in recorded "
    "runs. It is served to this machine only, to whoever has the printed address."
)
_EPILOG = (
    "`anybatch guide export DIR` writes the guide as files that any web server can serve, `anybatch guide export "
    "--single-file FILE` as one file that opens from the disk; `anybatch guide record [NAME...]` makes its recordings "
    "again."
)
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_MAX_PORT: Final = 65_535
_RECORDINGS: Final = Path("guide/web/recordings")


def run(words: Sequence[str]) -> int:
    """Serve, export or record, as the first word says; return the exit status."""
    if words and words[0] == "export":
        return _export(words[1:])
    if words and words[0] == "record":
        return _record(words[1:])
    return _serve(words)


def make_parser() -> Parser:
    """Return the parser of what serves."""
    parser = Parser("guide", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("--port", type=port, default=0, metavar="N", help="to listen at (default: one that is free)")
    add("--no-browser", action="store_true", help="print the address, and open nothing")
    add("--keep", action="store_true", help="let a run go on when no page has watched it for a minute")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (default: 127.0.0.1, this machine alone)")
    add("--allow-host", action="append", default=[], metavar="NAME", help="another name by which the server is asked")
    add("--i-understand", action="store_true", help="that others can then read along, and compute on this machine")
    add("--page", type=Path, metavar="FOLDER", help="another build of the page (default: the one in the package)")
    return parser


def _serve(words: Sequence[str]) -> int:
    given = make_parser().parse(words)
    if given.host not in _LOOPBACK and not given.i_understand:
        message = (
            f"--host {given.host} lets other machines in, unencrypted: whoever sees the traffic has the secret, and "
            "can let this machine compute. A tunnel does not: ssh -L PORT:127.0.0.1:PORT. If it has to be, add "
            "--i-understand."
        )
        raise UserError(message)
    let_threads_sleep()  # for the process that computes, which inherits it
    from anybatch_guide.server import Serving, serve  # noqa: PLC0415 (its packages take a while, and --help none)

    serving = Serving(
        page=given.page or DIST,
        host="127.0.0.1" if given.host == "localhost" else given.host,
        port=given.port,
        names=frozenset(name.lower() for name in given.allow_host),
        keep=given.keep,
    )

    def show_address(address: str, once: str) -> None:
        sys.stdout.write(f"guide  {address}\n       for this machine and whoever has the address; Ctrl-C ends it\n")
        sys.stdout.flush()
        if not given.no_browser:
            open_browser(once)

    # Ctrl-C arrives here as an exception or as a server that has returned, by where in its loop it found the server.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(serving, show_address))
    sys.stdout.write("guide  ended\n")
    return Status.DONE


def open_browser(address: str) -> None:
    """Open a browser in a window of its own, if there is one; one that would take the terminal is none."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(address)


def _export(words: Sequence[str]) -> int:
    parser = Parser("guide export", "Write the guide as files that need no server of ours.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="new or empty, for any web server")
    parser.add_argument("--single-file", type=output_file, metavar="FILE", help="write one file, to open from a disk")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="another build of the page")
    given = parser.parse(words)
    if (given.folder is None) == (given.single_file is None):
        parser.error("name a folder, or --single-file FILE")
    page = given.page or DIST
    written = export_file(page, given.single_file) if given.folder is None else export_folder(page, given.folder)
    sys.stdout.write(f"wrote {written}\n")
    return Status.DONE


def _record(words: Sequence[str]) -> int:
    parser = Parser("guide record", "Run the guide's experiments on one thread, and write what they returned.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of experiments (default: all)")
    parser.add_argument("--to", type=Path, default=_RECORDINGS, metavar="FOLDER", help=f"(default: {_RECORDINGS})")
    given = parser.parse(words)
    if not given.to.is_dir():
        message = (
            f"there is no folder {given.to}. Run it where the project was cloned, or name another one: --to FOLDER"
        )
        raise UserError(message)
    let_threads_sleep()
    from anybatch_guide.recording import known, record, record_apart  # noqa: PLC0415 (torch, after its threads are set)

    names = known(given.names)
    for name in names:
        sys.stdout.write(f"{name} ...")
        sys.stdout.flush()
        # Several are recorded in a process each, so that none depends on those before it.
        written = record(name, given.to) if len(names) == 1 else record_apart(name, given.to)
        sys.stdout.write(f" {written}\n")
    return Status.DONE


def port(text: str) -> int:
    """Return the number of a port; 0 for one that is free."""
    value = integer(text)
    if not 0 <= value <= _MAX_PORT:
        message = f"{text} must be from 0 to {_MAX_PORT}"
        raise argparse.ArgumentTypeError(message)
    return value
