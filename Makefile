# Needs Linux, Python >= 3.11, a C++ compiler and make. Everything else goes into $(VENV).
# A second run of any target does only what has changed since.

VENV ?= .venv
PYTHON ?=
DEVICE ?=
TORCH_SPEC ?=
PIP_ARGS ?=
WITHIN ?=
OFFLINE ?=
PARTS ?=
export PYTHON

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(BIN)/python scripts/install_torch.py --spec="$(TORCH_SPEC)" --pip-args="$(PIP_ARGS)"
PARALLEL := -n $(shell n=$$(nproc); echo $$((n < 8 ? n : 8))) --dist loadfile --no-loadscope-reorder
# Kernels for this machine alone compile in half the time; those for all machines do as well.
SETS := $(if $(wildcard $(STAMPS)/native-all),all,machine)
NATIVE := CMakeLists.txt $(shell find src -name '*.cpp' -o -name '*.hpp')

.DEFAULT_GOAL := help
.PHONY: help serve run docs pages test test-again test-deep setup setup-all setup-machine setup-test lint typecheck bench clean distclean

help:  ## Show this
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "Variables: PYTHON (interpreter), VENV (folder, $(VENV)), PIP_ARGS (for pip install),"
	@echo "           DEVICE (cuda: install torch with CUDA; cpu: none; else by what the machine"
	@echo "           has), TORCH_SPEC (install this torch, whatever it brings), WITHIN (seconds"
	@echo "           for test-deep), PARTS (of test-deep: those named), OFFLINE (test-deep"
	@echo "           without what downloads packages)"

serve: setup-$(SETS)  ## Set up, then serve the built-in model on port 8000
	$(BIN)/weft serve

run: setup-$(SETS)  ## Set up, then generate text with the built-in model
	$(BIN)/weft generate "def fibonacci(n):" --echo --max-tokens 64

docs: $(STAMPS)/docs  ## Build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

pages: setup  ## Print the pages and pictures anew that derive from the code
	@for page in settings parameters map; do $(BIN)/python tools/$${page}_page.py > $(STAMPS)/page && cp $(STAMPS)/page docs/$$page.md || exit 1; done
	@for page in http-api commands metrics errors; do $(BIN)/python tools/reference_pages.py $$page > $(STAMPS)/page && cp $(STAMPS)/page docs/$$page.md || exit 1; done
	@$(BIN)/python tools/interactive_chart.py > $(STAMPS)/page && cp $(STAMPS)/page docs/assets/interactive.svg

test: setup-test  ## Set up, then run all checks, also after one that fails
	@status=0; for check in "ruff check ." "ruff format --check ." mypy "python -m pytest $(PARALLEL)"; do \
	  echo "== $$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

test-again: lint typecheck  ## Run the tests that failed once more, one after the other
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none

test-deep: setup-test  ## Set up, then run the long forms of tests, and real clients (downloads them)
	$(BIN)/python tools/deep.py $(if $(WITHIN),--within $(WITHIN)) $(if $(OFFLINE),--offline) $(PARTS)

setup: setup-all  ## Create the environment and build the native part

setup-all setup-machine: setup-%:
	@$(MAKE) --no-print-directory --jobs=2 $(STAMPS)/install-$* $(STAMPS)/torch-$(or $(DEVICE),auto)

setup-test: setup
	@$(MAKE) --no-print-directory $(STAMPS)/test

lint: setup-test  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup-test  ## Check types
	$(BIN)/mypy

bench: setup-test  ## Run the benchmarks
	@for file in $(filter-out benchmarks/report.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## Remove what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMPS)/native-*

distclean: clean  ## Remove the environment, too
	rm -rf $(VENV)

$(STAMPS)/venv:
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
	  || { echo "No C++ compiler found. Install one (Debian, Ubuntu: g++), or set CXX." >&2; exit 1; }
	@python=$$(scripts/find_python.sh) && echo "creating $(VENV) with $$python" \
	  && "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/tools: pyproject.toml | $(STAMPS)/venv
	@$(BIN)/python scripts/requirements.py build > $(STAMPS)/build.txt
	$(PIP) install --quiet --upgrade pip --requirement $(STAMPS)/build.txt $(PIP_ARGS)
	@$(BIN)/python scripts/requirements.py native > $(STAMPS)/native.txt
	@test ! -s $(STAMPS)/native.txt || $(PIP) install --quiet --requirement $(STAMPS)/native.txt $(PIP_ARGS)
	@touch $@

$(STAMPS)/packages: pyproject.toml | $(STAMPS)/tools
	@$(BIN)/python scripts/requirements.py run > $(STAMPS)/run.txt
	$(PIP) install --quiet --requirement $(STAMPS)/run.txt $(PIP_ARGS)
	@touch $@

# Compiles while the packages are downloaded.
$(STAMPS)/native-all $(STAMPS)/native-machine: $(STAMPS)/native-%: pyproject.toml $(NATIVE) | $(STAMPS)/tools
	$(PIP) install --quiet --no-deps --no-build-isolation --config-settings=cmake.define.WEFT_SETS=$* \
	  --editable . $(PIP_ARGS)
	@touch $@

$(STAMPS)/install-all $(STAMPS)/install-machine: $(STAMPS)/install-%: $(STAMPS)/native-% $(STAMPS)/packages
	@touch $@

$(STAMPS)/torch-%: scripts/install_torch.py pyproject.toml | $(STAMPS)/packages
	$(TORCH) --device=$*
	@touch $@

$(STAMPS)/test: pyproject.toml | $(STAMPS)/install-all
	$(TORCH) --device=$(or $(DEVICE),auto) --required
	@$(BIN)/python scripts/requirements.py test > $(STAMPS)/test.txt
	$(PIP) install --quiet --requirement $(STAMPS)/test.txt $(PIP_ARGS)
	@touch $@

$(STAMPS)/docs: pyproject.toml | $(STAMPS)/tools
	@$(BIN)/python scripts/requirements.py docs > $(STAMPS)/docs.txt
	$(PIP) install --quiet --requirement $(STAMPS)/docs.txt $(PIP_ARGS)
	@touch $@
