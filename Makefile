# Every target is a verb of make.py, which does the same without make: `python make.py test`.
# More arguments for a target: `make test ARGS="-k accumulate"`.

# The first Python from 3.11 on that runs; its name differs from system to system.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup train guide test test-published test-fast gpu matrix check format docs web web-check browser release clean

help setup train guide test test-published test-fast gpu matrix check format docs web web-check browser release clean:
	@$(or $(PYTHON),$(error anybatch needs Python 3.11 or newer on the PATH)) make.py $@ $(ARGS)
