"""Plain English: a list of phrases to avoid, and a limit on their number in each folder. See CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, Found

PHRASES = re.compile(
    r"\b(?:"
    r"anew|beside|foretold|whatever|let go|in turns|as ever|without a word|says? so|puts? aside|come of|comes of|"
    r"behind (?:it|them|that|(?:the|its|this|each|every) (?:first|last|step|update|backward|forward|abort|loop))|"
    r"(?:is|are|was|were|be|been) (?:told|said)|"
    r"(?:go|goes|going|went|gone) on(?! (?:a|an|the|this|each|top|to)\b)|"
    r"(?<!all )at once|"
    r"(?<!divided )(?<!multiplied )by (?:itself|themselves)|"
    r"of (?:its|their|our|one's) own|one's own|"
    r"as (?:it|they) (?:is|are|was|were)(?! \w+(?:ed|ing)\b)|"
    r"so many|(?:is|are|was|were) none|(?:that|which|it) (?:is|are) no(?! longer)|"
    r"(?:[Rr]eturn|[Yy]ield) what|those (?:of|that|who|which)|(?:to|can|could) be had|"
    r"stands? (?:in(?! for)|at|there|beside)|lies (?:in|at|beside)|looks? in"
    r")\b"
    r"|(?:^|\. )What (?:is|are|was|has|it|they) [^?\n]*$",  # a clause as a subject; questions are fine
    flags=re.MULTILINE,
)
# Hits per 1,000 words. Lower a limit after a rewrite; never raise one.
LIMITS = {
    "README.md": 1.0,
    "CONTRIBUTING.md": 1.0,
    "ARCHITECTURE.md": 1.0,
    "CHANGELOG.md": 0.5,
    "AGENTS.md": 0.5,
    "SECURITY.md": 0.5,
    "docs": 1.0,
    "docs/decisions": 1.0,
    "benchmarks": 1.5,
    "src": 0.5,
    "guide/src": 0.5,
    "guide/tests": 0.5,
    "tests": 1.0,
}
UNLIMITED = ("docs/decisions/", "benchmarks/results/", "tests/architecture/test_plain_english.py")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of a page without its code, or of a program's strings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for number, line in enumerate(text.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)# (.*)", line):
            yield number, comment[1]


def avoidable(paths: list[Path]) -> tuple[list[Found], int]:
    """Return the phrases to avoid in files, and the number of words."""
    found, num_words = [], 0
    for path in paths:
        for line, text in prose(path):
            plain = re.sub(r"`[^`\n]*`", "", text)
            num_words += len(re.findall(r"[A-Za-z]{2,}", plain))
            found += [
                Found(path, line + plain.count("\n", 0, phrase.start()), phrase[0].strip())
                for phrase in PHRASES.finditer(plain)
            ]
    return found, num_words


def files_of(place: str) -> list[Path]:
    """Return the pages and programs in a folder that count, or the file itself."""
    root = ROOT / place
    exempt = tuple(start for start in UNLIMITED if not f"{place}/".startswith(start))
    files = [root] if root.is_file() else sorted(root.rglob("*.py")) + sorted(root.rglob("*.md"))
    return [file for file in files if not file.relative_to(ROOT).as_posix().startswith(exempt)]


@pytest.mark.slow
@pytest.mark.parametrize("place", LIMITS)
def test_phrases_to_avoid_are_rare(place: str) -> None:
    """Each folder has at most its limit of avoidable phrases per 1,000 words."""
    found, num_words = avoidable(files_of(place))
    rate = 1000 * len(found) / num_words

    shown = "\n".join(map(str, found[:50]))
    assert rate <= LIMITS[place], f"{place}: {rate:.1f} per 1,000 words, limit {LIMITS[place]}:\n{shown}"


def test_phrases_are_detected(tmp_path: Path) -> None:
    """Phrases are found with their lines in pages, docstrings and comments, but not in code."""
    page, program = tmp_path / "page.md", tmp_path / "program.py"
    page.write_text("Plain.\n```\nat once\n```\n`at once`\nIt goes on at once.\n", encoding="utf-8")
    program.write_text('"""Plain.\n\nReturn what is left."""\nbeside = 1  # as they are\n', encoding="utf-8")

    found, num_words = avoidable([page, program])

    assert [(hit.path, hit.line, hit.what) for hit in found] == [
        (page, 6, "goes on"),
        (page, 6, "at once"),
        (program, 3, "Return what"),
        (program, 4, "as they are"),
    ]
    assert num_words == 14
