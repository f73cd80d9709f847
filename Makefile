# make help lists the targets. PYTHON is the interpreter to start from: it is used as it is if it has all required packages.
PYTHON ?= python3
SOURCES := $(shell find icl_patch triton_kernels csrc bench tools -type f ! -name '*.pyc' ! -name '*.so' ! -path 'bench/results/*' | sort)
RUN := build/python
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check
# the dependency group of pyproject.toml with the name of the target's folder
GROUP = $$($(RUN) tools/requirements.py $(notdir $@))
RESULTS := $(or $(ICL_RESULTS),bench/results)
# The tests start a hundred processes. Without bytecode each compiles torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: FORCE help demo test oldest newest stress ranks splits real-model real discussion mutants kernels bits bits-compare bench sweep figures papers static vllm ray gpu gpu-full tune profile docs wheels lint format train clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

# a second call finds it newer than everything and does nothing
build/interpreter: FORCE
	@mkdir -p build
	@echo '$(PYTHON) $(CURDIR)' | cmp -s - $@ || echo '$(PYTHON) $(CURDIR)' >$@

$(RUN): build/interpreter requirements.txt pyproject.toml setup.py $(SOURCES)
	@sh tools/setup.sh "$(PYTHON)"

demo: $(RUN) ## the main job on the embedded model: answers with, without and with the patch, and the proof; MODEL=FOLDER: on that model, with chats or, without a template, a passage
	$(RUN) -m icl_patch demo $(if $(MODEL),"$(MODEL)")

# Apart from the rest: transformers imports torchao wherever it finds it, which prints to every command.
build/torchao: | $(RUN)
	@$(PIP) --no-deps --target $@ $(GROUP) || echo "test: no torchao, its tests will skip"

test: $(RUN) build/torchao build/peft build/gguf ## the whole test suite, on as many cores as there are
	$(RUN) -m pytest $$($(RUN) -c 'import xdist; print("-n auto --dist worksteal")' 2>/dev/null)

build/oldest/installed build/newest/installed: pyproject.toml
	rm -rf $(@D)
	@mkdir -p $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) tools/requirements.py $(notdir $(@D)))
	touch $@

oldest: build/oldest/installed ## the test suite with the oldest versions that pyproject.toml allows; installs gigabytes, CUDA's libraries among them
	$(MAKE) PYTHON=$(CURDIR)/build/$@/bin/python test

newest: build/newest/installed ## the test suite with the newest versions that pip finds; installs gigabytes, too
	$(MAKE) PYTHON=$(CURDIR)/build/$@/bin/python test

stress: $(RUN) ## a million adversarial rows through the RMSNorm inversion; two threads, a thousand calls each, on one attached model; a run over a data set, killed 100 times; every family, on more random numbers too
	$(RUN) -m pytest -m stress

ranks: $(RUN) build/peft ## models that are split over three and four processes, by pipeline and by shared matrices, on the CPU
	$(RUN) -m pytest -m stress tests/recording/test_ranks.py

splits: $(RUN) build/peft $(if $(MODEL),,build/gguf) ## every family offloaded and split, beside the whole model, and decode steps of split models, into docs/data
	PYTHONPATH=build/peft OMP_NUM_THREADS=1 $(RUN) tools/measure_splits.py splits
	model="$(or $(MODEL),$$(PYTHONPATH=build/gguf $(RUN) tools/real_model.py))" && \
	PYTHONPATH=build/peft OMP_NUM_THREADS=1 $(RUN) tools/measure_splits.py split-steps "$$model" && $(RUN) tools/readme.py

mutants: $(RUN) build/torchao build/peft ## plant the faults of tools/mutants.toml one at a time and run the tests that should notice each; MUTANTS=icl_patch/patch: those of a part
	$(RUN) tools/mutants.py $(MUTANTS)

# Apart from the rest, as torchao: only tools/real_model.py needs them.
build/gguf: | $(RUN)
	@$(PIP) --no-deps --target $@ $(GROUP) || echo "real-model: no gguf, without which no model can be made" >&2

