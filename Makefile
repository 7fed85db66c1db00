# Everything here works from a fresh clone: what a target needs is set up first, once.
# PYTHON=… names the Python to use; ARGS=… is handed to pytest, to the benchmarks or to the demo.

RUN := .venv/bin/python
SRC := src tests examples bench

.PHONY: help setup setup-demo demo demo-kube test check format bench sim soak clean

help:
	@echo "make demo     train a small model, break it in three ways, watch it recover"
	@echo "make demo-kube  the same on Kubernetes: a real API server, the operator, Ray nodes, a slice that dies"
	@echo "make test     run the tests, in several processes  (ARGS='-k name': in one)"
	@echo "make check    lint, types, import rules"
	@echo "make format   format the code"
	@echo "make bench    measure, beside Ray Train"
	@echo "make sim      a million fresh schedules of faults, simulated, on all cores (ARGS='--schedules 50000')"
	@echo "make soak     hours of faults"
	@echo "make setup    only make .venv"

setup:
	@scripts/setup.sh all

setup-demo:
	@scripts/setup.sh demo

demo: setup-demo
	@$(RUN) examples/demo.py $(ARGS)

demo-kube: setup
	@$(RUN) examples/slices_on_kubernetes.py

test: setup
	$(RUN) -m pytest -n auto $(ARGS)

check: setup
	$(RUN) -m ruff check $(wildcard $(SRC))
	$(RUN) -m ruff format --check $(wildcard $(SRC))
	$(RUN) -m mypy
	.venv/bin/lint-imports --no-logo

format: setup
	$(RUN) -m ruff check --fix $(wildcard $(SRC))
	$(RUN) -m ruff format $(wildcard $(SRC))

bench: setup
	$(RUN) -m bench $(ARGS)

sim: setup-demo
	.venv/bin/everstep sim-check --schedules 1000000 $(ARGS)

soak: setup
	$(RUN) -m pytest -m soak --timeout=0 $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
