# Everything starts from a clean clone with only Python (3.10 or later), make and git.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
$(if $(VERSION),,$(error $(PYTHON) cannot be run; Python 3.10 or later is needed))
# Another Python has an environment of its own: `make test PYTHON=python3.13` makes .venv-3.13.0.
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(VERSION))
BIN := $(VENV)/bin
WORKERS ?= 2
# Tests start hundreds of processes, and each would compile the whole package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo package schemas pythons lowest docs orchestrators test full exhaustive cluster serving check fuzz format parity parity-table peers elastic lab again draws facts own bench mutants scaling memory rehearsal s3 chaos report-test clean

help:
	@echo "make demo     convert a bundled real checkpoint and compare it with its ground truth"
	@echo "make test     the tests that show most in little time: about five minutes on two cores"
	@echo "make full     the rest of them: whole jobs, kills, documents, memory, more cases, more examples"
	@echo "make exhaustive  every source to every target, of which these run a sample, and more tensors"
	@echo "make cluster  more on real Ray heads and clusters: jobs that fail, nodes, heads and workers that are killed, memory"
	@echo "make serving  load exports of sharded jobs with transformers, and compare the logits with those of the Paddle models"
	@echo "make report-test  open reports and the documentation in Chromium: clicks, keys, searches (Debian: apt-get install chromium)"
	@echo "make check    formatter, linter, types, import contracts"
	@echo "make format   format the code and apply the linter's fixes"
	@echo "make docs     the documentation as a site in English and Chinese and a manual page, into .docs"
	@echo "make orchestrators  the examples for Prefect and Airflow, each with the real thing (1 GB)"
	@echo "make package  build wheel and source distribution, check them, and convert with the wheel in a clean environment"
	@echo "make pythons  the demo and a sample of the tests with the wheel and every Python from 3.10 to 3.13 that is here"
	@echo "make lowest   convert with the wheel and the lowest version of every dependency that pyproject.toml allows, and beside a trainer's packages"
	@echo "make mutants  plant small errors in a copy of the code, one after the other, and see whether the nearest tests notice (ARGS=flush: some)"
	@echo "make schemas  write the schema of --json from the types of the answers"
	@echo "make fuzz     longer fuzzing of everything that reads a checkpoint, and of conversions between random topologies"
	@echo "make parity   resume the real trainer from our conversions (needs Python 3.11; half an hour)"
	@echo "make lab      the environment of the real trainer (needs Python 3.11)"
	@echo "make again    make a sample of the corpus again in the real trainer, and compare (ARGS='moe/moe_mp2')"
	@echo "make draws    real jobs drawn by chance, converted, and held against live memory and real files (ARGS='--seed 7 --count 40')"
	@echo "make facts    build the trainer's model classes and write tests/facts (some minutes)"
	@echo "make parity-table  losses after a change of strategy, into tests/parity/losses.md (two hours; can be interrupted)"
	@echo "make peers    what brings a checkpoint to another topology: other converters and ours, into docs/peers.md (half an hour)"
	@echo "make own      a class that no table knows describes itself in the real trainer, is converted and resumed (ten minutes)"
	@echo "make elastic  kill a job of the real trainer and go on with other ranks, again and again, into tests/elastic/losses.md (ten minutes)"
	@echo "make bench    convert 4 GB, compared with cp -r, paddle.load and others, into benchmarks/disk.md (ARGS=--quick)"
	@echo "make scaling  how conversions gain from more cores, and where they wait; eight minutes (ARGS=--write: into benchmarks/scaling.md)"
	@echo "make memory   private memory of conversions of 270,000 tensors (ARGS='--layers 10': fewer tensors)"
	@echo "make rehearsal  index, plan, run, kill, resume and verify a conversion of 671B from 2,048 ranks to 512, into benchmarks/rehearsal.md (ARGS='--layers 4': print a smaller one)"
	@echo "make s3       conversions on a private Ceph server, into benchmarks/s3.md (Debian; 15 minutes)"
	@echo "make chaos    kill a conversion of 1 GB 100 times at random and resume it (ARGS='--kills 10', ARGS=--s3: on Ceph)"
	@echo "make clean    remove the environment and everything that these commands made"

# Every environment has this link; where it is missing, python3 was another Python when the environment was made.
$(BIN)/python$(basename $(VERSION)):
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.made: $(BIN)/python$(basename $(VERSION))
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.made
	$(BIN)/pip install --quiet -e . safetensors
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.made
	$(BIN)/pip install --quiet -e '.[arrow,s3,ray,test,check,docs]'
	touch $@ $(VENV)/.demo

CASE := tests/golden/cases/mp2pp2sh2_s1v2_meta_ema

