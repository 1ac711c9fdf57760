PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: demo test test-slow lint setup clean

demo: $(SETUP) ## install, fetch the built-in target, decode 14 built-in prompts
	$(BIN)/python -m specresearch limit=14 max_new_tokens=64

test: $(SETUP) lint ## everything that runs in minutes
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(SETUP) ## longer checks on the real model
	$(BIN)/python -m pytest -m slow

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
