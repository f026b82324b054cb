# On a new machine, `make demo` and `make test` are enough: each sets up what it uses.

# Images of Docker set it. Without compiled files, every process of the tests compiles what it imports, at each start.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The number of test processes: four more than processors, because many tests wait. Each starts servers of its own.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 4)
# Options for pytest, for example: make test T="tests/behaviour -k fifo"
T ?=
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo server test test-fast test-slow test-rest first-runs client-matrix chaos soak fuzz mutants dashboard screenshots bench bench-against bench-network comparison goodput simulate trace scale conformance record lint size types
.PHONY: wheel release compose docs recording examples integrations foreign check clean

# Prints every line of this file that reads "target: … ## duration | text". Durations are those of two cores.
help:
	@awk -F ':.*## | *[|] ' '/^[a-z-]+:.*## / { printf "make %-16s %8s  %s\n", $$1, $$2, $$3 }' $(MAKEFILE_LIST)
	@echo
	@echo "Options for pytest, wherever tests run:   make test T=\"tests/behaviour -k fifo --servers valkey\""
	@echo "Options of the other long runs:           make chaos C=--seed=7, make soak S=\"--seconds 600\", make bench B=--quick"

# An environment of another Python than $(PYTHON), or of one that is gone, is made again: parts of both would be mixed.
WHICH := import sys; print(sys.base_prefix, *sys.version_info[:2])
ANOTHER := $(shell test ! -e $(VENV) || test "$$($(BIN)/python -c '$(WHICH)' 2>&1)" = "$$($(PYTHON) -c '$(WHICH)')" \
  || echo another-python)
.PHONY: another-python
another-python:
	@echo "$(VENV) was made by another Python than $(PYTHON), or is broken: making it again" >&2
	rm -rf $(VENV)

# These stamps say when an environment was last brought up to date. Only pip knows what is in it.
$(VENV)/.demo: pyproject.toml $(ANOTHER)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[server]'
	@touch $@

# Compiling what no test imports would take half of the time. The rest is compiled here, once, instead of by each process
# that runs tests.
$(VENV)/.test: pyproject.toml $(ANOTHER)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -e '.[test]'
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[lint]' build
	@touch $@

demo: $(VENV)/.demo ## 1 min | train word vectors with several processes, kill two of them, and check the result
	$(BIN)/redisacc demo

server: $(VENV)/.demo ##  | run a server in the foreground, for trying things out
	$(BIN)/redisacc server

# Which tests are which: tests/support/selection.py.
test: $(VENV)/.test ## 2 min | test every behaviour, with every kind of fault that can be injected without waiting
	$(PYTEST) $(T)

# Fewer at a time: these tests start many processes themselves.
test-slow: $(VENV)/.test ## 6 min | run the tests with many processes, that take seconds, or that need further servers
	$(BIN)/python -m pytest --slow -n 3 --dist worksteal $(T)

# Options, for example: make first-runs R="5 check none"
R ?=
first-runs: ## 1 h | run `make test` in 20 fresh clones, half of them while all processors are busy, and print a table
	$(PYTHON) .ci/first_runs.py $(R)

# No real server, and gradients stored in one way.
test-fast: $(VENV)/.test ## 20 s | run the tests that need no server, after every edit
	$(PYTEST) -q --servers fakeredis -k "not buffered_parts" \
	  tests/unit tests/protocol tests/behaviour $(T)

# For once a week, as a job of its own.
test-rest: $(VENV)/.test ## 15 min | run what `make check` leaves out: every test on every server, with all parameters
	$(PYTEST) --rest $(T)