demo: $(VENV)/.demo
	rm -rf .demo
	$(BIN)/paddle-reshard inspect $(CASE)/checkpoint-3
	$(BIN)/paddle-reshard convert $(CASE)/checkpoint-3 .demo/one-card --to tp=1
	$(BIN)/python tests/golden/compare_one_card.py .demo/one-card $(CASE)/truth.safetensors
	$(BIN)/paddle-reshard convert $(CASE)/checkpoint-3 .demo/pp4-sharding2 --to pp=4,sharding=2
	$(BIN)/paddle-reshard verify $(CASE)/checkpoint-3 .demo/pp4-sharding2

# Of the tests that run anywhere.
HERE := not exhaustive and not cluster and not serving and not browser

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --hypothesis-profile light -m 'not full and $(HERE)'

full: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m '(full or hypothesis) and $(HERE)'

exhaustive: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m exhaustive

cluster: $(VENV)/.test
	$(BIN)/python -m pytest -q -m cluster

# Of torch the build for CPUs is enough, which PyPI does not have for Linux: 0.2 GB instead of several. Where its own
# index can be reached: make serving PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
$(VENV)/.serving: pyproject.toml $(VENV)/.test
	$(BIN)/pip install --quiet -e '.[arrow,s3,ray,test,serving]' || { echo "make serving needs torch and transformers from the package index; see 'serving' in pyproject.toml"; exit 1; }
	touch $@

serving: $(VENV)/.serving
	$(BIN)/python -m pytest -q -m serving tests/serving

$(VENV)/.browser: pyproject.toml $(VENV)/.test
	$(BIN)/pip install --quiet -e '.[arrow,s3,ray,test,browser]'
	touch $@

report-test: $(VENV)/.browser
	$(BIN)/python -m pytest -q -m browser tests/report tests/documents

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.docs: pyproject.toml $(VENV)/.made
	$(BIN)/pip install --quiet -e '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs .docs/site
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html -c docs -D language=zh_CN docs/zh .docs/site/zh
	$(BIN)/python -m sphinx -q -E -W --keep-going -b man docs .docs/man

# Prefect and Airflow require other versions of the same packages, so each has an environment of its own.
ORCHESTRATORS := $(CURDIR)/.orchestrators
orchestrators:
	rm -rf $(ORCHESTRATORS)
	mkdir -p $(ORCHESTRATORS)/run $(ORCHESTRATORS)/airflow/dags
	cp -r $(CASE)/checkpoint-3 $(ORCHESTRATORS)/run
	$(PYTHON) -m venv $(ORCHESTRATORS)/with-prefect
	$(ORCHESTRATORS)/with-prefect/bin/pip install --quiet prefect 'fastapi<0.140' .
	cd $(ORCHESTRATORS) && PREFECT_HOME=$(ORCHESTRATORS)/prefect PREFECT_SERVER_ALLOW_EPHEMERAL_MODE=true \
		PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=120 \
		with-prefect/bin/python $(CURDIR)/examples/prefect_flow.py run by-prefect tp=1
	$(PYTHON) -m venv $(ORCHESTRATORS)/with-airflow
	$(ORCHESTRATORS)/with-airflow/bin/pip install --quiet apache-airflow apache-airflow-providers-standard .
	cp examples/airflow_dag.py $(ORCHESTRATORS)/airflow/dags
	cd $(ORCHESTRATORS) && export PATH=$(ORCHESTRATORS)/with-airflow/bin:$$PATH AIRFLOW_HOME=$(ORCHESTRATORS)/airflow \
		AIRFLOW__CORE__LOAD_EXAMPLES=False RESHARD_RUN=$(ORCHESTRATORS)/run RESHARD_TARGET=$(ORCHESTRATORS)/by-airflow \
		&& airflow db migrate && airflow dags reserialize && airflow dags test convert_finished_checkpoints
	$(ORCHESTRATORS)/with-airflow/bin/paddle-reshard verify $(ORCHESTRATORS)/run/checkpoint-3 $(ORCHESTRATORS)/by-prefect/checkpoint-3
	$(ORCHESTRATORS)/with-airflow/bin/paddle-reshard verify $(ORCHESTRATORS)/run/checkpoint-3 $(ORCHESTRATORS)/by-airflow/checkpoint-3

