"""Commands for other programs: tools for agents (`anybatch mcp`), and completion in shells."""
