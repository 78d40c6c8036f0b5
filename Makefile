# The task file: people and the gate call the same targets. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch's CUDA build, for the tests on a stand-in CUDA runtime. One that is elsewhere already is used as it is.
ifeq ($(origin VENV_CUDA),undefined)
VENV_CUDA := .venv-cuda
STAMP_CUDA := $(VENV_CUDA)/.installed
endif
BIN_CUDA := $(VENV_CUDA)/bin

# In a container one is often root, and JupyterLab then wants to be asked twice.
LAB_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help venv venv-cuda demo lab test test-cuda test-kernels lint format check bench screenshot wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## Make the virtual environment, or bring it up to date

# Torch goes in first and alone, at the one release that constraints.txt names: what follows then finds it
# there, and nothing can pull in another release of several GB.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

# Several GB: 2 to 3 minutes where the wheels are near. Torch alone is of another release than in $(VENV).
venv-cuda: $(STAMP_CUDA) ## Make the environment of `make test-cuda`, with torch's CUDA build

.venv-cuda/.installed: constraints-cuda.txt constraints.txt
	$(PYTHON) -m venv $(VENV_CUDA)
	@echo '*' > $(VENV_CUDA)/.gitignore
	$(BIN_CUDA)/pip install -q -c constraints-cuda.txt torch
	@sed '/^torch==/d' constraints.txt > $(VENV_CUDA)/constraints.txt
	$(BIN_CUDA)/pip install -q -c $(VENV_CUDA)/constraints.txt -c constraints-cuda.txt accelerate ipython ipywidgets \
		nvidia-ml-py psutil pytest pytest-timeout safetensors tqdm xxhash
	@touch $@

# The tests and the quickstart must work on a machine that reaches no model hub.
test demo: export HF_HUB_OFFLINE = 1

demo: venv ## Run the quickstart notebook into build/quickstart.ipynb
	@mkdir -p build
	$(BIN)/jupyter execute --output=../build/quickstart notebooks/quickstart.ipynb
	@echo "Done. Open it with: $(BIN)/jupyter lab $(LAB_FLAGS) build/quickstart.ipynb"

lab: venv ## Open JupyterLab on notebooks/
	$(BIN)/jupyter lab $(LAB_FLAGS) --ServerApp.root_dir=notebooks

test: venv ## Run the tests on the CPU and on a simulated GPU, then the notebooks as tests
	$(BIN)/pytest -q -n auto tests/
	VRAM_MAGIC_TEST_DEVICE=cuda $(BIN)/pytest -q -n auto tests/
	$(BIN)/pytest -q --nbval-lax notebooks/

# Needs gcc and no card. The tests' own process runs on the stand-in too.
test-cuda: $(STAMP_CUDA) ## Run tests/cuda: torch's CUDA build on a stand-in CUDA runtime
	$(BIN_CUDA)/python tests/cuda/standin.py $(BIN_CUDA)/python -m pytest -q tests/cuda

# Downloads those releases, some 20 MB, into build/kernels. Needs Chromium.
test-kernels: venv ## Run the panel under several releases of ipykernel, and in Notebook 7
	$(BIN)/python tests/kernels/check_kernels.py
	$(BIN)/python tests/kernels/check_notebook.py

lint: venv ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv ## Repair style and format where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test ## All that the gate checks

bench: venv ## Run every benchmark
	@set -e; for bench in benchmarks/bench_*.py; do \
		echo "== $$bench"; \
		$(BIN)/python "$$bench"; \
	done

screenshot: venv ## Make docs/vram.png, the picture in the README, anew
	$(BIN)/python docs/screenshot.py

# Without isolation the build sees our torch and compiles the guard for it; -v tells whether it did.
wheel: venv ## Build the wheel into dist/, with the guard compiled for the torch that is installed
	$(BIN)/pip wheel -v --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove what the targets made, but for the virtual environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vram_magic tests benchmarks docs notebooks \
		\( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
