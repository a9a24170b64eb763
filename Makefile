# From text to a verified checkpoint: `make demo`. All targets: `make help`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help

BIN := .venv/bin
ROOT := work
# How many test files run at the same time: on two cores three, as tests wait for a third of their time. A file's tests
# stay in one process, as they share what is slow to make.
WORKERS := 3
# OpenMP's threads sleep while they wait: two processes have more of them than there are cores, and spinning takes minutes.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes, and each would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
# PYTHON=/path/to/python3.11 chooses the interpreter that .venv is made from. Shims of version managers may be on
# PATH and yet not run, so a candidate is asked for its version.
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& command -v $$python && break; done)

.PHONY: help setup demo demo-cluster test test-fast test-matrix test-ui screenshots test-cluster test-slurm dockerfile-steps lint types bench corruptions certificate-faults mutations test-durations test-runs prove bench-consolidate bench-publish variants-table faults resumes kills pretraining-kills finetuning-kills finetuning-trial prediction-equality serve-load upload-faults operation-faults regression-faults regression-quiet io-faults results-page settings-page recording up clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: .venv/.installed .venv/.segmenter .venv/.ops-built ## Make .venv and install everything; quick when nothing has changed

demo: setup ## The whole chain on two CPU ranks, from Python's documentation to a published checkpoint
	@$(BIN)/t5-pretrain run smoke --root $(ROOT)

demo-cluster: setup ## The same on two hosts that share nothing, made of namespaces on this machine (root)
	@$(BIN)/python -m infra.testcluster demo --root $(ROOT)

test: setup .venv/.triton lint types ## Everything that must pass: lint, types, and the tests that need one machine only
	@.ci/postgresql
	$(PYTEST) -m "not cluster and not ui"

test-fast: setup ## The quick tests, which start neither DeepSpeed nor a server
	@$(PYTEST) -m "not slow and not cluster"

test-matrix: setup ## The tests of layouts with all layouts; `make test` takes those with all pairs of factors
	@TEST_MATRIX=1 $(PYTEST) tests/t5train/train/test_training.py

test-ui: setup ## The tests that look at Prefect's pages in a browser
	@.ci/browser
	$(PYTEST) tests/deployments/ui

screenshots: setup ## Take the documentation's pictures of Prefect's pages, in the same tests
	@.ci/browser
	SCREENSHOTS=docs/images $(BIN)/pytest -m ui

test-cluster: setup ## The tests that need several hosts, made of namespaces on this machine (root)
	@$(PYTEST) tests/cluster

test-slurm: setup ## Submit the example for Slurm to a Slurm of this machine (root)
	@.ci/slurm
	$(BIN)/pytest tests/deployments/test_slurm.py

dockerfile-steps: setup ## Execute the Dockerfile's steps in a chroot, and train in it (root; BIND='--bind FILE' for pip)
	@command -v debootstrap >/dev/null || .ci/apt-install debootstrap
	unshare --mount $(BIN)/python -m tests.acceptance.dockerfile_steps --into $(ROOT)/image $(BIND)

lint: setup ## ruff: rules and format
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	@$(BIN)/mypy

bench: setup ## Run all CPU benchmarks, one after the other
	@for benchmark in tokenise span_corruption sample_order reading data_wait initial_weights saving consolidate preflight prefect_overhead; do $(BIN)/python -m "benchmarks.$$benchmark"; done

corruptions: setup ## Damage small checkpoints in 10,000 ways; each must be refused before anything is unpickled
	@$(BIN)/python -m tests.acceptance.corruptions

certificate-faults: setup ## Change exports before certification, one fault at a time, up to 600; each must be refused
	@$(BIN)/python -m tests.acceptance.certificate_faults

mutations: setup ## Plant faults in a copy of the code, one at a time; tests must notice each; continues where it was interrupted
	@$(BIN)/python -m tests.acceptance.mutations --jobs $(WORKERS)

test-durations: setup ## Run all tests (root), and write to docs/evidence/test-durations.md what each took
	@$(BIN)/python -m tests.acceptance.measure_tests

test-runs: setup ## Run all tests ten times, half of them on busy cores and in random order (root); continues where it was interrupted
	@$(BIN)/python -m tests.acceptance.repeat_tests

prove: setup ## Run the long proofs that are due, and record each in docs/evidence/proofs.md; hours, continues where it was interrupted
	@$(BIN)/python -m tests.acceptance.prove

bench-consolidate: setup ## Compare consolidation of 1.1 billion parameters with cp and zero_to_fp32, then 3 billion alone; 50 GB of disk
	@$(BIN)/python -m benchmarks.consolidate --parameters 1.1e9 --rounds 5 --alone 0.25e9 1.1e9 3e9

bench-publish: setup ## Compare publishing to an S3 server with s5cmd, if it is installed, and boto3; writes benchmarks/results/publishing.json
	@$(BIN)/python -m benchmarks.publishing --into benchmarks/results/publishing.json

variants-table: setup ## Train every layout and plain data parallelism, and write the table in docs/evidence/layouts.md
	@$(BIN)/python -m tests.acceptance.layout_equality --into docs/evidence/layouts.md

