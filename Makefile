# make demo    a training with a fault: the verdict, what fixing it saved, and the page
# make page    builds the web page from viewer/ into the package; needs Node
# make test    everything the tests need, then the tests
# make test-programs training scripts of many kinds: the same results as without us, the right tree; examples
# make test-loops    ciclo in real processes: strategies, ranks, kills, preemption
# make test-hostile  attacks: planted files, values that raise or block, kills, full and hung disks
# make test-heavy  the tests that need TensorFlow, or older releases of frameworks
# make soak    runs that are killed again and again, and one that does everything at once
# make lint    ruff and mypy
# make bench   ours beside the published SDK and OpenTelemetry
# Each target sets up what it needs on its own.

PYTHON ?= python3
BIN := .venv/bin
PEERS := bench/.venv
# Releases that are a year old, with what they need older, too.
OLDEST_TRAINERS := transformers==4.57.3 tokenizers==0.22.1 huggingface_hub==0.36.0 \
  accelerate==1.11.0 lightning==2.5.6 pytorch-lightning==2.5.6
TIMED := $(patsubst %,tests/real/hostile/test_%.py,flush_tells hostile_delivery kills limits \
  no_disk_on_the_users_thread signals_and_greenlets slow_sinks soak waiting_spans)

# Where it is set, each of some thousand processes would compile our source again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo page test test-programs test-loops test-hostile test-heavy soak lint bench clean
.DELETE_ON_ERROR:

setup: .venv/.test

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The package alone: what a user gets.
.venv/.package: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

# And what the tests need.
.venv/.test: pyproject.toml constraints.txt | .venv/.package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# And what takes long to install.
.venv/.test-heavy: pyproject.toml constraints.txt | .venv/.test
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,test-heavy]"
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/oldest-keras keras==3.12.0
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/oldest-trainers $(OLDEST_TRAINERS)
	# A browser for the page's tests, which are skipped without one.
	command -v chromium >/dev/null || apt-get install --quiet --yes chromium >/dev/null 2>&1 || true
	touch $@

# And what the demo trains with.
.venv/.demo: pyproject.toml constraints.txt | .venv/.package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[torch,snapshots]" scikit-learn
	touch $@

demo: .venv/.demo
	$(BIN)/python examples/demo.py

# Not `npm ci`: it wants the builds for other systems in the lock file, too.
viewer/node_modules/.done: viewer/package.json viewer/package-lock.json
	cd viewer && npm install --no-save --silent
	touch $@

# What it builds is committed, so that users need no Node.
page: viewer/node_modules/.done
	cd viewer && npm run --silent check && npm run --silent build

# On all cores, a file at a time.
test: .venv/.test
	$(BIN)/pytest -m "not heavy" --ignore tests/real/hostile --ignore tests/real/ciclo \
	  --ignore tests/real/programs --ignore tests/docs/test_examples.py \
	  --ignore tests/real/server/test_hostile_requests.py \
	  --ignore tests/real/server/test_peers_flaws.py --numprocesses auto --dist loadfile

test-programs: .venv/.test
	$(BIN)/pytest -m "not heavy" tests/real/programs tests/docs/test_examples.py \
	  --numprocesses auto --dist loadgroup

test-loops: .venv/.test
	$(BIN)/pytest -m "not heavy" tests/real/ciclo --numprocesses auto --dist loadfile

# One at a time, where a test is about time.
test-hostile: .venv/.test
	$(BIN)/pytest -m "not heavy" tests/real/hostile tests/real/server/test_hostile_requests.py \
	  tests/real/server/test_peers_flaws.py $(addprefix --ignore ,$(TIMED)) --numprocesses auto
	$(BIN)/pytest -m "not heavy" $(TIMED)

# The page by itself: what is on it within two seconds is a test. The older release of transformers
# looks for everything that it could work with.
test-heavy: .venv/.test-heavy
	$(BIN)/pytest -m heavy --ignore tests/real/test_page.py --numprocesses auto --dist loadfile
	$(BIN)/pytest -m heavy tests/real/test_page.py
	USE_TF=0 USE_FLAX=0 PYTHONPATH=$(CURDIR)/.venv/oldest-trainers $(BIN)/pytest \
	  tests/real/test_trainer.py tests/real/test_trainer_processes.py tests/real/test_lightning.py \
	  --numprocesses auto --dist loadfile

# Recording processes that are killed 200 times: nothing older than the flush interval is lost. Ten
# minutes of everything at once (SECONDS=60 makes it one): each record is stored or counted. Runs
# that are killed 50 times each and started again: the same end, to the bit. Servers that are killed
# 100 times while ranks send: nothing that was acknowledged is lost or doubled.
soak: .venv/.test
	$(BIN)/python tests/real/hostile/kills.py --kills 200
	$(BIN)/python tests/real/hostile/kills.py --kills 10 --shapes spin
	$(BIN)/python tests/real/hostile/soak.py
	$(BIN)/python tests/real/server/server_kills.py --rounds 100
	for case in plain numpy torch jax; do \
	  folder=$$(mktemp -d) && here=$$PWD && echo $$case && \
	  (cd $$folder && $$here/$(BIN)/python $$here/tests/real/ciclo/resume_cases.py $$case 50) || exit 1; \
	  rm -rf $$folder; \
	done

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.test $(PEERS)/.done
	$(BIN)/python bench/run.py --peer $(PEERS)/bin/python

$(PEERS)/.done: bench/requirements-peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --requirement bench/requirements-peers.txt
	touch $@

clean:
	rm -rf .venv $(PEERS) .cirron .mypy_cache .pytest_cache .ruff_cache
