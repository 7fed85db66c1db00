# Everything here works from a fresh clone: what a target needs is set up first, once.
# PYTHON=… names the Python to use; ARGS=… is handed to pytest, to the benchmarks or to the demo.

RUN := .venv/bin/python
SRC := src tests examples bench scripts
# Strict: a link that leads nowhere is an error. The variable silences an advertisement of the theme.
SITE := NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

.PHONY: help setup setup-demo demo demo-kube test check format reference site bench sim soak clean

help:
	@echo "make demo     train a small model, break it in three ways, watch it recover"
	@echo "make demo-kube  the same on Kubernetes: a real API server, the operator, Ray nodes, a slice that dies"
	@echo "make test     run the tests, in several processes  (ARGS='-k name': in one)"
	@echo "make check    lint, types, import rules, documentation"
	@echo "make format   format the code"
	@echo "make site     build the documentation into build/site"
	@echo "make reference  write the reference pages from docstrings"
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
	@$(SITE) --quiet

site: setup
	@$(SITE)

reference:
	@$(or $(wildcard $(RUN)),python3) scripts/reference.py

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
