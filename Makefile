# make demo, make serve and make test do all of their set-up: they need Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# At a terminal pip shows what comes, in bars; elsewhere it stays quiet. Errors are shown in any case.
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(shell [ -t 2 ] || echo --quiet)
# Workers take neighbouring tests, which share what they load. Imports are compiled once, whatever the shell says.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# The kernel is compiled once, also for several Pythons, where ccache is installed.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CCACHE_NOHASHDIR := 1
endif

.PHONY: help demo serve test card night soak mutants quick changed check lint format types imports docs site kernel-check kernel-check-arm clients lm-eval bench wheel wheels smoke tag clean

help: ## Show what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# What make demo and make serve run: a real model, fetched once, and the bundled one where that cannot be. Both need no
# torch; where another MODEL= does, it is said in a sentence, with the command that brings it.
MODEL ?= smollm2
WITH_MODEL = model='$(MODEL)'; \
	if [ "$$model" = smollm2 ] && ! $(BIN)/kvcellar models pull smollm2 >/dev/null; then \
		echo "going on with demo, the bundled model, which writes only what looks like Python" >&2; model=demo; \
	fi; exec $(BIN)/kvcellar

demo: $(VENV)/.runtime ## Set up, then watch a model branch: one trunk, four forks
	@$(WITH_MODEL) demo "$$model"

serve: $(VENV)/.runtime ## Set up, then serve a model (MODEL=, ARGS=): OpenAI, Anthropic, agents, and a page to look at
	@$(WITH_MODEL) serve "$$model" $(ARGS)

test: $(VENV)/.dev ## Set up, then lint, types, imports and all tests
	@$(MAKE) --no-print-directory -j4 check
	@$(BIN)/python -m tests.real_models
	KVCELLAR_PROVE=1 KVCELLAR_ARTEFACTS=build/viewer $(PYTEST) --durations=25
	$(PYTEST) -n 0 --card -m 'card(first=True)' tests/engine/test_ahead.py tests/agents/test_adapters.py \
		tests/cli/test_generate.py tests/server/test_openai.py

card: export TRITON_INTERPRET := $(if $(shell command -v nvidia-smi),0,1)
card: $(VENV)/.dev ## A card's whole path, on a card where there is one, else on what stands in for it
	HYPOTHESIS_PROFILE=night KVCELLAR_ALL_CASES=1 $(PYTEST) tests/backends/gpu
	$(PYTEST) -n 0 --card -m card tests/engine tests/agents tests/models tests/cli tests/server

night: $(VENV)/.dev ## All tests with every case of the suites and long random walks, drawn anew: hours
	@$(BIN)/python -m tests.real_models
	HYPOTHESIS_PROFILE=night KVCELLAR_ALL_CASES=1 KVCELLAR_FUZZ=30 KVCELLAR_KILLS=50 $(PYTEST)

MINUTES ?= 20
SEED ?= 1
soak: $(VENV)/.dev ## Simulated agents against a server for MINUTES=20, drawn from SEED=1: no wrong token, nothing left, or exit 1
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.soak --minutes $(MINUTES) --seed $(SEED)

mutants: $(VENV)/.dev ## Small changes of bookkeeping, prefix and store that no test of theirs notices: hours; MUTANTS='kvcellar.prefix.* --sample 300' for some
	@$(PIP) mutmut==3.8.1
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(MUTANTS)

QUICK := $(wildcard tests/test_*.py) tests/bookkeeping tests/prefix tests/engine tests/store tests/agents \
	tests/cli/test_cli.py tests/server/test_openai.py tests/server/test_anthropic.py

quick: $(VENV)/.dev ## Lint, and the tests that matter most: no kernel, no runtime but torch, no random walks, nothing slow
	@$(MAKE) --no-print-directory lint imports
	HYPOTHESIS_PROFILE=quick $(PYTEST) $(QUICK) -k "not no_sequence_of_verbs and not runTest" \
		-m "not slow and not kernel and not mlx and not executorch and not browser"

BASE ?= main
changed: $(VENV)/.dev ## The tests that the changes since BASE=main need: those of their tiers, or all where the core changed
	$(PYTEST) --changed $(BASE)

check: lint types imports docs site ## What needs no test run

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cpp')
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/hadolint Dockerfile

format: $(VENV)/.dev ## What lint asks for, done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cpp')

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/mypy tests/cellar/program.py  # a user's program, of the public names

imports: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(BIN)/python tools/write_cli_docs.py --check
	$(BIN)/python tools/write_http_docs.py --check
	$(BIN)/python tools/write_tour.py --check
	$(BIN)/python tools/write_kernel_stub.py --check
	$(BIN)/python tools/write_sync_cellar.py --check

