# Every target sets up what it needs; nothing is repeated when nothing changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
export PATH := $(PATH):$(HOME)/.cargo/bin
export VIRTUAL_ENV := $(VENV)
# uv installs no bytecode: with this variable every process would compile PyTorch's Python again.
unexport PYTHONDONTWRITEBYTECODE
# One interpreter for every build, else each of them builds PyO3 anew.
export PYO3_PYTHON := $(BIN)/python

RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find crates proto -name '*.rs' -o -name 'Cargo.toml' -o -name '*.proto')
# The extension is compiled while packages are downloaded and the model is converted.
SIDE_BY_SIDE := $(MAKE) --jobs=3
GPU_STAMP := $(if $(wildcard /dev/nvidiactl),$(STAMPS)/gpu)
define ANNOUNCEMENT
setup: will get, where they are not in a cache of this machine:
setup:   Python packages   3.2 GB  (PyTorch with its CUDA libraries; 6 GB in .venv)
setup:   Rust crates        39 MB
setup:   default model      93 MB  (not for --model; 273 MB in ~/.cache/tasuki)
endef
export ANNOUNCEMENT
GENERATE := $(BIN)/python -m grpc_tools.protoc -I proto \
	--python_out=python --pyi_out=python --grpc_python_out=python

FOREIGN_MODEL := $(or $(TASUKI_CACHE),$(HOME)/.cache/tasuki)/models/smollm2-135m-instruct

# What `make quick` leaves out, and the crates whose tests it runs: those without sockets.
QUICK_MARKERS := not (system or interpreter or slow or long or gpu or cluster or upgrade)
QUICK_CRATES := -p tasuki-core -p tasuki-flow -p tasuki-policy -p tasuki-searches -p tasuki-text -p tasuki-cpu

# Features that are off by default; all commands have the same, else dependencies are compiled twice.
RUST_FEATURES := --features tasuki-router/otel
# Discovery by Kubernetes has crates that compile for a quarter of an hour: `make test-cluster` and `make test-kubernetes`.
CLUSTER_FEATURES := $(RUST_FEATURES),tasuki-router/kubernetes
CLUSTER_TOOLS := $(or $(TASUKI_CLUSTER_TOOLS),$(HOME)/.cache/tasuki/cluster-tools)

.PHONY: help demo serve model test test-gpu test-gpu-emulated test-kernels lint fmt bench setup setup-dev check proto requirements clean
.PHONY: chaos cluster-tools fuzz fuzz-coverage test-all test-clients test-cluster test-kubernetes test-sglang test-upgrade test-vllm test-long test-search quick quick-checks quick-tests lint-python lint-rust
.PHONY: setup-gpu announce model-files wheel

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: ## Serve the default model, ask one question, show where the time went
	@$(SIDE_BY_SIDE) $(STAMPS)/package $(GPU_STAMP) model-files
	@$(BIN)/tasuki demo

serve: setup ## Serve the default model until Ctrl-C
	@exec $(BIN)/tasuki serve

model: setup model-files ## Fetch and convert the default model, unless it is there

model-files: $(STAMPS)/runtime
	@PYTHONPATH=python $(BIN)/python -m tasuki model fetch smollm2-135m >/dev/null

quick: $(STAMPS)/dev ## Lint, types and all tests that start no process (2 min after a change of a line)
	@[ -e python/tasuki/_native.abi3.so ] || $(MAKE) setup
	@$(MAKE) --jobs=2 --output-sync=target quick-checks quick-tests

quick-checks: lint-python lint-rust
	@cargo test --quiet $(QUICK_CRATES) --lib --tests

quick-tests:
	@TASUKI_TEST_SCHEDULES=$${TASUKI_TEST_SCHEDULES:-5} \
		$(BIN)/python -m pytest -q -n 2 -m "$(QUICK_MARKERS)"

# With all features, as the wheel has them.
test: ## Everything that is checked: lint, Rust tests, Python tests
	@$(MAKE) setup-dev FEATURES=tls,otel
	@$(MAKE) test-all

# On two cores: what uses one of them runs beside something else.
test-all: setup-dev
	@mkdir -p target
	@$(MAKE) --jobs=3 --output-sync=target lint-python lint-rust model-files
	@cargo test --workspace $(RUST_FEATURES) 2>&1 | tee target/cargo-test.log
	@set -m; nice make fuzz FUZZ_S=60 FUZZ_PROFILE=test TASUKI_TEST_SEED=0 >target/fuzz.log 2>&1 & fuzz=$$!; set +m; \
	trap "kill -- -$$fuzz 2>/dev/null || :" EXIT; failed=0; \
	$(BIN)/python -m pytest -n 2 --max-worker-restart 0 -m "not (long or cluster or upgrade)" 2>&1 | \
		tee target/pytest.log || failed=1; \
	wait $$fuzz || { failed=1; cat target/fuzz.log; }; \
	echo; echo "cargo test:"; grep '^test result' target/cargo-test.log; \
	echo "fuzz:"; tail -n 1 target/fuzz.log; echo "pytest:"; tail -n 1 target/pytest.log; exit $$failed

