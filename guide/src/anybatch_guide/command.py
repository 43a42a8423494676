"""`anybatch guide`: serve, export or record the guide."""

import argparse
import asyncio
import contextlib
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from anybatch.cli.command import Parser, let_threads_sleep, output_file
from anybatch.cli.status import Status
from anybatch.errors import UserError
from anybatch_guide.export import DIST, export_file, export_folder

_DESCRIPTION = (
    "Open the guide to gradient accumulation in a browser. PyTorch computes all its numbers, either live on this "
    "machine or in recorded runs. Without --host, only people on this machine who know the printed address can open it."
)
_EPILOG = (
    "`anybatch guide export DIR` writes the guide as files that any web server can serve, `anybatch guide export "
    "--single-file FILE` as one file that opens from the disk; `anybatch guide record [NAME...]` runs its experiments "
    "again and records them."
)
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_MAX_PORT: Final = 65_535
_RECORDINGS: Final = Path("guide/web/recordings")


def run(arguments: Sequence[str]) -> int:
    """Serve, export or record, depending on the first argument; return the exit status."""
    if arguments and arguments[0] == "export":
        return _export(arguments[1:])
    if arguments and arguments[0] == "record":
        return _record(arguments[1:])
    return _serve(arguments)


def make_parser() -> Parser:
    """Return the parser of the command that serves the guide."""
    parser = Parser("guide", _DESCRIPTION, epilog=_EPILOG, ends=False)
    add = parser.add_argument
    add("--port", type=port, default=0, metavar="N", help="port to listen on (default: any free port)")
    add("--no-browser", action="store_true", help="print the address without opening a browser")
    add(
        "--keep",
        action="store_true",
        help="keep runs alive after their page is closed (default: stop them after a minute)",
    )
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    add("--allow-host", action="append", default=[], metavar="NAME", help="also accept requests for this host name")
    add("--i-understand", action="store_true", help="confirm that others can see the page and run code on this machine")
    add("--page", type=Path, metavar="FOLDER", help="folder of another build of the page (default: the packaged one)")
    return parser


def _serve(arguments: Sequence[str]) -> int:
    given = make_parser().parse(arguments)
    if given.host not in _LOOPBACK and not given.i_understand:
        message = (
            f"--host {given.host} opens the guide to other machines without encryption. Anyone who sees the traffic "
            "can run computations on this machine. Use a tunnel instead: ssh -L PORT:127.0.0.1:PORT. To open the "
            "guide anyway, add --i-understand."
        )
        raise UserError(message)
    let_threads_sleep()  # the worker process inherits this setting
    from anybatch_guide.local_server import ServerAddress  # noqa: PLC0415 (a slow import that --help does not need)
    from anybatch_guide.server import serve  # noqa: PLC0415 (the same)

    address = ServerAddress(
        host="127.0.0.1" if given.host == "localhost" else given.host,
        port=given.port,
        names=frozenset(name.lower() for name in given.allow_host),
    )

    def show_address(address: str, browser_address: str) -> None:
        sys.stdout.write(
            f"guide  {address}\n       Only reachable from this machine, by anyone with this URL; Ctrl-C stops it.\n"
        )
        sys.stdout.flush()
        if not given.no_browser:
            open_browser(browser_address)

    # Ctrl-C raises here or makes the server return, depending on where the server is in its loop.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(given.page or DIST, address, show_address, keep=given.keep))
    sys.stdout.write("guide  stopped\n")
    return Status.DONE


def open_browser(address: str) -> None:
    """Open a graphical browser in a new window, if there is one; text browsers do not count."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(address)


def _export(arguments: Sequence[str]) -> int:
    parser = Parser("guide export", "Write the guide as files that need no anybatch server.", ends=False)
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="new or empty folder, for any web server")
    parser.add_argument("--single-file", type=output_file, metavar="FILE", help="write one file for local use")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="folder of another build of the page")
    given = parser.parse(arguments)
    if (given.folder is None) == (given.single_file is None):
        parser.error("give a folder, or --single-file FILE")
    page = given.page or DIST
    written = export_file(page, given.single_file) if given.folder is None else export_folder(page, given.folder)
    sys.stdout.write(f"wrote {written}\n")
    return Status.DONE


def _record(arguments: Sequence[str]) -> int:
    description = "Run the experiments of the guide on one thread, and record their results."
    parser = Parser("guide record", description, ends=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of experiments (default: all)")
    parser.add_argument(
        "--to", type=Path, default=_RECORDINGS, metavar="FOLDER", help=f"folder to write (default: {_RECORDINGS})"
    )
    given = parser.parse(arguments)
    if not given.to.is_dir():
        message = f"the folder {given.to} does not exist. Run this in a clone of the project, or give --to FOLDER"
        raise UserError(message)
    let_threads_sleep()
    from anybatch_guide.recording import checked_names, record, record_in_subprocess  # noqa: PLC0415 (imports torch)

    names = checked_names(given.names)
    for name in names:
        sys.stdout.write(f"{name} ...")
        sys.stdout.flush()
        # With several names, use a new process for each recording, so that earlier recordings have no effect.
        written = record(name, given.to) if len(names) == 1 else record_in_subprocess(name, given.to)
        sys.stdout.write(f" {written}\n")
    return Status.DONE


def port(text: str) -> int:
    """Return a port number; 0 means any free port."""
    value = int(text)
    if not 0 <= value <= _MAX_PORT:
        message = f"{text} must be from 0 to {_MAX_PORT}"
        raise argparse.ArgumentTypeError(message)
    return value
