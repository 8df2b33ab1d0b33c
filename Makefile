# Needs Linux, Python >= 3.11, a C++ compiler and make. Everything else goes into $(VENV).
# A second run of any target does only what has changed since.

VENV ?= .venv
PYTHON ?=
TORCH_SPEC ?=
PIP_ARGS ?=
WITHIN ?=
OFFLINE ?=
PARTS ?=
export PYTHON

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
PARALLEL := -n $(shell n=$$(nproc); echo $$((n < 8 ? n : 8))) --dist loadfile --no-loadscope-reorder
NATIVE := CMakeLists.txt $(shell find src -name '*.cpp' -o -name '*.hpp')

.DEFAULT_GOAL := help
.PHONY: help serve run test test-deep setup setup-test lint typecheck bench clean distclean

help:  ## Show this
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "Variables: PYTHON (interpreter), VENV (folder, $(VENV)), PIP_ARGS (for pip install),"
	@echo "           TORCH_SPEC (install this torch, whatever it brings), WITHIN (seconds for"
	@echo "           test-deep), PARTS (of test-deep: those named), OFFLINE (test-deep without"
	@echo "           what downloads packages)"

serve: setup  ## Set up, then serve the built-in model on port 8000
	$(BIN)/weft serve

run: setup  ## Set up, then generate text with the built-in model
	$(BIN)/weft generate "def fibonacci(n):" --echo --max-tokens 64

test: setup-test  ## Set up, then run all checks, also after one that fails
	@status=0; for check in "ruff check ." "ruff format --check ." mypy "python -m pytest $(PARALLEL)"; do \
	  echo "== $$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

test-deep: setup-test  ## Set up, then run the long forms of tests, and real clients (downloads them)
	$(BIN)/python tools/deep.py $(if $(WITHIN),--within $(WITHIN)) $(if $(OFFLINE),--offline) $(PARTS)

setup: $(STAMPS)/install  ## Create the environment and build the native part

setup-test: $(STAMPS)/test

lint: setup-test  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup-test  ## Check types
	$(BIN)/mypy

bench: setup-test  ## Run the benchmarks
	@for file in $(filter-out benchmarks/report.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## Remove what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMPS)/install

distclean: clean  ## Remove the environment, too
	rm -rf $(VENV)

$(STAMPS)/venv:
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
	  || { echo "No C++ compiler found. Install one (Debian, Ubuntu: g++), or set CXX." >&2; exit 1; }
	@python=$$(scripts/find_python.sh) && echo "creating $(VENV) with $$python" \
	  && "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: scripts/install_torch.py | $(STAMPS)/venv
	$(BIN)/python scripts/install_torch.py --spec="$(TORCH_SPEC)" --pip-args="$(PIP_ARGS)"
	@touch $@

$(STAMPS)/install: $(STAMPS)/torch pyproject.toml $(NATIVE)
	$(PIP) install --quiet --editable . $(PIP_ARGS)
	@touch $@

$(STAMPS)/test: pyproject.toml | $(STAMPS)/install
	@$(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*project['optional-dependencies']['test'], sep='\n')" > $(STAMPS)/test.txt
	$(PIP) install --quiet --requirement $(STAMPS)/test.txt $(PIP_ARGS)
	@touch $@
