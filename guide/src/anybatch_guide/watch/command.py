"""`anybatch watch [RUNS...]`: a page about training runs, served or written into a file."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from anybatch.cli.command import RUNS, Parser, output_file
from anybatch.cli.status import Status
from anybatch.errors import UserError
from anybatch_guide.command import open_browser, port
from anybatch_guide.export import DIST, Asset, read_page
from anybatch_guide.watch.watching import WatchedRuns, encoded

PAGE: Final = DIST / "watch"
_DESCRIPTION = (
    "Show runs live in a browser, from their logs: the split of batches, losses, whether runs have equal losses, "
    "memory, the activity of each rank, and the engine's warnings. `watch` only reads log files; no data leave this "
    "machine."
)
_EPILOG = "To watch a run on another machine, follow its log: ssh HOST tail -c +1 -F RUN/events.jsonl > copy.jsonl."


def run(arguments: Sequence[str]) -> int:
    """Serve or write the page for a command line; return the exit status."""
    given = make_parser().parse(arguments)
    watched = WatchedRuns(given.runs or _default_runs())
    if watched.num_left_out:
        sys.stdout.write(f"watch  the first {len(watched.runs)} runs; {watched.num_left_out} more are not shown\n")
    page = read_page(given.page or PAGE)
    if given.export is not None:
        return _export(page, watched, given.export)
    from anybatch_guide.local_server import ServerAddress  # noqa: PLC0415 (a slow import that --help does not need)
    from anybatch_guide.watch.server import serve  # noqa: PLC0415 (the same)

    def show_address(address: str, browser_address: str) -> None:
        text = "Only reachable from this machine, by anyone with this URL; Ctrl-C stops it."
        sys.stdout.write(f"watch  {address}\n       {text}\n")
        sys.stdout.flush()
        if not given.no_browser:
            open_browser(browser_address)

    # Ctrl-C raises here or makes the server return, depending on where the server is in its loop.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(page, watched, ServerAddress(port=given.port), show_address))
    sys.stdout.write("watch  stopped\n")
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("watch", _DESCRIPTION, epilog=_EPILOG, ends=False)
    add = parser.add_argument
    add(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help=f"folder of a run, its log, or a folder of runs; runs are compared with the first (default: {RUNS})",
    )
    add("--export", type=output_file, metavar="FILE", help="write the page to one HTML file instead of serving it")
    add("--port", type=port, default=0, metavar="N", help="port to listen on (default: any free port)")
    add("--no-browser", action="store_true", help="print the address without opening a browser")
    add("--page", type=Path, metavar="FOLDER", help="folder of another build of the page (default: the packaged one)")
    return parser


def _default_runs() -> list[Path]:
    if RUNS.is_dir():
        return [RUNS]
    message = f"the folder {RUNS} does not exist here. Give the folder of a run, or its log: anybatch watch FOLDER"
    raise UserError(message)


def _export(page: dict[str, Asset], watched: WatchedRuns, file: Path) -> int:
    from anybatch_guide.export import single_file, write_page  # noqa: PLC0415 (not needed to serve)

    views = encoded({"runs": watched.read_all()})
    with_runs = {**page, "rec/watch.json": Asset(views.encode(), "application/json")}
    write_page(single_file(with_runs), file)
    sys.stdout.write(f"wrote {file}\n")
    return Status.DONE