site: $(VENV)/.dev ## The manual as a site, in build/site: links and anchors checked, nothing fetched
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

CHECK := src/kvcellar/kernel/native/check

kernel-check: ## Random steps of every level of the CPU kernel that x86 has, under the sanitisers, what is missing emulated
	@cmake -S $(CHECK) -B build/kernel-check -DCMAKE_BUILD_TYPE=RelWithDebInfo
	@cmake --build build/kernel-check -j
	ASAN_OPTIONS=detect_leaks=0 build/kernel-check/check_kernel 1000

kernel-check-arm: ## The same steps with NEON, emulated; needs g++-aarch64-linux-gnu and qemu-user
	@cmake -S $(CHECK) -B build/kernel-check-arm -DKVC_SANITISE=OFF \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	@cmake --build build/kernel-check-arm -j
	qemu-aarch64 build/kernel-check-arm/check_kernel 200

clients: $(VENV)/.dev ## Claude Code, Codex, OpenCode, Aider and others, from npm and PyPI: a coding session of each
	@$(BIN)/python tools/run_clients.py $(ARGS)

lm-eval: $(VENV)/.dev ## Scores of lm-eval, from PyPI, through the server and by transformers: they have to agree
	@$(BIN)/python tools/run_lm_eval.py $(ARGS)

bench: $(VENV)/.dev ## Every benchmark, the quick way
	@for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script --quick || exit 1; done

PREBUILT := src/kvcellar/backends/executorch/prebuilt

wheel: $(VENV)/.dev ## A wheel in dist/ for machines like this one, with ExecuTorch's native part inside, too
	@rm -rf build/bdist.* build/lib.* build/temp.* $(PREBUILT)
	@$(BIN)/python -W ignore -c 'from kvcellar.backends.executorch import building as b; print(b.build(b.PREBUILT))'
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps -w dist .
	@rm -rf $(PREBUILT)

wheels: $(VENV)/.dev ## What is published, in dist/: the source distribution, wheels for x86-64 and ARM, checked
	@$(BIN)/python tools/build_wheels.py

smoke: $(VENV)/.dev ## docs/first-ten-minutes.md, word for word, and families, with a wheel, an empty home and no compiler
	@rm -f dist/*.whl
	@$(BIN)/python tools/build_wheels.py --here
	@$(BIN)/python tools/smoke.py

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/kvcellar/version.py)

tag: ## Tag the commit with the version of version.py, for which CHANGELOG.md has to have a date
	@git diff --quiet HEAD || { echo "commit first" >&2; exit 1; }
	@grep -qE '^## $(VERSION) \([0-9-]+\)$$' CHANGELOG.md || \
		{ echo "CHANGELOG.md begins without a date; write: ## $(VERSION) ($$(date +%F))" >&2; exit 1; }
	@git tag --annotate --message 'kvcellar $(VERSION)' v$(VERSION)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "kvcellar needs Python 3.11 or newer, this is %d.%d; set PYTHON=" % v[:2])'
	@echo "set-up: an environment of Python in $(VENV) (seconds)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# For tests torch comes first and alone: the pinned release, so that no other requirement brings another build.
$(VENV)/.torch: pyproject.toml | $(BIN)/python
	@torch="$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["torch"][0])')"; \
		echo "set-up: $$torch (200 MB to fetch, on Linux 3 GB where it comes with NVIDIA's libraries; minutes)"; \
		$(PIP) "$$torch"
	@touch $@

# The CPU attention kernel is built here, if there is a compiler; again when its sources change.
KERNEL := $(wildcard src/kvcellar/kernel/native/*.* src/kvcellar/kernel/native/*/*)

# One installation each, since each builds the kernel; the larger one is good for both.
$(VENV)/.runtime: TAKES := 40 MB to fetch
$(VENV)/.dev: EXTRAS := [all,dev]
$(VENV)/.dev: TAKES := with all that tests need, 1 GB to fetch
$(VENV)/.dev: LESS := $(VENV)/.runtime

$(VENV)/.dev: $(VENV)/.torch

$(VENV)/.runtime $(VENV)/.dev: pyproject.toml setup.py $(KERNEL) | $(BIN)/python
	@echo "set-up: kvcellar$(EXTRAS) ($(TAKES), and the CPU kernel to compile; minutes)"
	@$(PIP) -e '.$(EXTRAS)'
	@$(BIN)/python -c 'from kvcellar.kernel import levels as k; k.is_available() or print("warning: " + k.why_not())' >&2
	@touch $(LESS) $@
