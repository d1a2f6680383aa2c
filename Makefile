# Two commands set up everything: `make say TEXT="..."` and `make test`. Both are idempotent. `make cpu` before them takes
# PyTorch without CUDA.
# PYTHON must be 3.11 or newer. The virtual environment is .venv.

PYTHON ?= python3
TEXT ?= The birch canoe slid on the smooth planks.
OUT ?= out.wav
BIN := .venv/bin
REFERENCE := .venv-reference
CLIENTS := .venv-clients
FISH_SPEECH := $(REFERENCE)/fish-speech

PIP := $(BIN)/pip --disable-pip-version-check

# Runs a command. On a terminal its latest line is shown in place; all of its output is in .venv/install.log, and shown if
# it fails.
QUIETLY = f() { log=.venv/install.log; rm -f $$log.failed; \
  { "$$@" 2>&1 || touch $$log.failed; } | tee $$log | \
  { while IFS= read -r line; do [ ! -t 2 ] || printf '\r\033[K%.78s' "$$line" >&2; done; [ ! -t 2 ] || printf '\r\033[K' >&2; }; \
  [ ! -e $$log.failed ] || { cat $$log; rm $$log.failed; return 1; }; }; f
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: say cpu test check format parity slow gpu clients targets dist clean
.DELETE_ON_ERROR:

say: .venv/.installed
	@$(BIN)/sonoro say "$(TEXT)" -o $(OUT) --force
	@echo 'Next: . .venv/bin/activate, then: sonoro "Hello." speaks aloud, and sonoro alone shows more'

# PyTorch from its own index, for a machine without an NVIDIA GPU. Wheels of 2.13.0 for Linux on x86-64: .2 GB in place of
# 2.7, which is torch (.5) with the libraries of CUDA that it needs, as PyPI lists them.
cpu: | .venv/bin/python
	@echo "Installing PyTorch $(TORCH) without CUDA into .venv: about 200 MB"
	@$(QUIETLY) $(PIP) install --no-deps --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)

# In more processes than cores, as tests wait for servers and engines; each takes over tests of the others when it has
# none left. Hundreds of processes import the package: its bytecode is kept.
test: .venv/.installed-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 4 --dist worksteal

check: .venv/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

slow: .venv/.installed-test
	$(BIN)/python -m pytest -q -m slow

# For a machine with a GPU: kernels, graphs, the released sizes with random weights.
gpu: .venv/.installed-test
	$(BIN)/python -m pytest -q -m gpu -n 4 --report benchmarks/results/tests-gpu.json

# Every kernel variant of the three families for eight kinds of GPU, none of which need be there: a second or more of a core each.
# What is there of the same code is kept, so that it may be interrupted; a sample of it is tests/test_targets.py.
targets: .venv/.installed-test
	$(BIN)/python benchmarks/targets.py --out benchmarks/results/targets.json

# What a release needs: a wheel for this platform and a source distribution in dist/, checked, their contents listed. The
# wheel speaks in an environment that borrows its dependencies; without --borrow tools/try_wheel.py installs them too.
dist: .venv/.installed .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist . >build.log 2>&1 || { cat build.log; exit 1; }
	@rm build.log
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/python -m zipfile --list dist/*.whl
	ls -l dist
	$(BIN)/python tools/try_wheel.py dist/*.whl --borrow

.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check build twine
	@touch $@

# Unmodified clients of docs/clients.md, 830 MB in an environment of their own, speaking through `sonoro serve`. Minutes, so
# that CI replays what was recorded from them in their place: `make clients RECORD=tests/server/dialects/recordings`.
clients: .venv/.installed $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -q -c tests/clients/pytest.ini --confcutdir tests/clients tests/clients $(RECORD:%=--record %)

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	mkdir -p $(CLIENTS)/npm && cp tests/clients/package.json $(CLIENTS)/npm
	! command -v npm >/dev/null || npm install --silent --prefix $(CLIENTS)/npm
	@touch $@

# The stored reference tensors made anew by the official implementation, and our tests against them.
# Fish's code is under the Fish Audio Research License: it is run here, for research, and nothing of it is kept.
parity: .venv/.installed-test $(REFERENCE)/.installed $(FISH_SPEECH)
	OMP_NUM_THREADS=1 $(REFERENCE)/bin/python tools/reference/qwen3_tts.py --out build/reference/qwen3_tts
	OMP_NUM_THREADS=1 $(REFERENCE)/bin/python tools/reference/fish_s2.py --source $(FISH_SPEECH) --out build/reference/fish_s2
	OMP_NUM_THREADS=1 $(REFERENCE)/bin/python tools/reference/fish_s2_codec.py --source $(FISH_SPEECH) --out build/reference/fish_s2
	OMP_NUM_THREADS=1 $(REFERENCE)/bin/python tools/reference/voxcpm2_vae.py --out build/reference/voxcpm2
	OMP_NUM_THREADS=1 $(REFERENCE)/bin/python tools/reference/pocket_tts.py --out build/reference/pocket_tts
	$(BIN)/python -m pytest -q --reference build/reference/qwen3_tts tests/test_reference_assets.py tests/models

$(REFERENCE)/.installed: tools/reference/requirements.txt
	$(PYTHON) -m venv $(REFERENCE)
	$(REFERENCE)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(REFERENCE)/bin/pip install --quiet --disable-pip-version-check -r tools/reference/requirements.txt
	$(REFERENCE)/bin/pip install --quiet --disable-pip-version-check --no-deps qwen-tts==0.1.1 descript-audio-codec==1.0.0 voxcpm==2.0.3 pocket-tts==4.0.1
	@touch $@

$(FISH_SPEECH): | $(REFERENCE)/.installed
	rm -rf $@.part
	git clone --quiet https://github.com/fishaudio/fish-speech $@.part
	git -C $@.part checkout --quiet 3dd1f85c402ee6f0a17c2971d3b0dd8d881ca139
	mv $@.part $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@echo "Making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt $(wildcard hatch_build.py src/sonoro/native/build.py src/sonoro/native/*.[ch] src/sonoro/models/*/*.c) | .venv/bin/python
	@echo "Installing sonoro and what it needs into .venv, once; the log is .venv/install.log"
	@$(PIP) show --quiet torch 2>/dev/null || [ "$$(uname)" != Linux ] || \
	  echo "PyTorch comes with CUDA, 2.7 GB in all; without an NVIDIA GPU stop here, and let \"make cpu\" fetch .2 GB instead"
	@$(QUIETLY) $(PIP) install -c constraints.txt -e .
	@touch $@

.venv/.installed-test: pyproject.toml constraints.txt .venv/.installed
	@echo "Installing what the tests need into .venv, once"
	@$(QUIETLY) $(PIP) install -c constraints.txt -e ".[test]"
	@touch $@

clean:
	rm -rf .venv .venv-dist .venv-reference .venv-clients build dist out.wav
