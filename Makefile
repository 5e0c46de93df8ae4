# `make grpo` runs the main job on the embedded default, `make test` the tests; both install what is missing first.
PYTHON ?= python3
EXTRA ?= cpu
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-$(EXTRA)
SETTINGS ?=

# A run imports torch in half a dozen processes: with bytecode on disk that takes a third of the time.
unexport PYTHONDONTWRITEBYTECODE

# uv does not read pip's own find-links setting. Where none is set, PyTorch's CPU builds come from PyTorch's own index.
UV_SOURCES := $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)",$(if $(filter cpu,$(EXTRA)),UV_TORCH_BACKEND=cpu))
# Sandboxes need a C compiler once. Where the machine has none, one comes as a package.
COMMA := ,
EXTRAS := $(EXTRA) dev $(if $(shell command -v cc gcc clang),,compiler)
UV_OVERRIDES := $(wildcard constraints/$(EXTRA)-overrides.txt)

.PHONY: install sft grpo eval calculator guessing coding test test-all gpu check peer docs clean

install: $(INSTALLED)

# The import compiles the libraries once; a run's or the tests' processes would each do it, all at the same time.
$(INSTALLED): pyproject.toml constraints/$(EXTRA).txt $(UV_OVERRIDES)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(UV_SOURCES) $(VENV)/bin/uv pip install --quiet --python $(RUN) --constraint constraints/$(EXTRA).txt \
		$(if $(UV_OVERRIDES),--overrides $(UV_OVERRIDES)) --editable '.[$(subst $() ,$(COMMA),$(strip $(EXTRAS)))]'
	$(RUN) -c "import tests.imported_once, os; os._exit(0)" 2> /dev/null
	touch $@

# The warm start does nothing when it is done already.
sft: $(INSTALLED)
	$(RUN) -m apps.sft.main --config configs/sft/tiny.yaml

grpo: sft
	$(RUN) -m apps.grpo.main --config configs/grpo/tiny.yaml $(SETTINGS)

eval: sft
	$(RUN) -m apps.eval.main --config configs/eval/tiny.yaml $(SETTINGS)

# The agents that ship, each from its warm start.
calculator: $(INSTALLED)
	$(RUN) -m apps.agent.tasks runs/tasks
	$(RUN) -m apps.sft.main --config configs/sft/calculator.yaml
	$(RUN) -m apps.agent.main --config configs/agent/calculator.yaml $(SETTINGS)

guessing: $(INSTALLED) .venv-openenv/.installed
	$(RUN) -m apps.agent.tasks runs/tasks
	$(RUN) -m apps.sft.main --config configs/sft/guessing.yaml
	$(RUN) -m apps.agent.guessing --config configs/agent/guessing.yaml $(SETTINGS)

# SEED=1 makes other tasks, demonstrations and weights.
SEED ?= 0
CODING := runs/coding-tiny-$(SEED)
coding: $(INSTALLED)
	$(RUN) -m apps.coding.tiny $(CODING) $(SEED)
	$(RUN) -m apps.sft.main --config configs/sft/coding_copying.yaml output=$(CODING)/copying tiny.seed=$(SEED) \
		data.files=[$(CODING)/copying.jsonl] data.seed=$(SEED)
	$(RUN) -m apps.sft.main --config configs/sft/coding.yaml output=$(CODING)/warm model.path=$(CODING)/copying \
		data.files=[$(CODING)/demonstrations.jsonl] data.seed=$(SEED)
	$(RUN) -m apps.coding.main --config configs/coding/tiny.yaml model.path=$(CODING)/warm \
		prompts.files=[$(CODING)/tasks] prompts.seed=$(SEED) $(SETTINGS)

# TRL has an environment of its own: its dependencies are not ours.
PEER := .venv-peer
$(PEER)/.installed: constraints/peer.txt $(INSTALLED)
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)",UV_TORCH_BACKEND=cpu) $(VENV)/bin/uv pip install --quiet \
		--python $(PEER)/bin/python --constraint constraints/peer.txt trl
	touch $@

peer: sft $(PEER)/.installed
	$(RUN) -m bench.peer --peer-python $(PEER)/bin/python $(SETTINGS)

# So has the openenv package, with whose servers the tests talk. Packages that a server does not import are left out.
OPENENV := .venv-openenv
$(OPENENV)/.installed: constraints/openenv.txt constraints/openenv-overrides.txt $(INSTALLED)
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv --without-pip $(OPENENV)
	$(UV_SOURCES) $(VENV)/bin/uv pip install --quiet --python $(OPENENV)/bin/python --constraint constraints/openenv.txt \
		--overrides constraints/openenv-overrides.txt openenv
	touch $@

# Three workers keep two cores busy: tests wait for processes, timeouts and clients.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(INSTALLED) $(OPENENV)/.installed
	$(PYTEST) -m "not slow and not documents"

# Both lanes, one after the other: each prints its own seconds.
test-all: test
	$(PYTEST) -m slow

# What only a GPU can show, on one of them: needs EXTRA=cuda. Writes docs/results/gpu.json.
gpu: $(INSTALLED)
	$(RUN) -m bench.gpu $(SETTINGS)

check: $(INSTALLED) docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --summarize-errors
	$(RUN) -m pytest -q tests/unit/test_docs.py tests/unit/test_imports.py tests/unit/test_invariant_labels.py \
		tests/unit/test_documented_keys.py

# The documentation site; a warning, such as a link that leads nowhere, is an error.
docs: $(INSTALLED)
	$(RUN) -m sphinx -q -W --keep-going -b html docs build/docs

clean:
	rm -rf $(VENV) $(PEER) $(OPENENV) .pytest_cache .ruff_cache .hypothesis
