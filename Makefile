# Everything a contributor runs. A bare clone needs Python 3.10 or newer with venv (Debian: python3-venv) and make; the
# rest goes into .venv.
#
#   make demo         train a small model, kill it in the middle of a save, resume it bit for bit, export it (out/demo/)
#   make test         the tests of what Holdfast does, under 20 minutes on two cores
#   make check        lint, format, strict types, import contracts, house rules
#   make bench        save and load against every peer and the machine's limit (out/bench/)
#   make bench-quick  the same, smaller, under 4 minutes
#   make bench-report put the last run into benchmarks/reports/ and its figures into the documentation
#   make test-full    the slow and large tests too
#   make test-integrations  the adapters, in real jobs of the frameworks they are for (in .venvs/frameworks)
#   make test-rl      weight sync in verl, vLLM and SGLang, as they were released, on CPU (in .venvs/rl, upon the former)
#   make test-integrations-full, test-rl-full   the same with the slow ones
#   make test-stores  checkpoints on object stores: SeaweedFS, Azurite and moto, started on loopback (in .venvs/stores)
#   make test-stores-full  the same with all races, and Ceph's gateway and MiniStack where they are installed
#   make test-view    the page in chromium, with axe-core from npm; `make test` does so without axe-core
#   make docs         the documentation's site, from docs/ and docstrings (out/site/index.html)
#   make test-packaging  wheel and sdist, commands without torch, pyright over the public names (in .venvs/packaging)
#   make test-crash   what is done to break Holdfast, 10 minutes of it: kills, faults, damage, simulated schedules
#   make test-crash-full  the same, whole: 200,000 simulated schedules, every system call killed and failed; hours
#
# On a machine without a GPU the CPU build of torch is a much smaller download:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-for-demo

.DELETE_ON_ERROR:
.PHONY: help venv demo test test-integrations test-integrations-full test-rl test-rl-full test-stores test-stores-full test-view test-packaging test-full test-crash test-crash-full check format docs bench bench-quick bench-report clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(READY)

# An environment has its pip last: one without was interrupted, or had no ensurepip, and is made again.
$(DEMO_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Holdfast needs Python 3.10 or newer, this is " + sys.version)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing Holdfast, torch and transformers into $(VENV): minutes at the first time, without a word"
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt -e ".[demo]"
	@touch $@

$(READY): $(DEMO_READY)
	@echo "Installing what tests, checks and benchmarks need into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt -e ".[demo,test,check,bench]"
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 2>/dev/null \
	|| echo "no NIXL here: without its tests"
	@touch $@

demo: $(DEMO_READY)
	$(BIN)/python examples/demo.py --out out/demo

test: $(READY)
	$(BIN)/python scripts/run_tests.py $(PYTEST_FLAGS)

test-full: $(READY)
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_FLAGS)

VIEW := .venvs/view

$(VIEW)/.ready: tests/view/package.json
	mkdir -p $(VIEW)
	cp tests/view/package.json $(VIEW)/
	npm install --prefix $(VIEW) --no-audit --no-fund --loglevel=error
	@touch $@

test-view: $(READY) $(VIEW)/.ready
	$(BIN)/python -m pytest tests/view -m "not slow and not gpu" $(PYTEST_FLAGS)

PACKAGING := .venvs/packaging

$(PACKAGING)/.ready: tests/packaging/requirements.txt
	test -x $(PACKAGING)/bin/python || $(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -r tests/packaging/requirements.txt
	@touch $@

test-packaging: $(READY) $(PACKAGING)/.ready
	$(BIN)/python -m pytest tests/packaging -o timeout=600 $(PYTEST_FLAGS)

FRAMEWORKS := .venvs/frameworks

$(FRAMEWORKS)/.ready: tests/integrations/requirements.txt pyproject.toml constraints.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt -e ".[test]" \
	-r tests/integrations/requirements.txt
	@touch $@

SELECTED := not slow and not gpu
test-integrations-full test-rl-full: SELECTED := not gpu

test-integrations test-integrations-full: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python scripts/run_tests.py --integrations -m "$(SELECTED)" $(PYTEST_FLAGS)

# verl, vLLM and SGLang without their dependencies, which are for CUDA, upon what the other frameworks have brought.
# What can't be installed is an error of its tests; the others run.
RL := .venvs/rl
RL_TESTS := $(foreach name,verl verl_engine verl_changes vllm sglang,tests/integrations/test_$(name).py)
RL_PIP = $(RL)/bin/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) --no-deps --no-compile
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(RL)/.ready: $(FRAMEWORKS)/.ready tests/integrations/requirements-rl.txt
	test -x $(RL)/bin/python || $(PYTHON) -m venv $(RL)
	echo "import site; site.addsitedir('$$($(FRAMEWORKS)/bin/python -c '$(SITE)')')" \
	> "$$($(RL)/bin/python -c '$(SITE)')/frameworks.pth"
	if $(RL_PIP) --upgrade --target $(RL)/verl-0.8.0 verl==0.8.0 && $(RL_PIP) -r tests/integrations/requirements-rl.txt; \
	then touch $@; \
	else for one in $$(grep == tests/integrations/requirements-rl.txt); do $(RL_PIP) $$one; done; \
	echo "ERROR not all of verl, vLLM and SGLang could be installed: their tests will fail"; fi

