# Every target sets up what it needs in .venv by itself; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-gpu lint planted mutants sim fuzz faults clean

EXTRAS ?= engine,mooncake,nixl,dev
# Where nothing can be installed: make test-gpu PY=python3
PY ?= .venv/bin/python
RUNNER = $(PY) test/run_suite.py --continue-on-error
MAKEFLAGS += --no-print-directory

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:
ifeq ($(PY),.venv/bin/python)
	@tools/setup_env.sh $(EXTRAS)
endif

demo: setup  ## Prefill on 4 ranks with one KV copy, decode in another process; ARGS="--help" shows the options
	@.venv/bin/cpkv demo $(ARGS)

test: setup  ## Run the registered tests that this machine can run; ARGS="--suite unit --list"
	@$(RUNNER) $(ARGS)

test-full: setup  ## The same with the nightly ones
	@$(RUNNER) --nightly $(ARGS)

test-gpu: EXTRAS = engine,mooncake,nixl,gpu,dev
test-gpu: setup  ## The tests registered for CUDA
	@$(RUNNER) --hw cuda $(ARGS)

lint: setup  ## Style, types, import directions, dead code, dependencies, lengths
	@tools/lint.sh .venv/bin

planted: setup  ## Plant the faults that this field has shipped, one at a time; each must be caught by name
	@$(PY) test/run_faults.py planted $(ARGS)

mutants: setup  ## Seeded faults of layout, cache and transfer protocol; at least 90% must be caught
	@$(PY) test/run_faults.py mutants $(ARGS)

sim: setup  ## 100,000 random schedules of transfers over a hostile network; ARGS="--seed 7 --schedules 1" replays one
	@$(PY) test/simulate_transfers.py $(ARGS)

fuzz: setup  ## 100,000 malformed and hostile inputs to a control socket
	@$(PY) test/fuzz_control_socket.py --inputs 100000 $(ARGS)

FAULTS = $(PY) test/inject_faults.py --stop-s 20
FULL = --requests 2000 --kills-prefill 100 --kills-decode 100 --aborts 1000 --stops 5
TENTH = --requests 200 --kills-prefill 10 --kills-decode 10 --aborts 100 --stops 1
faults: setup  ## Kill, stop and cut off workers of every back end, without a model and with the engine (three hours)
	@$(FAULTS) --transfer all $(FULL) --hiccups 200 --cut-offs 10 $(ARGS)
	@$(FAULTS) --transfer all --engine $(TENTH) --hiccups 10 $(ARGS)
	@$(FAULTS) --transfer tcp --engine $(FULL) --hiccups 10 $(ARGS)

clean:  ## Remove .venv, caches and build output
	rm -rf .venv .venv.lock build dist out src/*.egg-info
	rm -rf .hypothesis .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find src test tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
