# make demo | test | slow | thorough | test-all | coverage | tpu | lint | format | types | docs | wheel | clean
#
# make docs builds the documentation as a site, build/site/guide/index.html; broken links are errors
# make test covers every module; make slow runs what takes longer, make thorough more cases of that, and make test-all all.
# PYTHON=python3.12 make test    uses another interpreter, in a virtual environment of its own
# CONSTRAINTS=file               pins versions (see .ci/constraints-3.11.txt)
# WORKERS=4                      test processes, by default one a core and at most 4; each loads JAX
# TESTS="tests/test_cost.py -x"  arguments for pytest

PYTHON ?= python3
CONSTRAINTS ?=
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
TESTS ?=

INTERPRETER := $(shell .ci/find-python '$(PYTHON)')
VERSION := $(if $(INTERPRETER),$(shell '$(INTERPRETER)' -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test slow thorough test-all coverage tpu lint format types docs wheel clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/alpa-lite demo

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not thorough" $(TESTS)

slow: $(INSTALLED)
	$(PYTEST) -m "slow and not thorough" $(TESTS)

thorough: $(INSTALLED)
	$(PYTEST) -m thorough $(TESTS)

test-all: $(INSTALLED)
	$(PYTEST) $(TESTS)

coverage: $(INSTALLED)
	$(PYTEST) -m "not slow and not thorough" --cov --cov-report=term $(TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The TPU's own compiler against the plans of small models; skipped, and said so, where it cannot be installed.
tpu: $(INSTALLED)
	.ci/verify-tpu $(BIN)/python

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean

# The wheel must hold the symlinked packages, and work where neither the checkout nor the tools of development are.
wheel: $(INSTALLED)
	rm -rf build dist .venv-wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(INTERPRETER) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) dist/*.whl
	away=$$(mktemp -d) && python=$$PWD/.venv-wheel/bin/python && cd "$$away" && \
	  "$$python" -c 'import alpa_lite.passes, alpa_lite.runtime, alpa_lite.models; print(alpa_lite.__file__)' && \
	  "$$(dirname "$$python")/alpa-lite" clusters && rmdir "$$away"

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis .coverage *.egg-info

$(INSTALLED): pyproject.toml setup.cfg $(CONSTRAINTS)
	@test -n '$(INTERPRETER)' || { echo "PYTHON=$(PYTHON) does not run; give another interpreter, such as PYTHON=python3.12"; exit 1; }
	@$(INTERPRETER) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "PYTHON=$(PYTHON) is Python $(VERSION), and alpa_lite needs 3.11 or newer; try PYTHON=python3.12 make"; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(VERSION)")' 2>/dev/null || \
	  { echo "creating $(VENV) with Python $(VERSION)"; $(INTERPRETER) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@
