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
# One interpreter for every build, else each of them builds PyO3 anew.
export PYO3_PYTHON := $(BIN)/python

RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find crates proto -name '*.rs' -o -name 'Cargo.toml' -o -name '*.proto')
GENERATE := $(BIN)/python -m grpc_tools.protoc -I proto \
	--python_out=python --pyi_out=python --grpc_python_out=python

.PHONY: help demo serve model test test-gpu lint fmt bench setup setup-dev check proto requirements clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: setup ## Serve the default model, ask one question, show where the time went
	@$(BIN)/tasuki demo

serve: setup ## Serve the default model until Ctrl-C
	@exec $(BIN)/tasuki serve

model: setup ## Fetch and convert the default model, unless it is there
	@$(BIN)/tasuki model fetch smollm2-135m >/dev/null

test: setup-dev lint model ## Everything that is checked: lint, Rust tests, Python tests
	@mkdir -p target
	@cargo test --release --workspace 2>&1 | tee target/cargo-test.log
	@$(BIN)/python -m pytest 2>&1 | tee target/pytest.log; \
	echo; echo "cargo test:"; grep '^test result' target/cargo-test.log; \
	echo "pytest:"; tail -n 1 target/pytest.log

test-gpu: setup-dev ## The tests that need an NVIDIA GPU, their log kept (4 min once kernels are compiled)
	@PYTHON=$(BIN)/python tools/gpu_suite.sh

lint: setup-dev ## Formats, types, warnings, who may import what, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_imports.py
	tools/check_proto.sh $(BIN)/python
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings

fmt: setup-dev ## Format Python and Rust
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .
	cargo fmt --all

bench: setup ## Colocated against every split of three workers here (10 min), with pictures
	@$(BIN)/tasuki bench sweep benchmarks/sweep.yaml
	@$(BIN)/tasuki plot results/sweep --out results/plots

proto: setup-dev ## Generate the Python side of the contract
	$(GENERATE) proto/tasuki/v1/*.proto

requirements: setup-dev ## Pin the newest requirements that fit pyproject.toml
	$(BIN)/python tools/pin_requirements.py

setup: $(STAMPS)/runtime $(STAMPS)/native ## What serving needs: .venv, requirements, the Rust extension

setup-dev: setup $(STAMPS)/dev ## And what testing needs

check: ## What must be there before: Python, C compiler, Rust
	@tools/check_prerequisites.sh >/dev/null

$(STAMPS)/venv: | check
	@echo "setup: making .venv"
	@[ -x $(BIN)/python ] || "$$(tools/check_prerequisites.sh)" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: requirements.txt $(STAMPS)/venv | check
	@echo "setup: installing requirements.txt (torch comes with CUDA: about 3 GB the first time) …"
	@tools/install_requirements.sh $(VENV) -r requirements.txt -c requirements-dev.txt maturin
	@touch $@

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/runtime | check
	@echo "setup: installing requirements-dev.txt …"
	@tools/install_requirements.sh $(VENV) -r requirements-dev.txt
	@touch $@

$(STAMPS)/native: $(RUST_SOURCES) $(STAMPS)/runtime | check
	@echo "setup: building the Rust extension (minutes the first time) …"
	@tools/build_native.sh $(VENV)
	@touch $@

clean: ## Remove what was built (not the model cache)
	rm -rf .venv target dist python/tasuki/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