# Client libraries, as pip writes them. Everything else is as in the environment of the tests. Each test meets one kind
# of client (tests/support/clients.py); one after the other, all kinds take their turn. On a cluster, it is a
# redis.RedisCluster, or the cluster's URL.
CLIENTS ?= redis==5.0.* redis==5.3.* redis==6.* redis==7.* redis==8.* valkey
client-matrix: $(VENV)/.test ## 35 min | run the tests of connections with redis-py 5 to 8, valkey-py, every kind of client, and clusters
	set -e; for wanted in $(CLIENTS); do \
	  library="$${wanted%%=*}"; place="build/clients/$${wanted%.\*}"; rm -rf "$$place"; \
	  $(BIN)/pip install --quiet --disable-pip-version-check --target "$$place" "$$wanted"; \
	  PYTHONPATH="$$place:$(CURDIR)" $(BIN)/python -c \
	    'import sys, importlib; print(sys.argv[1] + "-py", importlib.import_module(sys.argv[1]).__version__)' "$$library"; \
	  PYTHONPATH="$$place:$(CURDIR)" $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --servers valkey \
	    --clients "turn:$$library-py" \
	    tests/behaviour tests/protocol tests/unit tests/failures/connections tests/hostile/test_peers.py $(T); \
	  test "$$library" = redis || continue; \
	  PYTHONPATH="$$place:$(CURDIR)" $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --servers cluster \
	    tests/behaviour tests/event_loop tests/failures/cluster $(T); \
	done

$(VENV)/.browser: pyproject.toml $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[browser]'
	@touch $@

# In CI, a missing browser fails. At home, the tests that need one are skipped.
dashboard: $(VENV)/.browser ## 25 s | test the page of `redisacc serve` in Chromium
	$(BIN)/python -m pytest -q --all --servers valkey tests/dashboard $(T)

screenshots: $(VENV)/.browser ## 1 min | take the pictures of the dashboard for the documentation
	$(BIN)/python tests/dashboard/screenshots.py

# Options, for example: make chaos C="--seconds 600 --seed 7", C="--cluster --replicas 1", or C="--gradients 10000000",
# which takes hours.
C ?=
chaos: $(VENV)/.test ## 5 min | break everything at once: connections, processes, the server
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(C)
	PYTHONPATH=tests $(BIN)/python -m chaos.training --kills 50
	PYTHONPATH=tests $(BIN)/python -m chaos.training --kills 50 --updates
	PYTHONPATH=tests $(BIN)/python -m chaos.training --kills 30 --updates --cluster
	PYTHONPATH=tests $(BIN)/python -m chaos.training --kills 30 --streams
	PYTHONPATH=tests $(BIN)/python -m chaos.training --kills 20 --streams --cluster
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --long --servers valkey tests/failures/connections

# Options, for example: make soak S="--seconds 3600"
S ?=
soak: $(VENV)/.test ## 5 min | apply and take for minutes, and check that no memory grows
	$(BIN)/python tests/chaos/soak.py $(S)

# A hundred times as many examples as in `make test`, and new ones every time.
fuzz: $(VENV)/.test ## 15 min | search for inputs that get a wrong answer
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 3600 --servers valkey,redis62 --all --long tests/hostile/fuzz \
	    tests/hostile/test_stored_data.py $(T)

# What each mutant breaks, and which tests notice, is in tests/mutants/rules.py.
# Options, for example: make mutants M="--only lease --jobs 2"
M ?=
mutants: $(VENV)/.test ## 10 min | break sixty rules of the package, one at a time, and check that tests notice
	$(BIN)/python tests/mutants/run.py $(M)

# luacheck sees the scripts as the server gets them: assembled from their includes.
lint: $(VENV)/.lint ## 15 s | check style, imports between layers, Lua and shell scripts
	@for tool in luacheck shellcheck; do command -v $$tool >/dev/null || \
	  { echo "make lint needs $$tool: apt-get install lua-check shellcheck, or brew install $$tool" >&2; exit 1; }; done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	rm -rf build/lua && $(BIN)/python -c \
	  'import pathlib, redisacc._wire.script_loader as loader; loader.write(pathlib.Path("build/lua"))'
	luacheck --quiet build/lua lua/inspect
	shellcheck .ci/run redisacc/embedded/guard.sh

size: ## 2 s | count tokens and lines, and fail if a part is larger than its limit in .ci/size.py
	@$(PYTHON) .ci/size.py

# The types of the package, and of a user's code that is checked against them.
types: $(VENV)/.lint ## 20 s | check types, ours and those that users see
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing/user_code.py
	$(BIN)/pyright -p tests/typing --pythonpath $(BIN)/python

# What users get is tested: the wheel, in a new environment, away from the checkout.
wheel: $(VENV)/.lint ## 1 min | build the wheel, and test it in an environment of its own
	rm -rf dist build/wheel
	$(BIN)/python -m build --quiet --outdir dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[test]"
	cp -r tests build/wheel/tests && cp pyproject.toml build/wheel/
	cd build/wheel && REDISACC_TEST_INSTALLED=1 bin/python -m pytest -n $(JOBS) --servers valkey \
	  tests/unit tests/protocol tests/behaviour

