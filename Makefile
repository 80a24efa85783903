# `make demo` and `make test` do all set-up. PYTHON chooses the interpreter, VENV where the environment goes. SYSTEM=1 keeps
# the torch of the interpreter's own packages, and the NumPy that it goes with: vendors put theirs there, with a plug-in.
PYTHON ?= python3
SYSTEM ?=
VENV ?= $(if $(SYSTEM),.venv-system,.venv)
MINOR := $(shell $(PYTHON) -c 'import sys; print(sys.version_info[1])')
CONSTRAINTS := constraints/$(if $(filter 8,$(MINOR)),py38-torch1.10,$(if $(filter 9 10,$(MINOR)),py39,py311-torch2.13)).txt
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
ARGS ?=
KEEP := $(if $(SYSTEM),$(VENV)/kept.txt,$(CONSTRAINTS))
PINNED = $(if $(filter 10,$(MINOR)),,-c constraints/$(1).txt)
REFERENCE := $(if $(filter 8 9,$(MINOR)),,$(VENV)/reference/.done $(VENV)/trackers/.done $(VENV)/notebooks/.done $(VENV)/albumentations/.done)

define KEPT
import importlib.metadata as installed, sys
found = {}
for d in installed.distributions(): found.setdefault((d.metadata["Name"] or "").lower().replace("-", "_"), d.version)
if "torch" not in found: sys.exit("SYSTEM=1: $(PYTHON) has no torch; choose the interpreter by PYTHON=...")
print(*(f"{name}=={found[name]}" for name in ("torch", "torch_gcu", "numpy") if name in found), sep="\n")
endef
export KEPT

# One worker more than there are cores, at most 8: tests wait for processes. Slurm and modules' fixtures belong to files.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) + 1))' 2>/dev/null || echo 3)
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -p tests.progress -o console_output_style=classic -r fE --disable-warnings -n $(WORKERS)

# Files in the order of tests/conftest.py; xdist's own would begin those of the longest tests, which are few, last.
BY_FILE = --dist loadfile $(if $(filter 8,$(MINOR)),,--no-loadscope-reorder)

.PHONY: demo test test-all test-rest test-pages test-legacy test-vendors lint site setup wheel-check wheelhouse clean

demo: setup
	@$(VENV)/bin/python -m exp $(ARGS)

# What a user runs after installing: each promise once. It needs nothing that `make demo` does not.
test: setup
	@$(PYTEST) --dist worksteal -m "not extended" $(ARGS)

# And the rest: simulated cards, Slurm, trackers, notebooks, the pages' commands, variants.
test-all: setup $(REFERENCE)
	@$(PYTEST) $(BY_FILE) $(ARGS)

# Of .ci/run: what `make test` has left, except the pages' commands; what the oldest Python and torch are tested with.
test-rest: setup $(REFERENCE)
	@$(PYTEST) $(BY_FILE) -m "extended and not pages" $(ARGS)

