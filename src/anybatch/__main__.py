"""`python -m anybatch`: the command line."""

import sys

from anybatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