PYTEST_RL = -m pytest -m "$(SELECTED)" -o timeout=600 --continue-on-collection-errors $(PYTEST_FLAGS)

test-rl test-rl-full: $(RL)/.ready
	status=0; \
	HOLDFAST_REQUIRE="$$(grep -E '^(ray|sglang|verl|vllm)==' tests/integrations/requirements-rl.txt | xargs)" \
	$(RL)/bin/python $(PYTEST_RL) $(RL_TESTS) || status=$$?; \
	HOLDFAST_REQUIRE="verl==0.8.0" PYTHONPATH=$(CURDIR)/$(RL)/verl-0.8.0 \
	$(RL)/bin/python $(PYTEST_RL) $(filter %verl.py %verl_engine.py,$(RL_TESTS)) || status=$$?; \
	exit $$status

STORES := .venvs/stores

$(STORES)/.ready: tests/stores/requirements.txt tests/stores/package.json pyproject.toml constraints.txt
	test -x $(STORES)/bin/python || $(PYTHON) -m venv $(STORES)
	$(STORES)/bin/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt -e ".[test]" \
	-r tests/stores/requirements.txt
	cp tests/stores/package.json $(STORES)/
	if command -v npm >/dev/null; then npm install --prefix $(STORES) --no-audit --no-fund --loglevel=error; \
	else echo "no npm here: without Azurite"; fi
	@touch $@

test-stores: $(STORES)/.ready
	$(STORES)/bin/python -m pytest tests/stores -m "not slow and not gpu" $(PYTEST_FLAGS)

test-stores-full: $(STORES)/.ready
	test -x $(STORES)/ministack/bin/python || $(PYTHON) -m venv $(STORES)/ministack
	$(STORES)/ministack/bin/python -m pip install --disable-pip-version-check -q -r tests/stores/requirements-full.txt
	HOLDFAST_STORES=seaweedfs,azurite,moto,ministack,ceph HOLDFAST_RACES=1000 HOLDFAST_FAULTS=all \
	$(STORES)/bin/python -m pytest tests/stores -m "not gpu" -o timeout=3600 $(PYTEST_FLAGS)

BREAKING := tests/simulation tests/crash tests/corruption tests/fuzz tests/unit/format/test_hostile_input.py \
	tests/contract/test_stage_races.py tests/property/test_retention_properties.py tests/property/test_retention_on_disk.py

test-crash: $(READY)
	$(BIN)/python scripts/run_tests.py --breaking $(PYTEST_FLAGS)

test-crash-full: $(READY)
	HOLDFAST_SCHEDULES=200000 HOLDFAST_KILLS=100 HOLDFAST_KILL_POINTS=all HOLDFAST_CORRUPTIONS=all HOLDFAST_FUZZ=200000 \
	HOLDFAST_RACES=20 HOLDFAST_RETENTION=2000 HOLDFAST_SOAK=full $(BIN)/python -m pytest $(BREAKING) \
	-m "not gpu" $(PYTEST_FLAGS)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_house.py

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

DOCS := .venvs/docs

$(DOCS)/.ready: docs/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check -q -r docs/requirements.txt
	@touch $@

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "out/site/index.html"

bench: $(READY)
	$(BIN)/holdfast bench --out out/bench

bench-quick: $(READY)
	$(BIN)/holdfast bench --quick --out out/bench-quick

bench-report: $(READY)
	$(BIN)/python -m benchmarks.publish out/bench

clean:
	rm -rf $(VENV) .venvs out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