$(VENV)/.release: pyproject.toml $(ANOTHER)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[release]'
	@touch $@

release: $(VENV)/.release ## 6 min | build a release in dist/ and try it with every supported Python; uploads nothing
	$(BIN)/python .ci/release.py

compose: ## 1 s | check every docker-compose.yml
	docker-compose config --quiet
	docker-compose --profile reducer --profile monitoring --profile cluster config --quiet
	docker-compose -f examples/two_machines/docker-compose.yml config --quiet

TENSORFLOW := .venv-tensorflow
TORCH := .venv-torch
$(TENSORFLOW)/.done:
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/pip install --quiet --disable-pip-version-check 'tensorflow-cpu==2.21.*'
	@touch $@

# Checks that TensorFlow and torch still do what was recorded, then runs random operations in TensorFlow and ours, side
# by side, and all optimizers in torch, as it is, and ours.
conformance: $(VENV)/.test $(TENSORFLOW)/.done $(TORCH)/.examples ## 6 min | compare with TensorFlow and torch, live (installs them in .venv-*)
	$(TORCH)/bin/python tests/conformance/torch_optimizers.py --check
	$(TORCH)/bin/python -m pytest -q tests/conformance/test_optimizers_live.py
	$(TENSORFLOW)/bin/python tests/conformance/record.py --check
	$(BIN)/python tests/conformance/live.py --tensorflow-python $(TENSORFLOW)/bin/python

record: $(TENSORFLOW)/.done $(TORCH)/.done ## 3 min | record what TensorFlow and torch do, for the conformance tests
	$(TENSORFLOW)/bin/python tests/conformance/record.py
	$(TORCH)/bin/python tests/conformance/torch_optimizers.py

$(TORCH)/.done:
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/pip install --quiet --disable-pip-version-check 'torch==2.13.0' numpy
	@touch $@

$(VENV)/.bench: pyproject.toml $(ANOTHER)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

# Options, for example: make bench B="--quick --only six-rows"
B ?=
bench: $(VENV)/.bench $(TENSORFLOW)/.done $(TORCH)/.done ## 30 min | compare with TensorFlow, torch and others; writes benchmarks/results
	$(BIN)/python -m benchmarks --tensorflow-python $(TENSORFLOW)/bin/python --torch-python $(TORCH)/bin/python $(B)

# Total drift since a commit that stays the same. For example: make bench-against COMMIT=80e98f7 B="--quick"
COMMIT ?= HEAD
bench-against: $(VENV)/.bench ## 5 min | compare rounds and steps with those of an earlier commit (COMMIT=…), in alternation
	$(BIN)/python -m benchmarks.against $(COMMIT) $(B)

# The hosts are network namespaces: without root on Linux and iproute2, they are left out, and the page goes to build/.
comparison: $(TORCH)/.examples ## 3 min | train alone, with DDP and with redisacc, and kill a process; writes benchmarks/results/comparison.md
	$(TORCH)/bin/python -m benchmarks.comparison $(B)

# Options, for example: make goodput G="--seconds 60 --only worker --every 30"
G ?=
goodput: $(VENV)/.bench ## 6 h | measure how much of a training is left when its processes are killed; writes benchmarks/results/goodput.md
	$(BIN)/python -m benchmarks.goodput $(G)

# The clock is simulated, and the same seeds give the same plots.
simulate: $(VENV)/.bench ## 1 min | simulate settings of a step; draws the plots of docs/guides/stragglers.md and prints its tables
	$(BIN)/python -m benchmarks.choosing

# Without root, the steps of four hosts are left out.
trace: $(VENV)/.bench ## 1 min | draw who waits for whom in a step; writes benchmarks/results/trace.md
	$(BIN)/python -m benchmarks.trace $(B)

# Without root, the steps between namespaces are left out. `make scale B=--stored` measures nothing.
scale: $(VENV)/.bench ## 15 min | simulate steps of 16 to 1,000 hosts with measured costs; writes benchmarks/results/scale.md
	$(BIN)/python -m benchmarks.scale $(B)