faults: setup ## Inject every fault into runs on the test cluster (needs root), and write the table in docs/evidence/faults.md
	@$(BIN)/python -m tests.acceptance.fault_table --into docs/evidence/faults.md

resumes: setup ## Resume runs after every kind of damage (needs root), and write the table in docs/evidence/resumes.md
	@$(BIN)/python -m tests.acceptance.resume_table --into docs/evidence/resumes.md

kills: pretraining-kills finetuning-kills ## Kill processes that save, gather, consolidate, publish and tokenise, 300 times at random moments

pretraining-kills: setup ## The part of `make kills` with runs on text, and tokenising
	@$(BIN)/python -m tests.acceptance.kills.kill_all
	$(BIN)/python -m tests.acceptance.kills.kill_tokenising

finetuning-kills: setup ## The part of `make kills` with runs on pairs, of all weights and of adapters
	@$(BIN)/python -m tests.acceptance.kills.kill_all --recipe reverse_and_sort --kills 10
	$(BIN)/python -m tests.acceptance.kills.kill_all --recipe reverse_and_sort --kills 10 --lora

finetuning-trial: setup ## Fine-tune with three seeds, and once more with three kills of everything; ten minutes
	@$(BIN)/python -m tests.acceptance.finetuning_trial --into benchmarks/results/finetuning_trial.json
	$(BIN)/python -m benchmarks.results_page

prediction-equality: setup ## Compare 500 predictions with those of a plain script, and kill predicting ten times; five minutes
	@$(BIN)/python -m tests.acceptance.prediction_equality --into benchmarks/results/prediction_equality.json
	$(BIN)/python -m benchmarks.results_page

serve-load: setup ## Serve a model to 64 clients for two minutes, and compare each answer with that of generate
	@$(BIN)/python -m tests.acceptance.serve_load --clients 64 --seconds 120 --into benchmarks/results/serve_load.json
	$(BIN)/python -m benchmarks.results_page

upload-faults: setup ## Kill and disturb uploads to an S3 server, kill the server, fill its disk, and let uploads race; half an hour
	$(BIN)/python -m pytest -n 0 tests/t5train/release/object_store --kill-rounds 100

operation-faults: setup ## Kill worker, server, flow and head 100 times while a run trains (needs root); continues where it was interrupted
	@$(BIN)/python -m tests.acceptance.operation.operation_kills --root $(ROOT)/operation-faults --into docs/evidence/operation-faults.md

regression-faults: setup ## Plant faults in the training code, one a night; the regression must find each; continues where it was interrupted
	@$(BIN)/python -m tests.acceptance.regression_faults --root $(ROOT)/regression-faults --into docs/evidence/regression-faults.md

regression-quiet: setup ## Run the regression ten times without a fault, and report false alarms; continues where it was interrupted
	@$(BIN)/python -m tests.acceptance.regression_quiet --root $(ROOT)/regression-quiet --repeats 10

io-faults: setup ## Make every system call on a file fail in turn; continues where it was interrupted (io-faults.jsonl)
	@$(BIN)/python -m tests.acceptance.io_faults

results-page: setup ## Write the tables in docs/evidence/measurements.md from benchmarks/results
	@$(BIN)/python -m benchmarks.results_page

settings-page: setup ## Write docs/reference/settings.md from the descriptions of the settings
	@$(BIN)/python -m tests.support.settings_page > docs/settings.new && mv docs/settings.new docs/reference/settings.md

recording: setup ## Record the README's terminal session, from a text to a published model
	@$(BIN)/python -m tests.acceptance.terminal_recording --into docs/images/first-run.gif

up: setup ## Prefect server, pool and worker for this machine
	@$(BIN)/t5-pretrain up

clean: ## Remove .venv and what tools have cached; what runs have made stays
	@rm -rf .venv t5train/data/native/*.so build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(ROOT)/*' -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@python="$(PYTHON)"
	if [ -z "$$python" ]; then
		echo "setup: no Python 3.11 or 3.12 on PATH; install one (Debian: python3) or run make PYTHON=/path/to/it" >&2
		exit 1
	fi
	.ci/system-packages "$$python"
	.ci/cluster-packages
	"$$python" -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[flows,serve,s3,hub,wikipedia,vectors,dask,dev]'
	touch $@

# Without a GPU, tests interpret the kernels. Without Triton they are skipped, but not in continuous integration, where CI
# is set.
.venv/.triton: .venv/.installed constraints-kernels.txt
	@$(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/python -m pip install --constraint constraints.txt --constraint constraints-kernels.txt --editable '.[kernels]' \
		|| { echo "setup: Triton could not be installed; the tests of kernels will be skipped" >&2; [ -z "$${CI:-}" ]; }
	touch $@

# Tokenising is three times as fast with it.
.venv/.segmenter: .venv/.installed $(wildcard t5train/data/native/*.h t5train/data/native/*.cpp)
	@$(BIN)/python -m t5train.data.native.segmenter_build
	touch $@

# DeepSpeed compiles its CPU communication and its Adam at first use; here they are compiled before anything waits.
.venv/.ops-built: .venv/.installed
	@$(BIN)/python -m infra.node.compiled_operators
	touch $@
	@echo "setup: done; $(BIN)/t5-pretrain --help lists the commands" >&2
