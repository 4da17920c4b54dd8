# One command each: `make demo` and `make test` set everything up by themselves, and start at once the second time.

# Python 3.11 or 3.12 to make the environment with.
PYTHON ?= python3
# cpu, cuda, or auto: cuda where nvidia-smi finds a GPU.
FLAVOUR ?= auto
# Address of PyTorch's own wheels, where pip's configuration does not lead to the build of torch that FLAVOUR asks for.
TORCH_INDEX ?=
DEMO_OUT ?= demo_run
SITE ?= site

ifeq ($(FLAVOUR),auto)
override FLAVOUR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifeq ($(filter $(FLAVOUR),cpu cuda),)
$(error FLAVOUR: expected cpu, cuda or auto, got '$(FLAVOUR)')
endif

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-$(FLAVOUR)
OTHER_FBGEMM := $(if $(filter cpu,$(FLAVOUR)),fbgemm-gpu,fbgemm-gpu-cpu)
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# MkDocs lives in an environment of its own: it needs no torch, and torch's environment none of its packages.
DOCS := $(VENV)/docs

.DEFAULT_GOAL := help
.PHONY: help setup demo test check docs fuzz dist clean
.DELETE_ON_ERROR:

help:
	@echo 'make setup   environment in $(VENV): torch, fbgemm and torchrec that go together (here: $(FLAVOUR))'
	@echo 'make demo    search, export, reload, evaluate and report on generated data; writes $(DEMO_OUT)/'
	@echo 'make test    all tests; those on real data read DNIS_DATA (default ../shared/data) or are skipped'
	@echo 'make check   lint, format, types, doc examples, documentation site'
	@echo 'make docs    the documentation site in $(SITE)/, strictly: no page without a place, no link without a target; runs the notebooks'
	@echo 'make fuzz    hostile arguments for all compiled operators, under the sanitizers; skipped where the compiler has none'
	@echo 'make dist    wheel and sdist in dist/, tried in a clean environment; downloads nothing'
	@echo 'make clean   remove caches, $(SITE)/ and $(DEMO_OUT)/ ($(VENV) stays)'
	@echo 'Variables:   FLAVOUR=cpu|cuda|auto  TORCH_INDEX=<address of PyTorch wheels>  PYTHON=python3.12  DEMO_OUT=dir  SITE=dir'

setup: $(STAMP)

$(STAMP): pyproject.toml $(filter-out requirements/docs.txt,$(wildcard requirements/*.txt))
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 12) or \
	    sys.exit("error: PYTHON: expected Python 3.11 or 3.12, got %d.%d; run `make setup PYTHON=python3.11`" % v)'
	@echo 'setup: installing the $(FLAVOUR) flavour into $(VENV)' >&2
	@rm -f $(VENV)/.stamp-*
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@# Both builds of fbgemm share one folder: with the other one there, neither is whole.
	@if $(PIP) show $(OTHER_FBGEMM); then $(PIP) uninstall --yes fbgemm-gpu fbgemm-gpu-cpu; fi
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    -r requirements/$(FLAVOUR).txt -r requirements/dev.txt
	@$(PIP) install --no-deps -r requirements/torchrec.txt
	@$(BIN)/python -P dnis_torchrec/checks.py $(FLAVOUR)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/python -W ignore -c 'import torchrec'
	@$(BIN)/python -c 'from dnis_torchrec.ops.packed import load_operator; load_operator()'
	@touch $@

# Waiting threads that spin would starve those that work where another process has the cores: minutes, not seconds.
demo: export OMP_WAIT_POLICY ?= passive
demo: $(STAMP)
	@rm -rf $(DEMO_OUT)
	@$(BIN)/dnis search examples.synthetic:demo --compression 10 --out $(DEMO_OUT)/run >/dev/null
	@$(BIN)/dnis export $(DEMO_OUT)/run --out $(DEMO_OUT)/artifact
	@$(BIN)/dnis evaluate $(DEMO_OUT)/artifact --recipe examples.synthetic:demo --json $(DEMO_OUT)/artifact.json >/dev/null
	@$(BIN)/dnis report $(DEMO_OUT)/run

# Bytecode and rewritten assertions are kept even where the environment says not to: each process would make them anew.
test check: export PYTHONDONTWRITEBYTECODE :=
# A file's tests stay in one process: they share the ranks that its fixtures spawn. Files of few tests may be the
# slowest, so they do not wait until the end. Three processes keep two cores busy where one of them waits for ranks.
test: $(STAMP)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --quiet --durations=10 --numprocesses 3 \
	    --dist loadfile --no-loadscope-reorder

check: $(STAMP) docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --quiet -p tests.conftest --doctest-modules dnis_torchrec

$(DOCS)/.stamp: requirements/docs.txt
	@echo 'docs: installing MkDocs into $(DOCS)' >&2
	@test -x $(DOCS)/bin/pip || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip -qq --disable-pip-version-check install -r requirements/docs.txt
	@touch $@

docs: $(DOCS)/.stamp $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir $(SITE)
	@$(BIN)/python -W ignore -m docs.execute --out $(SITE)/notebooks

fuzz: $(STAMP)
	@OMP_WAIT_POLICY=passive $(BIN)/python -W ignore -m tests.fuzz_operators

dist: $(STAMP)
	@rm -rf dist
	@$(BIN)/python -m hatchling build --directory dist >/dev/null
	@DNIS_DIST=dist OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --quiet tests/test_distribution.py
	@ls dist

clean:
	rm -rf $(DEMO_OUT) $(SITE) own_artifact build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