# Every command of every page, as far as this machine can run it; .ci/run does not wait for it. build/pages says what each other one needs.
test-pages: setup
	@$(PYTEST) $(BY_FILE) -m pages $(ARGS)
	@cat build/pages/*.txt

test-legacy: setup
	@$(PYTEST) --dist worksteal -m legacy $(ARGS)

# Names that backends/ relies on, in the wheels of vendors whose cards no one here has. Not part of .ci/run.
test-vendors: $(VENV)/vendors/.done
	@$(PYTEST) tests/backends/test_vendors.py $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy && $(VENV)/bin/mypy -p backends

# The pages as a site with search, in build/site. Its tools read the source and import nothing: no torch, an environment of its own.
site: $(VENV)-site/.done
	@NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build --strict
	@echo "build/site; to read and search it: $(PYTHON) -m http.server --bind 127.0.0.1 --directory build/site"

# A wheel, installed in an empty environment, must run from any folder.
wheel-check: $(VENV)/.lint
	tests/wheel_check.sh $(VENV)/bin/python $(PYTHON) $(CONSTRAINTS)

# All that an installation without a network needs: pip install --no-index --find-links build/wheelhouse exp-accelerators
wheelhouse: $(VENV)/.setup
	@$(PIP) wheel --quiet -c $(CONSTRAINTS) --wheel-dir build/wheelhouse .

setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml simulators/gcu/pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV) (Python 3.$(MINOR), $(KEEP)); this takes a few minutes the first time"
	@$(PYTHON) -m venv $(if $(SYSTEM),--system-site-packages) $(VENV)
	@$(if $(SYSTEM),$(VENV)/bin/python -c "$$KEPT" >$(KEEP) && cat $(KEEP))
	@{ $(PIP) install --upgrade pip && $(PIP) install -c $(KEEP) -e '.[dev]' -e simulators/gcu; } >$(VENV)/setup.log 2>&1 \
		|| { tail -30 $(VENV)/setup.log; echo "set-up failed; the whole log: $(VENV)/setup.log"; exit 1; }
	@$(VENV)/bin/python -c 'import yapf'  # of MMEngine; writes its cache, which several processes at once would spoil for each other
	@touch $@

$(VENV)/.lint: $(VENV)/.setup
	@$(PIP) install -c $(CONSTRAINTS) mypy ruff build >$(VENV)/lint.log 2>&1 || { tail -30 $(VENV)/lint.log; exit 1; }
	@touch $@

$(VENV)-site/.done: constraints/docs.txt
	@$(if $(filter 8 9,$(MINOR)),echo "make site needs Python 3.10 or newer (this is 3.$(MINOR)): choose it by PYTHON=..."; exit 1)
	@$(PYTHON) -m venv $(VENV)-site
	@$(VENV)-site/bin/python -m pip --disable-pip-version-check install -c $< mkdocs mkdocs-material 'mkdocstrings[python]' ruff \
		>$(VENV)-site/setup.log 2>&1 || { tail -30 $(VENV)-site/setup.log; exit 1; }
	@touch $@

# What models and their exports are compared with. Not in the environment: MMEngine imports transformers wherever it finds it, and every
# process of a run would start a second later. Needs Python 3.10.
$(VENV)/reference/.done: $(VENV)/.setup
	@$(PIP) install --target $(VENV)/reference -c $(CONSTRAINTS) transformers onnx onnxscript onnxruntime >$(VENV)/reference.log 2>&1 \
		|| { tail -30 $(VENV)/reference.log; exit 1; }
	@touch $@

# The clients of trackers, and MLflow's server: 120 packages that nothing else needs. Their tests look for them here.
# What is pinned (for Python 3.11 and later) is not all there for 3.10, which takes the newest that is.
$(VENV)/trackers/.done: $(VENV)/.setup constraints/trackers.txt
	@$(PIP) install --target $(VENV)/trackers $(call PINNED,trackers) mlflow swanlab tensorboard wandb \
		>$(VENV)/trackers.log 2>&1 || { tail -30 $(VENV)/trackers.log; exit 1; }
	@touch $@

$(VENV)/vendors/.done: $(VENV)/.setup
	@$(PIP) install --target $(VENV)/vendors --no-deps --python-version 3.11 --platform manylinux_2_28_x86_64 --platform any \
		--only-binary=:all: torch-npu==2.14.0 mthreads-ml-py==2.4.3 pyzes==0.1.3 \
		>$(VENV)/vendors.log 2>&1 || { tail -30 $(VENV)/vendors.log; exit 1; }
	@touch $@

# What runs examples/notebooks without a browser.
$(VENV)/notebooks/.done: $(VENV)/.setup constraints/notebooks.txt
	@$(PIP) install --target $(VENV)/notebooks $(call PINNED,notebooks) nbclient ipykernel \
		>$(VENV)/notebooks.log 2>&1 || { tail -30 $(VENV)/notebooks.log; exit 1; }
	@touch $@

# Without what it requires: its OpenCV would stand beside that of the environment, under the same name.
$(VENV)/albumentations/.done: $(VENV)/.setup constraints/albumentations.txt
	@$(PIP) install --target $(VENV)/albumentations --no-deps -r constraints/albumentations.txt >$(VENV)/albumentations.log 2>&1 \
		|| { tail -30 $(VENV)/albumentations.log; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-site build dist *.egg-info