real-model: $(RUN) build/gguf ## fetch SmolLM2-135M-Instruct, once, and print its folder; MODEL=FOLDER: put it there; NAME=gemma-3-270m GEMMA_TERMS=accepted: Gemma 3 270M, under Google's terms
	@PYTHONPATH=build/gguf GEMMA_TERMS=$(GEMMA_TERMS) $(RUN) tools/real_model.py $(if $(NAME),--name $(NAME)) $(MODEL)

real: $(RUN) $(if $(MODEL),,build/gguf) ## exact patches on a real model, 5,000 tokens and more in each dtype, then the papers' experiments on it; resumes a stopped run; MODEL=FOLDER: another model; REAL=--short
	model="$(or $(MODEL),$$(PYTHONPATH=build/gguf $(RUN) tools/real_model.py))" && \
	OMP_NUM_THREADS=1 $(RUN) tools/real_steps.py "$$model" --out $(if $(MODEL)$(REAL),build/real/exact.json,docs/data/real-exact.json) $(REAL) && \
	$(RUN) examples/papers/real_experiments.py "$$model" $(if $(MODEL)$(REAL),$(if $(REAL),--quick),--out docs/papers) && \
	$(RUN) examples/papers/real_protocol.py "$$model" $(if $(MODEL)$(REAL),$(if $(REAL),--quick),--out docs/papers)

discussion: $(RUN) $(if $(MODEL),,build/gguf) ## what the papers' discussions leave open, on a real model, in minutes; MODEL=FOLDER: another model
	model="$(or $(MODEL),$$(PYTHONPATH=build/gguf $(RUN) tools/real_model.py))" && \
	OMP_NUM_THREADS=1 $(RUN) examples/papers/discussion.py "$$model" $(if $(MODEL),,--out docs/papers)

kernels: $(RUN) ## registers and spills of every CUDA and Triton kernel, compiled ahead of time; fails if one spills
	$(RUN) tools/kernel_resources.py

bits: $(RUN) ## record the bits of all results as hashes, into build/bits.json, in minutes; BITS=--quick: of four small models and the embedded one
	$(RUN) tools/record_bits.py build/bits.json $(BITS)

bits-compare: ## compare two records: OLD=before.json NEW=build/bits.json
	diff "$(OLD)" "$(NEW)"

# Apart from the rest, as torchao: transformers imports it wherever it finds it.
build/peft: | $(RUN)
	@$(RUN) -c 'import peft' 2>/dev/null || $(PIP) --no-deps --target $@ $(GROUP) || echo "no peft: its tests will skip, and its column of the benchmarks be left out"

bench: $(RUN) build/peft ## time the kernels beside the code that they replace, on the CPU, in less than ten minutes; tables in bench/results
	PYTHONPATH=build/peft $(RUN) -m icl_patch bench --quick --fresh --out "$(RESULTS)"
	@if $(RUN) -c 'import pytest_benchmark' 2>/dev/null; then $(RUN) -m pytest tests/bench/benchmarks.py --benchmark-json=build/pytest-benchmark.json; else echo "bench: no pytest-benchmark"; fi

sweep: $(RUN) ## try every causal model class of transformers, small and random; resumes a stopped run; hours on one core; docs/model_classes.md
	OMP_NUM_THREADS=1 $(RUN) tools/step_programs.py $(TYPES)
	OMP_NUM_THREADS=1 $(RUN) tools/sweep.py $(TYPES)

figures: $(RUN) ## write the tables of the benchmarks, README and docs again from their numbers, and the reference from the docstrings
	$(RUN) -m icl_patch bench --tables --out bench/results
	$(RUN) tools/readme.py
	$(RUN) tools/reference.py

# Each writes its pictures, its numbers and its page into docs/papers; make -j2 papers takes two cores.
EXPERIMENTS := linear_regression table_1 goldwaser
papers: $(EXPERIMENTS:%=papers-%) ## the papers' experiments in full, into docs/papers

papers-%: $(RUN)
	$(RUN) examples/papers/$*.py

STATIC ?=

