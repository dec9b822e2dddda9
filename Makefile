# make test    linters, type checker and tests; needs no GPU
# make bench   the benchmark on this machine: on a GPU the grid of 20 shapes, without one a small grid on
#              the CPU; and the lengths of a request trace, if TRACE names one
# make figures the figures of README from the results in FROM, as they were committed
# make lint    linters and type checker
#
# Everything is installed into VENV, made on first use. `VENV=` uses the packages of PYTHON as they are:
#   make bench PYTHON=python3 VENV=

PYTHON ?= python3
VENV ?= .venv
TRACE ?= $(firstword $(wildcard ../shared/data/*trace.jsonl))
CONCURRENCY ?= 1,4,16,64,256
RESULTS ?=
PEERS ?= none
FROM ?= benchmarks/results/h200/blog.json

# A torch that is installed already knows its GPU; without a GPU the CPU build is enough, and naming one
# version keeps pip from fetching gigabytes of CUDA. Triton 3.6.0 is what runs there as an interpreter.
GPU := $(wildcard /dev/nvidia0 /dev/kfd)
CPU_TORCH := torch==2.13.0 triton==3.6.0

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
INSTALLED_bench := use-installed-bench
INSTALLED_dev := use-installed-dev
else
PY := $(VENV)/bin/python
INSTALLED_bench := $(VENV)/.installed-bench
INSTALLED_dev := $(VENV)/.installed-dev
endif

.PHONY: help test lint bench figures clean use-installed-bench use-installed-dev
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# Two processes of one thread each: tensors in tests are too small to share.
test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2

lint: $(INSTALLED_dev)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED_bench)
	$(PY) -m streamla bench --grid blog --peers $(PEERS) $(if $(RESULTS),--json $(RESULTS)/blog.json)
	$(if $(TRACE),$(PY) -m streamla bench --trace $(TRACE) --concurrency $(CONCURRENCY) $(if $(RESULTS),--json $(RESULTS)/ragged.json))

figures: $(INSTALLED_bench)
	$(PY) -m streamla bench report $(FROM) --out docs/figures --formats svg --no-page

$(VENV)/bin/python:
	$(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)
	$(if $(GPU),,$(PY) -m pip install -q $(CPU_TORCH))

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install -q -e '.[$*]'
	@touch $@

use-installed-bench:
	@$(PY) -c 'import torch, triton, typer, rich' 2>/dev/null || $(PY) -m pip install -q -e '.[bench]'

use-installed-dev:
	@$(PY) -c 'import torch, triton, typer, rich, hypothesis, pytest, xdist, ruff, mypy' 2>/dev/null || $(PY) -m pip install -q -e '.[dev]'

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find streamla tests -name __pycache__ -type d -exec rm -rf {} +
