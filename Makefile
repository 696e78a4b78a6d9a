# Targets work on a fresh machine with Python 3.11+ and make: each makes .venv first. `make help` lists them.
# PYTHON=/path/to/python3 chooses the interpreter that .venv is made with.

export PYTHON
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test-unit test test-all lint types check package site simulate fuzz mutations faults attacks bench bench-quick rdma torch keras ray test-rdma clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 13

install: $(READY) ## make .venv and install omnireduce there, with what the tests need; other targets do that first

demo: $(READY) ## start two aggregator shards, run the bench, density and train workers, stop everything
	@$(BIN)/python examples/demo.py

test-unit: $(READY) ## run the tests of the pure parts, which start no processes: a minute and a half
	@echo "running the unit tests"
	@$(PYTEST) -n 3 -m unit $(ARGS)

test: $(READY) ## run these and the tests with real daemons and ranks: five minutes. ARGS="-n 0 tests/cluster/test_tls.py -k expired" runs those alone
	@echo "running the tests"
	@$(PYTEST) -n 4 $(if $(findstring tests/,$(ARGS)),,-m "not slow") $(ARGS)

test-all: $(READY) ## run all tests: twenty minutes
	@echo "running all tests"
	@$(PYTEST) -n 3 $(ARGS)

lint: $(READY) ## ruff: lint and format; import-linter: layers and circles of imports
	@echo "checking lint, format and layers"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache --no-logo

types: $(READY) ## mypy --strict
	@echo "checking types"
	@$(BIN)/mypy

site: $(READY) ## build the documents as a site in site/; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types test-all ## lint, types and all tests: what CI runs

package: ## build wheel and sdist, and try them in fresh environments with each Python at hand; a minute for each, and two to compile. ARGS=python3.12
	@tools/test_package.sh $(ARGS)

simulate: $(READY) ## run simulated clusters with faults from seeds, and from new ones; minutes. ARGS="--seeds 0:100000"
	@$(BIN)/python -m tests.simulator $(or $(ARGS),--seeds 0:200 --hosts 200 --relays 200 --programs 200 --refusals 200 --new 1000)

fuzz: $(READY) ## play hostile input from a new seed to both sides; half a minute. ARGS="stranger --examples 100000"
	@$(BIN)/python -m tests.fuzz $(or $(ARGS),--examples 500)

mutations: $(READY) ## show that the simulator, or a test, catches every deliberate bug; half an hour
	@$(BIN)/python -m tests.simulator --mutations

faults: $(READY) ## kill, stop and pause real workers and shards, then thousands of jobs on one daemon; four minutes. ARGS="--rounds 50"
	@$(BIN)/python -m tests.faults $(or $(ARGS),--rounds 300)
	@$(if $(ARGS),,$(BIN)/python -m tests.faults soak --jobs 3000)

attacks: $(READY) ## attack a daemon in every way, each beside an honest job; three quarters of an hour. ARGS="--seconds 60 --kinds garbage"
	@status=0; \
	$(BIN)/python -m tests.attacks $(or $(ARGS),--seconds 600) || status=1; \
	$(if $(ARGS),,$(BIN)/python -m tests.attacks --seconds 600 --secret --tls || status=1;) \
	exit $$status

bench: $(READY) ## measure everything against MPICH, Open MPI and gloo, and draw it; three quarters of an hour. ARGS=--resume goes on
	@status=0; \
	$(BIN)/python -m benchmarks run $(ARGS) || status=1; \
	$(BIN)/python -m benchmarks shaped --optional $(ARGS) || status=1; \
	$(BIN)/python -m benchmarks relays --optional $(ARGS) || status=1; \
	$(BIN)/python -m benchmarks training --optional $(ARGS) || status=1; \
	$(BIN)/python -m benchmarks plot || status=1; \
	exit $$status

bench-quick: $(READY) ## measure what has a target: on this host and, as root, on shaped links; a quarter of an hour
	@status=0; \
	$(BIN)/python -m benchmarks run --quick $(ARGS) || status=1; \
	$(BIN)/python -m benchmarks shaped --optional $(ARGS) || status=1; \
	$(BIN)/python -m benchmarks relays --optional $(ARGS) || status=1; \
	exit $$status

rdma: $(READY) ## install pyverbs into .venv and say which RDMA devices there are
	@tools/pyverbs.sh $(VENV)

# Of scikit-learn only a file is read. With SciPy beside it, Numba imports that too: a quarter of a second for each process.
torch: $(READY) ## install torch into .venv, for the tests and examples of omnireduce.torch; 250 MB
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 expecttest
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps scikit-learn

keras: $(READY) ## install Keras and JAX into .venv, for the tests and examples of omnireduce.keras; 100 MB
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check keras==3.15.1 jax==0.10.2

ray: $(READY) ## install Ray into .venv, for the tests of omnireduce.ray; 240 MB
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check ray==2.60.0

test-rdma: $(READY) ## boot guests with Soft-RoCE and run the RDMA tests in them
	@tools/test_rdma.sh $(ARGS)

clean: ## remove .venv and every cache
	rm -rf $(VENV) .venv-openmpi .venv-gloo build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml tools/venv.sh Makefile
	@tools/venv.sh $(VENV) mpi,plot,launch,tune,dev
	@touch $@
