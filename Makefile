# `make demo` and `make test` do all set-up. PYTHON chooses the interpreter, VENV where the environment goes.
PYTHON ?= python3
VENV ?= .venv
MINOR := $(shell $(PYTHON) -c 'import sys; print(sys.version_info[1])')
CONSTRAINTS := constraints/$(if $(filter 8,$(MINOR)),py38-torch1.10,$(if $(filter 9 10,$(MINOR)),py39,py311-torch2.13)).txt
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
ARGS ?=
REFERENCE := $(if $(filter 8 9,$(MINOR)),,$(VENV)/reference/.done)

.PHONY: demo test lint setup wheel-check clean

demo: setup
	@$(VENV)/bin/python -m exp $(ARGS)

test: setup $(REFERENCE)
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy && $(VENV)/bin/mypy -p backends

# A wheel, installed in an empty environment, must run from any folder.
wheel-check: $(VENV)/.lint
	tests/wheel_check.sh $(VENV)/bin/python $(PYTHON) $(CONSTRAINTS)

setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml simulators/gcu/pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV) (Python 3.$(MINOR), $(CONSTRAINTS)); this takes a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@{ $(PIP) install --upgrade pip && $(PIP) install -c $(CONSTRAINTS) -e '.[dev]' -e simulators/gcu; } >$(VENV)/setup.log 2>&1 \
		|| { tail -30 $(VENV)/setup.log; echo "set-up failed; the whole log: $(VENV)/setup.log"; exit 1; }
	@touch $@

$(VENV)/.lint: $(VENV)/.setup
	@$(PIP) install -c $(CONSTRAINTS) mypy ruff build >$(VENV)/lint.log 2>&1 || { tail -30 $(VENV)/lint.log; exit 1; }
	@touch $@

# What models are compared with. Not in the environment: MMEngine imports transformers wherever it finds it, and every
# process of a run would start a second later. Needs Python 3.10.
$(VENV)/reference/.done: $(VENV)/.setup
	@$(PIP) install --target $(VENV)/reference -c $(CONSTRAINTS) transformers >$(VENV)/reference.log 2>&1 \
		|| { tail -30 $(VENV)/reference.log; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
