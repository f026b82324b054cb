# `make demo` and `make test` are all that a new machine needs: each sets up what it uses.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes. Each starts servers of its own.
JOBS ?= 2
# Options for pytest, for example: make test T="tests/behaviour -k fifo"
T ?=

.PHONY: help demo server test redis-py-matrix chaos soak bench conformance record lint types wheel compose docs examples \
        check clean

help:
	@echo "make demo         train word vectors with several processes through a real server"
	@echo "make test         run every test"
	@echo "make check        what CI runs: lint, types, test, wheel, compose, docs, examples"
	@echo "make docs         build the documentation in build/docs; a warning is an error"
	@echo "make examples     test the examples with torch and scikit-learn (installs them in .venv-torch)"
	@echo "make redis-py-matrix  the tests of the client's side, with redis-py 5, 6, 7 and 8"
	@echo "make chaos        break everything for some minutes: connections, processes, the server (C=--seed=7)"
	@echo "make soak         apply and take for some minutes, and see that no memory grows"
	@echo "make bench        measure beside TensorFlow, torch and others; writes docs/performance"
	@echo "make conformance  compare with TensorFlow, live (installs it in .venv-tensorflow)"
	@echo "make server       run a server in the foreground, for trying things out"

# pip's own record of what it installed is the only truth about an environment; the stamps say when to ask again.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cli,server]'
	@touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,lint]' build
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/redisacc demo

server: $(VENV)/.demo
	$(BIN)/redisacc server

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(T)

# Versions of redis-py, as pip writes them. Everything else stays as it is in the environment of the tests.
REDIS_PY ?= 5.0.* 5.3.* 6.* 7.* 8.*
redis-py-matrix: $(VENV)/.test
	set -e; for version in $(REDIS_PY); do \
	  place="build/redis-py/$${version%.\*}"; rm -rf "$$place"; \
	  $(BIN)/pip install --quiet --disable-pip-version-check --target "$$place" "redis==$$version"; \
	  PYTHONPATH="$$place:$(CURDIR)" $(BIN)/python -c 'import redis; print("redis-py", redis.__version__)'; \
	  PYTHONPATH="$$place:$(CURDIR)" $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --servers valkey \
	    tests/behaviour tests/internals tests/faults $(T); \
	done

# Options, for example: make chaos C="--seconds 600 --seed 7"
C ?=
chaos: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(C)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --long --servers valkey tests/faults

# Options, for example: make soak S="--seconds 3600"
S ?=
soak: $(VENV)/.test
	$(BIN)/python tests/soak.py $(S)

# The scripts are linted as the server gets them, with what they include.
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/lua && $(BIN)/python -c 'import pathlib, redisacc._lua as lua; lua.write(pathlib.Path("build/lua"))'
	luacheck --quiet build/lua lua/inspect

# Ours, and users' code against our hints.
types: $(VENV)/.test
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing/user_code.py
	$(BIN)/pyright -p tests/typing --pythonpath $(BIN)/python

# The wheel in a fresh environment, away from the checkout: what users get is what is tested.
wheel: $(VENV)/.test
	rm -rf dist build/wheel
	$(BIN)/python -m build --quiet --outdir dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[test]"
	cp -r tests build/wheel/tests && cp pyproject.toml build/wheel/
	cd build/wheel && REDISACC_TEST_INSTALLED=1 bin/python -m pytest -n $(JOBS) --servers valkey tests/internals tests/behaviour

compose:
	docker-compose config --quiet

TENSORFLOW := .venv-tensorflow
$(TENSORFLOW)/.done:
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/pip install --quiet --disable-pip-version-check 'tensorflow-cpu==2.21.*'
	@touch $@

# That the recorded facts are still TensorFlow's, then random sequences of operations side by side.
conformance: $(VENV)/.test $(TENSORFLOW)/.done
	$(TENSORFLOW)/bin/python tests/conformance/record.py --check
	$(BIN)/python tests/conformance/live.py --tensorflow-python $(TENSORFLOW)/bin/python

record: $(TENSORFLOW)/.done
	$(TENSORFLOW)/bin/python tests/conformance/record.py

TORCH := .venv-torch
$(TORCH)/.done:
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/pip install --quiet --disable-pip-version-check 'torch==2.13.0' numpy
	@touch $@

$(VENV)/.bench: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

# Options, for example: make bench B="--quick --only six-rows"
B ?=
bench: $(VENV)/.bench $(TENSORFLOW)/.done $(TORCH)/.done
	$(BIN)/python -m benchmarks --tensorflow-python $(TENSORFLOW)/bin/python --torch-python $(TORCH)/bin/python $(B)

$(VENV)/.docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# That its code blocks work, `make test` finds out.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# torch stays out of the environment of the tests, for it is large.
$(TORCH)/.examples: $(TORCH)/.done pyproject.toml
	$(TORCH)/bin/pip install --quiet --disable-pip-version-check -e '.[examples,test]'
	@touch $@

examples: $(TORCH)/.examples
	$(TORCH)/bin/python -m pytest tests/examples

check: lint types test wheel compose docs examples

clean:
	rm -rf $(VENV) $(TENSORFLOW) $(TORCH) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
