"""Write docs/composition.md from the table: `python docs/write_composition.py`."""

from pathlib import Path

from anybatch.core.compatibility import as_markdown

Path(__file__).with_name("composition.md").write_text(as_markdown() + "\n", encoding="utf-8")
