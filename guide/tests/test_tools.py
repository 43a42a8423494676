"""`anybatch mcp` and `anybatch completion`: other programs use the parsers of the commands."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from anybatch.cli import plan, tune
from anybatch.cli.main import VERBS, main
from anybatch.cli.status import Status
from anybatch_guide.tools.mcp_server import TOOLS, input_schema, output_schema, words_of
from tests.architecture.source_tree import ROOT
from tests.cli.small import SPEC

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plan", {"what": SPEC, "device": "cpu:1GiB", "effective_batch_size": 8, "no_proposals": True}),
    ("check", {"recipe": SPEC, "samples": 5, "micro_batch_size": [2, 3]}),
    ("tune", {"recipe": SPEC, "effective_batch_size": 8, "micro_batch_size": [2]}),
    ("check", {"recipe": "missing.py"}),
)
COMPLETED = """
source script.sh
COMP_WORDS=(anybatch {words})
COMP_CWORD={number}
_shtab_anybatch
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_inputs_are_the_options() -> None:
    """A schema has the options that change the result, and values become a command line that cannot add options."""
    schema = input_schema(plan.make_parser())
    assert schema["required"] == ["what", "device"]
    assert schema["properties"]["ranks"]["type"] == "integer"
    assert schema["properties"]["checkpointing"]["type"] == "boolean"
    assert not {"json", "quiet", "figure", "help"} & set(schema["properties"])

    parser = tune.make_parser()
    assert input_schema(parser)["properties"]["micro_batch_size"]["type"] == "array"
    words = words_of(parser, {"recipe": "--json=x.json", "micro_batch_size": [2, 4], "seed": 1})
    assert words == ["--micro-batch-size=2", "--micro-batch-size=4", "--seed=1", "--", "--json=x.json"]
    assert parser.parse(words).recipe == "--json=x.json"


@pytest.mark.parametrize("verb", TOOLS)
def test_output_schemas(verb: str) -> None:
    """The schema of a tool has its own definitions."""
    schema = output_schema(verb)
    jsonschema.Draft202012Validator.check_schema(schema)
    references = {part.partition('"')[0] for part in json.dumps(schema).split('"#/$defs/')[1:]}
    assert references == set(schema["$defs"])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(find_spec("mcp") is None, reason="needs the extra anybatch[mcp]")
def test_the_client_of_the_sdk(tmp_path: Path) -> None:
    """The SDK's own client lists five tools, calls them, checks their output, and receives errors as results."""
    from mcp import Client, StdioServerParameters  # noqa: PLC0415 (may be missing)

    program = "import sys; from anybatch.cli.main import main; sys.exit(main(['mcp']))"
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    server = StdioServerParameters(
        command=sys.executable, args=["-c", program], cwd=tmp_path, env={"PYTHONPATH": ":".join(path)}
    )

    async def drive() -> None:
        async with Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tuple(tools) == TOOLS
            for name, arguments in CALLS:
                result = await client.call_tool(name, arguments)
                is_wrong = arguments.get("recipe") == "missing.py"
                assert result.is_error == is_wrong, result
                values = result.structured_content
                assert values["verb"] == name
                assert values["status"] == (Status.USAGE if is_wrong else Status.DONE)
                assert json.loads(result.content[0].text) == values
                if not is_wrong:
                    jsonschema.Draft202012Validator(tools[name].output_schema).validate(values)

    asyncio.run(drive())


def completed(words: str, folder: Path) -> list[str]:
    """Return what bash offers for the last word of a command line."""
    program = COMPLETED.format(words=words, number=len(words.split()))
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return done.stdout.split()


@pytest.mark.skipif(find_spec("shtab") is None, reason="needs the extra anybatch[completion]")
def test_completion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts exist for three shells, and bash completes commands, options and choices."""
    for shell in ("zsh", "fish", "bash"):
        assert main(["completion", shell]) == Status.DONE
        script = capsys.readouterr().out
        assert all(verb.name in script for verb in VERBS)
        if shutil.which(shell):
            (tmp_path / "script.sh").write_text(script, encoding="utf-8")
            subprocess.run([shell, "-n", "script.sh"], cwd=tmp_path, check=True)  # noqa: S603 (three known shells)
    assert completed("com", tmp_path) == ["compare", "completion"]
    assert "--micro-batch-size" in completed("tune --micro", tmp_path)
    assert completed("train --strategy fs", tmp_path) == ["fsdp"]


@pytest.mark.parametrize(("command", "package"), [("mcp", "mcp.server.stdio"), ("completion bash", "shtab")])
def test_missing_packages(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the package, the message has the line that installs it."""
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command.split()) == Status.USAGE
    assert "pip install" in capsys.readouterr().err