static: $(RUN) build/peft $(if $(MODEL),,build/gguf) ## static patches beside other methods on a real model, into docs/static-results.md, in hours; resumes a stopped run; MODEL=FOLDER: another model; STATIC=--quick: two tasks in minutes
	model="$(or $(MODEL),$$(PYTHONPATH=build/gguf $(RUN) tools/real_model.py))" && \
	OMP_NUM_THREADS=1 PYTHONPATH=build/peft $(RUN) examples/static/evaluation.py "$$model" $(STATIC) $(if $(MODEL)$(STATIC),--out build/static/cells.jsonl) && \
	$(RUN) examples/static/page.py $(if $(MODEL)$(STATIC),build/static/cells.jsonl --out build/static)

# An environment of its own: vLLM pins its libraries, and imports these three if it finds them.
build/vllm/installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) tools/requirements.py vllm)
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

vllm: $(RUN) build/vllm/installed $(if $(MODEL),,build/gguf) ## serve a static patch of a real model as a LoRA with vLLM, installed apart (3 GB), and compare; MODEL=FOLDER: another model
	model="$(or $(MODEL),$$(PYTHONPATH=build/gguf $(RUN) tools/real_model.py))" && \
	$(RUN) tools/vllm_adapter.py export "$$model" build/vllm-adapter && \
	build/vllm/bin/python tools/vllm_adapter.py serve "$$model" build/vllm-adapter

# Apart from the rest, because they bring 600 MB.
build/ray: | $(RUN)
	$(PIP) --constraint requirements.txt --target $@ $(GROUP)

# An actor that waits for a CPU waits for ever: hence the limit.
ray: $(RUN) build/ray ## patches by two actors of Ray Data, which are killed and go on, and their index read by pandas, DuckDB and datasets; in ten minutes at most
	PYTHONPATH="$(CURDIR)/build/ray" timeout --kill-after=30 600 $(RUN) -m pytest tests/scale/test_ray_data.py tests/scale/test_extract_dataset.py

gpu: ## on a machine with a CUDA device: tests, benchmarks, memory checks, tuning, in parts A to F, as many as BUDGET=1800 seconds hold; PART="A B": those
	@MAKE="$(MAKE)" PYTHON="$(PYTHON)" PART="$(PART)" BUDGET="$(BUDGET)" sh tools/gpu.sh

gpu-full: $(RUN) ## there, the whole grid of benchmarks; resumes a stopped run
	$(RUN) -m icl_patch bench --device cuda --out "$(RESULTS)"

tune: $(RUN) ## there, choose the Triton kernels' configurations for the GPU and write its data file; TUNE=--quick takes minutes
	$(RUN) -m icl_patch tune --device cuda --out triton_kernels/configs $(TUNE)

profile: $(RUN) ## profile the products and a decode step with Nsight Compute and torch.profiler
	$(RUN) tools/profiles.py

# Apart from the rest, as torchao.
build/sphinx: pyproject.toml | $(RUN)
	rm -rf $@
	$(PIP) --target $@ $(GROUP)

docs: $(RUN) build/sphinx ## the documentation as a site, into build/docs/index.html: strict, with search, without a network
	PYTHONPATH=build/sphinx $(RUN) docs/site/build_site.py build/docs

build/auditwheel: | $(RUN)
	$(PIP) --target $@ $(GROUP)

wheels: $(RUN) build/auditwheel ## a source distribution, and from it a manylinux wheel, into dist; audited, and run in an empty environment
	PYTHONPATH="$(CURDIR)/build/auditwheel" PATH="$(CURDIR)/build/auditwheel/bin:$$PATH" sh tools/wheels.sh "$(CURDIR)/$(RUN)"

lint: $(RUN) ## ruff, the import contracts, mypy, and the native library's symbols
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tools/lint.py imports
	$(RUN) tools/lint.py types
	$(RUN) tools/lint_native.py

format: $(RUN) ## let ruff format the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

train: $(RUN) ## train the embedded model again, into build/embedded (less than half an hour)
	$(RUN) tools/train_embedded.py build/embedded

clean: ## remove everything that make made, .venv included
	rm -rf build dist .venv *.egg-info icl_patch/ops/_native.so .pytest_cache .mypy_cache .ruff_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
