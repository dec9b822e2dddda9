# make test    linters, type checker and tests; needs no GPU
# make bench   the benchmark on this machine: on a GPU the grid of 20 shapes, without one a small grid on
#              the CPU; and the lengths of a request trace, if TRACE names one
# make results every number of README and of the folder OUT, beside the peers that are installed: minutes of a GPU.
#              TRACE adds its traffic; OTHERS names a folder of the peers that cannot share a process with the rest;
#              VLLM the extension of a vLLM wheel that is not installed, for its epilogue
# make verified every case against the oracle in JOBS processes, into OUT; a part of `results`
# make sanitized  every kernel of IMPL on small shapes under compute-sanitizer's memcheck, synccheck and racecheck
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
OUT ?= benchmarks/results/h200
OTHERS ?=
VLLM ?=
FROM ?= $(OUT)/blog.json
IMPL ?= sm90
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))

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

.PHONY: help test lint bench results measured others verified sanitized tables figures clean use-installed-bench use-installed-dev
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

BENCH = $(PY) -m streamla bench

bench: $(INSTALLED_bench)
	$(BENCH) --grid blog --peers $(PEERS) $(if $(RESULTS),--json $(RESULTS)/blog.json)
	$(if $(TRACE),$(BENCH) --trace $(TRACE) --concurrency $(CONCURRENCY) $(if $(RESULTS),--json $(RESULTS)/ragged.json))

# Fast kernels first and together. Slow ones are measured apart: interleaved with them, ours would run on a hotter GPU
# at lower clocks.
measured: $(INSTALLED_bench)
	$(BENCH) --grid blog --peers flashmla-a8w8,flashmla-bf16,fa3-qv --json $(OUT)/blog.json
	$(BENCH) --grid blog --format bf16 --peers fa3-qv --json $(OUT)/blog-bf16.json
	$(BENCH) --grid heads,mtp --peers flashmla-a8w8,fa3-qv --json $(OUT)/heads.json
	$(BENCH) --grid pages,small --json $(OUT)/grids.json
	$(BENCH) --grid formats --peers flashmla-a8w8,fa3-qv --energy --json $(OUT)/formats.json
	$(if $(TRACE),$(BENCH) --trace $(TRACE) --concurrency $(CONCURRENCY) --samples 3 --json $(OUT)/ragged.json)
	$(BENCH) epilogue --requests 1,8,16,64 $(if $(VLLM),--vllm $(VLLM)) --json $(OUT)/epilogue.json
	$(BENCH) timeline --json $(OUT)/epilogue-timeline.json
	$(BENCH) --grid blog --impl none --peers flashinfer-fa2,flashinfer-fa3,flashinfer-fa2-bf16,flashinfer-fa3-bf16 --json $(OUT)/flashinfer.json
	$(BENCH) --grid blog --impl portable --peers vllm-triton,torch-eager --json $(OUT)/slow.json
	$(BENCH) --grid blog --impl none --peers torch-sdpa --max-tokens 128K --json $(OUT)/sdpa.json
	$(if $(OTHERS),$(MAKE) others)

others: $(INSTALLED_bench)
	PYTHONPATH=$(OTHERS):$$PYTHONPATH $(BENCH) --grid blog --impl none --peers flashmla-tokenspeed,tileops,tileops-bf16 --json $(OUT)/others.json

verified: $(INSTALLED_bench)
	$(PY) -m streamla verify --jobs $(JOBS) --failures --json $(OUT)/verify.json
	$(PY) -m streamla verify --jobs $(JOBS) --impl portable --failures --json $(OUT)/verify-portable.json

# The filter leaves out torch's kernels. racecheck follows kernels that are built for it (streamla/runtime/nvrtc.py).
SANITIZER = compute-sanitizer --print-limit 20 --show-backtrace no --kernel-name kns=mla_ --error-exitcode 1
SANITIZED = $(PY) -m streamla.testing.sanitized --impl $(IMPL)

sanitized: $(INSTALLED_bench)
	$(SANITIZER) --tool memcheck --report-api-errors no $(SANITIZED)
	$(SANITIZER) --tool synccheck $(SANITIZED)
	STREAMLA_RACECHECK=1 $(SANITIZER) --tool racecheck $(SANITIZED)

results: verified measured
	$(MAKE) tables figures

RUNS = blog blog-bf16 heads formats grids ragged flashinfer slow sdpa others

tables: $(INSTALLED_bench)
	$(BENCH) collect $(wildcard $(RUNS:%=$(OUT)/%.json)) --json $(OUT)/attention.json
	$(BENCH) tables $(OUT)/attention.json --into README.md --into $(OUT)/README.md

figures: $(INSTALLED_bench)
	$(BENCH) report $(FROM) --out docs/figures --formats svg --no-page
	$(if $(wildcard $(OUT)/epilogue-timeline.json),$(BENCH) timeline --from $(OUT)/epilogue-timeline.json --svg docs/figures/epilogue-timeline.svg)

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
