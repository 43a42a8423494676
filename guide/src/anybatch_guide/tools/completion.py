"""`anybatch completion SHELL`: print a script that completes commands and options in a shell."""

import argparse
import sys
from collections.abc import Sequence

from anybatch.cli.command import Parser
from anybatch.cli.main import VERBS, function_of
from anybatch.cli.status import Status
from anybatch.errors import UserError

_FILES = ("FILE", "FILE.py", "FOLDER", "RECIPE", "WHAT", "LOG", "RUN", "FILE.py:FUNCTION")
"""Placeholders of arguments that may be files."""


def run(argv: Sequence[str]) -> int:
    """Print the script and return the exit status."""
    shell = make_parser().parse(argv).shell
    try:
        import shtab  # noqa: PLC0415
    except ImportError as error:
        message = f"`anybatch completion` needs the package shtab ({error}). Install it: pip install shtab"
        raise UserError(message, code="needs_shtab") from None
    parser = argparse.ArgumentParser("anybatch")
    commands = parser.add_subparsers()
    for verb in VERBS:
        options = sys.modules[function_of(verb).__module__].make_parser()
        for option in options.options:
            if option.metavar in _FILES:
                option.complete = shtab.FILE
        commands.add_parser(verb.name, parents=[options], add_help=False, help=verb.summary)
    sys.stdout.write(shtab.complete(parser, shell=shell))
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("completion", "Print a script that completes commands and options in a shell.", ends=False)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser
