# `make serve` and `make test` need a Python 3.11, 3.12 or 3.13 and an index to install from; nothing else.

VERSIONS := 3.13 3.12 3.11
VENV     ?= .venv
PEERS    ?= .venv-peers
PYENV_ROOT ?= $(HOME)/.pyenv

# The newest interpreter that really runs: a shim may answer to a version that is not there or not activated.
candidates = $(foreach v,$(VERSIONS),python$(v) $(wildcard $(PYENV_ROOT)/versions/$(v).*/bin/python$(v)))
PYTHON ?= $(shell for python in $(candidates); do \
    $$python -c 'import ctypes, ensurepip, sqlite3, ssl, venv' 2>/dev/null && echo $$python && break; done)

pins = requirements/py$$($(VENV)/bin/python -c 'import sys; print(*sys.version_info[:2], sep="")').txt

.PHONY: setup serve test rigs gated check bench bench-experts train-tiny simulate faults poison cancels soak overload slow fuzz fuzz-parsers corrupt probes drain test-mesh memory flagship matrix tables constraints python
.DEFAULT_GOAL := setup

setup: $(VENV)/.dev                 ## a virtual environment with everything in it

serve: $(VENV)/.native               ## the default model on 127.0.0.1:8000; ARGS='--port 9000' for flags
	$(VENV)/bin/jaxserve pull
	exec $(VENV)/bin/jaxserve serve $(ARGS)

test: $(VENV)/.dev                   ## the whole suite; ARGS='-k scheduler' for less
	$(VENV)/bin/pytest $(ARGS)

rigs: $(VENV)/.dev                   ## every rig in its short size, and the mistakes that each must find
	$(VENV)/bin/pytest -m rig $(ARGS)

gated: $(VENV)/.dev                  ## the tests of models under terms of their own, where somebody has pulled them
	$(VENV)/bin/pytest -m gated $(ARGS)

check: $(VENV)/.dev                  ## style, types, floors, sizes, what the documents say
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pytest -q tests/house

bench: $(VENV)/.native $(PEERS)/.ready ## one run in turns with transformers: ratios and a verdict; ARGS='--rounds 9'
	$(VENV)/bin/jaxserve pull
	$(VENV)/bin/python -m benchmarks.paired --peer $(PEERS)/bin/python $(ARGS)

bench-experts: $(VENV)/.native       ## the product of experts against ragged_dot and against reading them; ARGS='--quick'
	$(VENV)/bin/python -m benchmarks.experts $(ARGS)

train-tiny: $(VENV)/.dev             ## trains the tiny block-diffusion model, into .cache/checkpoints; ARGS='--quick' to see that it learns
	$(VENV)/bin/python -m checkpoints.recipes.tiny_diffusion $(ARGS)

simulate: $(VENV)/.dev               ## 10,000 histories of the engine in a simulated world; ARGS='--replay 17' for one
	$(VENV)/bin/python -m tests.rigs.simulate $(ARGS)

faults: $(VENV)/.dev                 ## every fault of the list, staged on the real server
	$(VENV)/bin/python -m tests.rigs.faults $(ARGS)

poison: $(VENV)/.dev                 ## one poisoned request among 16, in each phase of its life
	$(VENV)/bin/python -m tests.rigs.poison $(ARGS)

cancels: $(VENV)/.dev                ## 10,000 cancels and disconnects: is anything left behind?
	$(VENV)/bin/python -m tests.rigs.cancels $(ARGS)

soak: $(VENV)/.dev                   ## 30 minutes of everything at once; ARGS='--minutes 5' for less
	$(VENV)/bin/python -m tests.rigs.soak $(ARGS)

overload: $(VENV)/.dev               ## up to ten times as many requests as it can serve
	$(VENV)/bin/python -m tests.rigs.overload $(ARGS)

slow: $(VENV)/.dev                   ## five hundred clients that take their time, and others who do not
	$(VENV)/bin/python -m tests.rigs.slow $(ARGS)

fuzz: $(VENV)/.rigs                  ## 10,000 malformed requests against the real server
	$(VENV)/bin/python -m tests.rigs.fuzz $(ARGS)

fuzz-parsers: $(VENV)/.rigs          ## ten minutes of damaged input for each parser; ARGS='--seconds 60' for less
	$(VENV)/bin/python -m tests.rigs.fuzz_parsers $(ARGS)

corrupt: $(VENV)/.dev                ## 200 damaged checkpoints: each is refused, and says which file
	$(VENV)/bin/python -m tests.rigs.corrupt $(ARGS)

probes: $(VENV)/.dev                 ## engine hung, stopped, killed; loop blocked; overload: do the probes tell the truth?
	$(VENV)/bin/python -m tests.rigs.probes $(ARGS)

drain: $(VENV)/.dev                  ## SIGTERM in the middle of 32 streams, 20 times: nothing may be lost
	$(VENV)/bin/python -m tests.rigs.drain $(ARGS)

matrix: $(VENV)/.dev                 ## which families are tested in which ways: runs the tests that say so
	$(VENV)/bin/pytest -q -m supports --junitxml=.cache/matrix.xml $(ARGS)
	$(VENV)/bin/python -m tests.house.matrix .cache/matrix.xml
	$(MAKE) tables

test-mesh: $(VENV)/.dev              ## every family on meshes of eight forced devices; ARGS='--models llama --meshes 4x2' for less
	$(VENV)/bin/python -m tests.rigs.mesh $(ARGS)

memory: $(VENV)/.dev                 ## converts and restores 2 GB in eight files, on one device and on eight, and watches memory
	$(VENV)/bin/python -m tests.rigs.memory $(ARGS)

flagship: $(VENV)/.dev               ## the flagship at full size, without a weight: compiled for eight devices, lowered for GPUs and TPUs
	$(VENV)/bin/python -m tests.rigs.flagship $(ARGS)

tables: $(VENV)/.dev                 ## writes the README's tables anew from the code
	$(VENV)/bin/python -m tests.house.tables

constraints:                         ## writes requirements/py3*.txt anew, with an interpreter of each version
	for version in $(VERSIONS); do $$($(MAKE) -s python VERSIONS=$$version) requirements/pin.py || exit; done

python:                              ## which interpreter `setup` takes
	@test -n "$(PYTHON)" || { echo "jaxserve needs Python $(VERSIONS): none of them runs here; name one by PYTHON=" >&2; exit 1; }
	@echo $(PYTHON)

$(VENV)/bin/python:
	$$($(MAKE) -s python) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml $(wildcard requirements/*.txt) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(pins) -e .
	touch $@

$(VENV)/.native: $(VENV)/.serve jaxserve/models/kernels/cpu.cc jaxserve/models/kernels/build.py  # XLA's do without it
	$(VENV)/bin/python -m jaxserve.models.kernels.build --optional
	touch $@

$(VENV)/.dev: $(VENV)/.native
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(pins) -e '.[dev]'
	touch $@

$(VENV)/.rigs: $(VENV)/.dev
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(pins) -e '.[dev,rigs]'
	touch $@

$(PEERS)/.ready: benchmarks/peers.txt
	$$($(MAKE) -s python VERSIONS='3.11 3.12 3.13') -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check -r benchmarks/peers.txt
	touch $@