test-long: setup-dev model ## What `make test` has a shorter version of
	@$(BIN)/python -m pytest -m long

chaos: setup-dev ## Faults of all kinds under load for CHAOS_S seconds (600) by CHAOS_SEED (random)
	@TASUKI_CHAOS_S=$${CHAOS_S:-600} TASUKI_CHAOS_SEED=$${CHAOS_SEED:-random} \
		$(BIN)/python -m pytest -s tests/faults/test_chaos.py

test-search: setup-dev ## Random searches with new seeds (TASUKI_TEST_SCHEDULES: cases of each, 20,000)
	@export TASUKI_TEST_SEED=$${TASUKI_TEST_SEED:-random}; \
	export TASUKI_TEST_SCHEDULES=$${TASUKI_TEST_SCHEDULES:-20000}; \
	cargo test -p tasuki-router -p tasuki-flow -p tasuki-policy -p tasuki-bench $(RUST_FEATURES) --lib --tests; \
	$(BIN)/python -m pytest -m "search or hypothesis" --timeout 0

fuzz: setup-dev ## Fuzzing of what clients, workers and models send: FUZZ_S seconds (300), with new seeds
	@mkdir -p target && rm -f target/fuzz.jsonl
	@export TASUKI_FUZZ_S=$$(( $${FUZZ_S:-300} / 10 )) TASUKI_FUZZ_COUNTS=$(CURDIR)/target/fuzz.jsonl; \
	export TASUKI_TEST_SEED=$${TASUKI_TEST_SEED:-random}; \
	cargo test --quiet --profile $${FUZZ_PROFILE:-fuzz} --workspace $(RUST_FEATURES) --lib --test fuzz fuzzed_ -- --test-threads 1 --nocapture; \
	$(BIN)/python -m pytest -q -s -k harm --timeout 0 tests/worker/test_fuzz.py

fuzz-coverage: setup-dev ## Lines of the Rust parsers that fuzzing executes, as a table: FUZZ_S seconds (300)
	@$(BIN)/python tools/fuzz_coverage.py

test-clients: setup model-files ## Clients that people use (langchain-openai, openai, ai, sglang.bench_serving) against tasuki serve
	@mkdir -p target/clients && cp tests/clients/package.json target/clients/
	@[ -x target/clients/venv/bin/python ] || $(BIN)/python -m venv target/clients/venv
	@tools/install_requirements.sh target/clients/venv -r tests/clients/requirements.txt
	@tools/install_sglang_bench.sh target/clients/sglang $(VENV)
	@cd target/clients && npm install --no-package-lock --no-audit --no-fund --silent
	@$(BIN)/python tests/clients/run.py

test-cluster: setup-dev ## A Ray cluster in a network namespace (root), its log kept; discovery by Kubernetes
	@cargo test -p tasuki-router $(CLUSTER_FEATURES) --lib discovery
	@PYTHON=$(BIN)/python tools/cluster_suite.sh ray

test-vllm: ## Two real vLLM workers on the CPU behind the router, alone and split (3 GB, 5 minutes)
	@tools/install_vllm.sh target/vllm
	@[ -e $(FOREIGN_MODEL)/config.json ] || $(MAKE) model
	@cargo build --quiet -p tasuki-router --bin tasuki-router
	@python3 tools/test_vllm.py --vllm target/vllm/venv/bin/vllm --model $(FOREIGN_MODEL) \
		--router target/debug/tasuki-router --logs target/vllm/logs | tee target/vllm/test.log

test-sglang: setup ## Three real SGLang workers on the CPU behind the router, alone and split (7 GB, 4 minutes)
	@tools/install_sglang.sh target/sglang
	@[ -e $(FOREIGN_MODEL)/config.json ] || $(MAKE) model
	@cargo build --quiet -p tasuki-router --bin tasuki-router
	@python3 tools/test_sglang.py --python target/sglang/venv/bin/python --model $(FOREIGN_MODEL) \
		--router target/debug/tasuki-router --tasuki $(BIN)/tasuki --logs target/sglang/logs | \
		tee target/sglang/test.log

cluster-tools: ## Helm and a Kubernetes control plane, built once (an hour of one core, 6 GB of caches, 430 MB kept)
	@tools/build_cluster_tools.sh $(CLUSTER_TOOLS)

test-kubernetes: setup-dev cluster-tools ## A real control plane and process kubelets that run this chart (root), the log kept
	@cargo build -p tasuki-router $(CLUSTER_FEATURES) --bin tasuki-router
	@TASUKI_CLUSTER_TOOLS=$(CLUSTER_TOOLS) PYTHON=$(BIN)/python tools/cluster_suite.sh kubernetes

