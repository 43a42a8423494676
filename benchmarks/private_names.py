"""List the private names of torch that each folder of the library uses, a line for each folder.

python benchmarks/private_names.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests have the search
from tests.architecture.source_tree import PACKAGE, parse
from tests.architecture.test_torch_internals import HOME, reaches_into


def main() -> None:
    """Print the list."""
    for path in sorted(PACKAGE.glob(f"*/{HOME}")):
        names = sorted({name.removeprefix(".") for _, name in reaches_into(parse(path))})
        print(f"{path.parent.name}: {', '.join(f'`{name}`' for name in names)}")


if __name__ == "__main__":
    main()
