PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart test fuzz fuzz-merge lint clean

FUZZ_RUNS ?= 1000000

# The marker is remade when the dependencies change, so that a second call starts at once.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[envs,data,gym,rewards,mcp,clients,nixl,dev]'
	touch $@

# The clients that verifiers wants are older than ours: it has a place of its own, and takes the rest from the venv.
$(VENV)-verifiers/.installed: $(VENV)/.installed
	test -x $(VENV)-verifiers/bin/python || $(PYTHON) -m venv $(VENV)-verifiers
	$(VENV)-verifiers/bin/pip install --quiet 'verifiers>=0.4,<0.5' 'openenv>=0.4'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VENV)-verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/streamrl.pth
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/streamrl launch --config quickstart

test: $(VENV)/.installed $(VENV)-verifiers/.installed lint
	$(BIN)/python -m pytest
	$(VENV)-verifiers/bin/python -m pytest tests/envs/test_adapters_verifiers.py tests/envs/test_adapters_openenv.py

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
	rm -rf $(VENV) $(VENV)-verifiers .pytest_cache .mypy_cache .ruff_cache .hypothesis
