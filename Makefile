# Every target sets up what it needs: the virtual environment in .venv, with pinned packages.
# A GPU machine whose Python already has torch and Triton can use them: make test-gpu PYTHON=python3

PYTHON ?= .venv/bin/python
TORCH := torch==2.13.0
PINNED := triton==3.7.1 numpy==2.4.6 pytest==9.2.0 pytest-xdist==3.8.0 expecttest==0.3.0 \
	safetensors==0.8.0 tokenizers==0.23.3 ruff==0.17.6 mypy==2.4.1
JOBS ?= 2
# One compile process for each test process is enough, and leaves the cores to the tests.
export TORCHINDUCTOR_COMPILE_THREADS ?= 1

.PHONY: help demo test test-gpu lint accept bench clean

help:
	@echo "make demo      draft and verify real text with the compiled draft step"
	@echo "make test      all tests that need no GPU"
	@echo "make test-gpu  the tests of the kernels on a GPU"
	@echo "make lint      ruff and mypy"
	@echo "make accept    rewrite the expected graphs, then show the difference"
	@echo "make bench     time the draft loop, its inputs, verification and filtering on a GPU"

.venv/ready: Makefile pyproject.toml
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(PINNED)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

ifeq ($(PYTHON),.venv/bin/python)
demo test test-gpu lint accept bench: .venv/ready
endif

demo:
	$(PYTHON) examples/quickstart.py

test:
	$(PYTHON) -m pytest tests -n $(JOBS) --ignore=tests/gpu

test-gpu:
	$(PYTHON) -m pytest tests/gpu tests/test_selftest.py

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

accept:
	EXPECTTEST_ACCEPT=1 $(PYTHON) -m pytest tests/passes -k expected
	git diff tests/passes

bench:
	$(PYTHON) examples/benchmarks/draft_loop.py
	$(PYTHON) examples/benchmarks/draft_inputs.py
	$(PYTHON) examples/benchmarks/verification.py
	$(PYTHON) examples/benchmarks/filtering.py

clean:
	rm -rf .venv build dist *.egg-info