test-upgrade: setup-dev ## The release BASE (the newest) and this checkout together, the log kept; builds what is not there
	@PYTHON=$(BIN)/python tools/upgrade_suite.sh $(BASE)

test-gpu: setup-dev setup-gpu ## The tests that need an NVIDIA GPU, their log kept
	@PYTHON=$(BIN)/python tools/gpu_suite.sh

test-gpu-emulated: setup-dev ## GPU tests with compute capability 8.0, 8.9, 12.0, or no FlashInfer, reported
	@PYTHON=$(BIN)/python tools/gpu_emulated.sh

test-kernels: setup-dev ## Compile every Triton kernel in every configuration for every GPU architecture
	@TASUKI_TEST_KERNELS=full $(BIN)/python -m pytest tests/kernels

lint: setup-dev lint-python lint-rust ## Formats, types, warnings, who may import what, generated code

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_results.py
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/python tools/make_errors.py --check
	$(BIN)/python tools/make_reference.py --check
	tools/check_proto.sh $(BIN)/python
	$(BIN)/python tools/check_contract.py

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(RUST_FEATURES) -- -D warnings

fmt: setup-dev ## Format Python and Rust
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .
	cargo fmt --all

bench: setup ## Colocated against every split of three workers here (10 min), with pictures
	@$(BIN)/tasuki bench sweep benchmarks/sweep.yaml
	@$(BIN)/tasuki plot results/sweep --out results/plots

proto: $(STAMPS)/dev ## Generate both sides of the contract, docs/api.md and docs/metrics.md
	$(GENERATE) proto/tasuki/v1/*.proto
	TASUKI_WRITE_GENERATED=1 cargo test --quiet -p tasuki-wire
	TASUKI_WRITE_GENERATED=1 cargo test --quiet -p tasuki-router $(RUST_FEATURES) --lib the_page_is_made

requirements: setup-dev ## Pin the newest requirements that fit pyproject.toml
	$(BIN)/python tools/pin_requirements.py

setup: ## What serving needs: .venv, requirements, the Rust extension
	@$(SIDE_BY_SIDE) $(STAMPS)/package $(GPU_STAMP)

setup-dev: setup $(STAMPS)/dev ## And what testing needs

setup-gpu: setup $(STAMPS)/gpu ## And FlashInfer; part of setup where there is an NVIDIA GPU

check: ## What must be there before: Python, C compiler, Rust
	@tools/check_prerequisites.sh >/dev/null

announce: | check
	@[ -e $(STAMPS)/runtime ] || echo "$$ANNOUNCEMENT"

$(STAMPS)/venv: | check announce
	@echo "setup: making .venv"
	@[ -x $(BIN)/python ] || "$$(tools/check_prerequisites.sh)" -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@tools/install_requirements.sh $(VENV) -c requirements-dev.txt maturin
	@touch $@

$(STAMPS)/runtime: requirements.txt $(STAMPS)/venv | check
	@echo "setup: installing requirements.txt …"
	@tools/install_requirements.sh $(VENV) -r requirements.txt
	@touch $@

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/runtime | check
	@echo "setup: installing requirements-dev.txt …"
	@tools/install_requirements.sh $(VENV) -r requirements-dev.txt
	@touch $@

$(STAMPS)/gpu: requirements-gpu.txt $(STAMPS)/runtime | check
	@echo "setup: installing requirements-gpu.txt (FlashInfer) …"
	@tools/install_requirements.sh $(VENV) -r requirements-gpu.txt
	@touch $@

# Features of the extension that serving does not need, with commas between them: tls for https in
# `bench serve` and the router, otel for traces.
FEATURES ?= $(shell cat $(STAMPS)/native 2>/dev/null)
ifneq ($(FEATURES),$(shell cat $(STAMPS)/native 2>/dev/null))
.PHONY: $(STAMPS)/native
endif
$(STAMPS)/native: $(RUST_SOURCES) $(STAMPS)/venv | check
	@echo "setup: building the Rust extension (minutes the first time) …"
	@tools/build_native.sh $(VENV) $(FEATURES)
	@echo "$(FEATURES)" >$@

$(STAMPS)/package: pyproject.toml | $(STAMPS)/native $(STAMPS)/runtime
	@features="$(FEATURES)"; MAKEFLAGS= \
	MATURIN_PEP517_ARGS="--features extension-module$${features:+,$$features}" \
	tools/install_requirements.sh $(VENV) --no-deps --no-build-isolation -e .
	@touch $@

wheel: $(STAMPS)/venv ## A wheel for pip in dist/, with the manylinux tag of the glibc it requires
	@MAKEFLAGS= PATH=$(BIN):$$PATH tools/build_wheel.sh dist

clean: ## Remove what was built (not the model cache)
	rm -rf .venv target dist python/tasuki/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