# The network is made of namespaces, so this needs Linux, root and iproute2.
# Options, for example: make bench-network B="--quick --rate 1 --workers 4 --only dense-4MB"
bench-network: $(VENV)/.bench $(TENSORFLOW)/.done $(TORCH)/.done ## 2 h | measure between hosts with links of 1 and 10 Gbit/s; needs root
	$(BIN)/python -m benchmarks.network --tensorflow-python $(TENSORFLOW)/bin/python --torch-python $(TORCH)/bin/python $(B)

$(VENV)/.docs: pyproject.toml $(ANOTHER)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# Whether the code blocks work, `make test` finds out.
docs: $(VENV)/.docs ## 30 s | build the documentation in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# Shows a new run of the demo in the documentation: look at the file before you commit it.
recording: $(VENV)/.demo ## 1 min | record `redisacc demo` for the documentation, as docs/images/demo.svg
	$(BIN)/python docs/record.py docs/images/demo.svg -- $(BIN)/redisacc demo

# torch has an environment of its own, because it is large. The examples that need JAX run there as well.
$(TORCH)/.examples: $(TORCH)/.done pyproject.toml
	$(TORCH)/bin/pip install --quiet --disable-pip-version-check -e '.[examples,test]' 'jax==0.10.*' 'optax==0.2.*' 'flax==0.12.*' 'equinox==0.13.*' \
	  'pandas>=2.2' 'scipy>=1.11'
	@touch $@

examples: $(TORCH)/.examples ## 5 min | test redisacc.torch, its pages, and the examples with torch, JAX and scikit-learn (in .venv-torch)
	$(TORCH)/bin/python -m pytest -n 2 --dist worksteal tests/pytorch tests/examples tests/docs/test_torch_pages.py \
	  tests/foreign/test_pandas.py tests/foreign/test_scipy.py tests/unit/test_torch_gradients.py

# Frameworks around torch, with all that they bring, in an environment of their own. In CI, this is a job of its own.
INTEGRATIONS := .venv-integrations
$(INTEGRATIONS)/.done: pyproject.toml
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check 'torch==2.13.0' numpy
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check \
	  'transformers==5.*' 'accelerate==1.*' 'lightning==2.*' -e '.[test]'
	@touch $@

integrations: $(INTEGRATIONS)/.done ## 2 min | test the examples with transformers, accelerate and Lightning (in .venv-integrations)
	$(INTEGRATIONS)/bin/python -m pytest tests/examples/test_frameworks.py

JAX := .venv-jax
$(JAX)/.foreign: pyproject.toml
	$(PYTHON) -m venv $(JAX)
	$(JAX)/bin/pip install --quiet --disable-pip-version-check 'jax==0.10.*' -e '.[test]'
	@touch $@

$(TENSORFLOW)/.foreign: $(TENSORFLOW)/.done pyproject.toml
	$(TENSORFLOW)/bin/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

# Large libraries have environments of their own. A test file whose library is missing is left out,
# and pytest fails if nothing remains.
foreign: $(TORCH)/.examples $(JAX)/.foreign $(TENSORFLOW)/.foreign ## 2 min | test arrays of torch, JAX and TensorFlow (installs them in .venv-*)
	$(TORCH)/bin/python -m pytest -q tests/foreign/test_torch.py tests/foreign/test_pandas.py tests/foreign/test_scipy.py \
	  tests/docs/test_arrays.py
	$(JAX)/bin/python -m pytest -q tests/foreign/test_jax.py tests/docs/test_arrays.py
	$(TENSORFLOW)/bin/python -m pytest -q tests/foreign/test_tensorflow.py tests/docs/test_arrays.py

# The steps of CI, which runs this target after installing the system's packages (.ci/run). A missing server fails there.
STEPS := lint types size compose docs demo test test-slow wheel examples
check: ## 18 min | run what CI runs on every commit
	@started=$$(date +%s); for step in $(STEPS); do \
	  printf '\n== make %s (after %d s)\n' "$$step" $$(($$(date +%s) - started)); \
	  $(MAKE) --no-print-directory "$$step" || exit 1; \
	done

clean: ## 1 s | remove all environments and everything built
	rm -rf $(VENV) $(TENSORFLOW) $(TORCH) $(INTEGRATIONS) $(JAX) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