package:
	rm -rf dist .package
	$(PYTHON) -m venv .package
	.package/bin/pip install --quiet --upgrade pip build twine
	.package/bin/python -m build --outdir dist .
	.package/bin/twine check --strict dist/*
	rm -rf .package
	$(PYTHON) -m venv .package
	.package/bin/pip install --quiet dist/*.whl
	cd .package && bin/paddle-reshard convert ../$(CASE)/checkpoint-3 one-card --to tp=1
	cd .package && bin/paddle-reshard verify ../$(CASE)/checkpoint-3 one-card
	rm -rf .package
	$(MAKE) pythons
	$(MAKE) lowest

# All from the cache of uv but for the first time: a minute for each on two cores.
pythons:
	rm -rf .pythons
	$(PYTHON) -m venv .pythons
	.pythons/bin/pip install --quiet uv
	.pythons/bin/uv build --quiet --python .pythons/bin/python --out-dir .pythons/dist .
	tests/pythons.sh .pythons/bin/uv .pythons/dist .pythons
	rm -rf .pythons

# pip always takes the newest versions; uv can take the lowest, here of those that have a wheel for this Python.
lowest:
	rm -rf .lowest
	$(PYTHON) -m venv .lowest
	.lowest/bin/pip install --quiet uv
	.lowest/bin/uv build --quiet --python .lowest/bin/python --out-dir .lowest/dist .
	# Of pyproject.toml: what a wheel needs is not direct, and would be the newest.
	.lowest/bin/uv pip install --quiet --python .lowest/bin/python --resolution lowest-direct --only-binary :all: \
		-r pyproject.toml --extra arrow --extra s3 --extra ray --extra metrics
	.lowest/bin/uv pip install --quiet --python .lowest/bin/python --no-deps .lowest/dist/*.whl
	.lowest/bin/uv pip list --python .lowest/bin/python
	cd .lowest && bin/paddle-reshard convert ../$(CASE)/checkpoint-3 one-card --to tp=1 --report one-card.html
	cd .lowest && bin/paddle-reshard watch ../$(CASE) watched --once --settle 0 --metrics-port 0 --to tp=1
	cd .lowest && bin/paddle-reshard verify ../$(CASE)/checkpoint-3 one-card
	cd .lowest && bin/paddle-reshard verify ../$(CASE)/checkpoint-3 one-card --cluster ray
	cd .lowest && bin/paddle-reshard plan one-card two --to tp=2 --save two.plan
	cd .lowest && bin/paddle-reshard convert one-card two --plan two.plan --to tp=2
	.lowest/bin/python -c 'from s3fs import S3FileSystem; import paddle_reshard.storage.s3'
	# Beside a trainer: all is the newest but fsspec, which the `datasets` of PaddleFormers holds back.
	.lowest/bin/uv venv --quiet --python .lowest/bin/python .lowest/trainer
	.lowest/bin/uv pip install --quiet --python .lowest/trainer/bin/python datasets==4.0.0 "$$(ls .lowest/dist/*.whl)[s3]"
	.lowest/bin/uv pip check --python .lowest/trainer/bin/python
	.lowest/bin/uv pip install --dry-run --python .lowest/trainer/bin/python paddleformers==1.2.0 datasets==4.0.0 "$$(ls .lowest/dist/*.whl)[s3]"
	cd .lowest && trainer/bin/paddle-reshard convert ../$(CASE)/checkpoint-3 beside --to pp=4,sharding=2
	cd .lowest && trainer/bin/paddle-reshard verify ../$(CASE)/checkpoint-3 beside
	.lowest/trainer/bin/python -c 'import paddle_reshard.storage.s3; from paddle_reshard import load_into, names_callback, ema_callback'
	rm -rf .lowest

fuzz: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --hypothesis-profile many tests/hostile tests/properties

schemas: $(VENV)/.test
	$(BIN)/python -m tests.schemas

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants.run $(ARGS)

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

parity: $(VENV)/.test
	$(BIN)/python -m tests.parity.run
	$(BIN)/python -m tests.parity.families
	$(BIN)/python -m tests.parity.ema
	$(BIN)/python -m tests.parity.live
	$(BIN)/python -m tests.parity.command_line

lab: $(VENV)/.test
	$(BIN)/python -c "from tests.parity.lab import python_of; print(python_of('pf'))"

again: $(VENV)/.test
	$(BIN)/python -m tests.lab.corpus $(ARGS)

draws: $(VENV)/.test
	$(BIN)/python -m tests.lab.draws $(ARGS)

facts: $(VENV)/.test
	"$$($(BIN)/python -c 'from tests.parity.lab import python_of; print(python_of("pf"))' | tail -1)" tests/lab/facts.py $(ARGS)

peers: $(VENV)/.test
	$(BIN)/python -m tests.peers $(ARGS)

parity-table: $(VENV)/.test
	$(BIN)/python -m tests.parity.table $(ARGS)

own: $(VENV)/.test
	$(BIN)/python -m tests.lab.own $(ARGS)

elastic: $(VENV)/.test
	$(BIN)/python -m tests.elastic.run

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.disk $(ARGS)

scaling: $(VENV)/.test
	$(BIN)/python -m benchmarks.scaling $(ARGS)

memory: $(VENV)/.test
	$(BIN)/python -m benchmarks.many $(ARGS)

rehearsal: $(VENV)/.test
	$(BIN)/python -m benchmarks.rehearsal $(ARGS)

s3: $(VENV)/.test
	$(BIN)/python -m benchmarks.s3 $(ARGS)

chaos: $(VENV)/.test
	$(BIN)/python -m benchmarks.chaos $(ARGS)

clean:
	rm -rf .venv .venv-* .corpus .demo .disk .docs .draws .own .package .lowest .pythons .parity .peers .bench .s3 .chaos .orchestrators build dist *.egg-info
