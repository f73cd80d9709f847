# make help lists the targets. PYTHON is the interpreter to start from: it is used as it is if it has what is needed.
PYTHON ?= python3
SOURCES := $(shell find icl_patch triton_kernels tools -type f ! -name '*.pyc' | sort)
RUN := build/python

.DEFAULT_GOAL := help
.PHONY: FORCE help demo test lint format train clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

# a second call finds it newer than everything and does nothing
build/interpreter: FORCE
	@mkdir -p build
	@echo '$(PYTHON) $(CURDIR)' | cmp -s - $@ || echo '$(PYTHON) $(CURDIR)' >$@

$(RUN): build/interpreter requirements.txt pyproject.toml setup.py $(SOURCES)
	@sh tools/setup.sh "$(PYTHON)"

demo: $(RUN) ## the main job on the embedded model: answers with, without and with the patch, and the proof
	$(RUN) -m icl_patch demo

test: $(RUN) ## the whole test suite
	$(RUN) -m pytest

lint: $(RUN) ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(RUN) ## let ruff format the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

train: $(RUN) ## train the embedded model again, into build/embedded (less than half an hour)
	$(RUN) -m icl_patch.embedded.train build/embedded

clean: ## remove what make made, .venv included
	rm -rf build .venv *.egg-info icl-patch-report .pytest_cache .mypy_cache .ruff_cache
