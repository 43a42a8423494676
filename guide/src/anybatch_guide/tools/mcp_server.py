"""`anybatch mcp`: tools of the Model Context Protocol, whose inputs are a command's options, and outputs its JSON."""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import anybatch.cli
from anybatch.cli.command import Parser, effective_batch_size, integer, number, positive_int, positive_int_or_auto
from anybatch.cli.status import Status
from anybatch.errors import UserError

SCHEMA_PATH: Final = Path(anybatch.cli.__file__).with_name("schema.json")
_HIDDEN: Final = ("help", "json", "quiet", "figure")
TOOLS: Final = ("plan", "check", "tune", "advise", "compare")
_DESCRIPTION = (
    "Serve the commands plan, check, tune, advise and compare as tools for agents, over standard input and output "
    "(Model Context Protocol). Each call runs in a separate process, in the working folder of the server."
)


def run(argv: Sequence[str]) -> int:
    """Run `anybatch mcp` and return the exit status."""
    make_parser().parse(argv)
    try:
        import anyio  # noqa: PLC0415
        from mcp.server.stdio import stdio_server  # noqa: PLC0415
    except ImportError as error:
        message = f"`anybatch mcp` needs the package mcp ({error}). Install it: pip install 'anybatch[mcp]'"
        raise UserError(message, code="needs_mcp") from None

    async def serve() -> None:
        server = make_server()
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(serve)
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    return Parser("mcp", _DESCRIPTION, ends=False)


def make_server() -> Any:  # noqa: ANN401 (a `Server` of an optional package)
    """Return a server with a tool for each command."""
    from mcp import types  # noqa: PLC0415
    from mcp.server.lowlevel import Server  # noqa: PLC0415

    parsers: dict[str, Parser] = {name: importlib.import_module(f"anybatch.cli.{name}").make_parser() for name in TOOLS}
    tools = [
        types.Tool(
            name=name,
            description=parser.description,
            input_schema=input_schema(parser),
            output_schema=output_schema(name),
        )
        for name, parser in parsers.items()
    ]

    async def call(_: object, request: types.CallToolRequestParams) -> types.CallToolResult:
        if request.name not in parsers:
            message = f"unknown tool {request.name!r}; there are {', '.join(TOOLS)}"
            raise ValueError(message)
        values = await _run_command(request.name, words_of(parsers[request.name], request.arguments or {}))
        content = [types.TextContent(type="text", text=json.dumps(values))]
        return types.CallToolResult(content=content, structured_content=values, is_error="error" in values)

    async def list_tools(_: object, __: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    return Server("anybatch", version=version("anybatch"), on_list_tools=list_tools, on_call_tool=call)


async def _run_command(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a command in a process, and return its JSON; the user's code may print, so the JSON is in a file."""
    import anyio  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        file = anyio.Path(folder, "result.json")
        command = [sys.executable, "-m", "anybatch", verb, "--json", str(file), "--quiet", *words]
        # A cancelled call kills the process.
        done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
        if await file.exists():
            values: dict[str, Any] = json.loads(await file.read_text(encoding="utf-8"))
            return values
    error = {"type": "", "code": "no_result", "message": done.stdout.decode(errors="replace")[-2000:]}
    return {"verb": verb, "status": done.returncode, "error": error}


def inputs_of(parser: Parser) -> dict[str, argparse.Action]:
    """Return the options and arguments that change the result, by name."""
    actions = [action for action in parser.options if action.dest not in _HIDDEN]
    return {(action.option_strings or [action.dest])[-1].lstrip("-").replace("-", "_"): action for action in actions}


def input_schema(parser: Parser) -> dict[str, Any]:
    """Return the JSON Schema of the inputs of a command."""
    inputs = inputs_of(parser)
    required = [name for name, action in inputs.items() if action.required]
    properties = {name: _schema_of(action) for name, action in inputs.items()}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def words_of(parser: Parser, values: Mapping[str, object]) -> list[str]:
    """Return the command line of values that fit `input_schema`; values cannot add other options."""
    inputs = inputs_of(parser)
    options: list[str] = []
    arguments: list[str] = []
    for name, value in values.items():
        action = inputs.get(name)
        if action is None:
            message = f"unknown input {name!r}; there are {', '.join(inputs)}"
            raise UserError(message, code="usage")
        if not action.option_strings:
            arguments.append(str(value))
        elif action.nargs == 0:
            options += [action.option_strings[-1]] * bool(value)
        else:
            items = value if isinstance(value, list) else [value]
            options += [f"{action.option_strings[-1]}={item}" for item in items]
    return [*options, "--", *arguments]


def _schema_of(action: argparse.Action) -> dict[str, Any]:
    """Return the JSON Schema of the values of an option or argument."""
    kinds = {integer: "integer", positive_int: "integer", int: "integer", number: "number"}
    kind: dict[str, Any] = {"type": kinds.get(action.type, "string")}
    if action.type in (effective_batch_size, positive_int_or_auto):
        kind = {"type": ["integer", "string"]}
    if action.choices is not None:
        kind["enum"] = list(action.choices)
    if action.nargs == 0:
        kind = {"type": "boolean"}
    if type(action).__name__ == "_AppendAction":  # the class of action="append" has no public name
        kind = {"type": "array", "items": kind}
    return {**kind, "description": action.help}


def output_schema(verb: str) -> dict[str, Any]:
    """Return the schema of a command's JSON, with only the definitions that it uses."""
    definitions: Mapping[str, Any] = json.loads(SCHEMA_PATH.read_text("utf-8"))["$defs"]
    used: dict[str, Any] = {}
    unread = [verb]
    while unread:
        name = unread.pop()
        if name not in used:
            used[name] = definitions[name]
            unread += [other for other in definitions if f'"#/$defs/{other}"' in json.dumps(used[name])]
    return {"type": "object", "allOf": [{"$ref": f"#/$defs/{verb}"}], "$defs": used}
