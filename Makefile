PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint docs bench clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/selftpt demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Writes site/. Needs no network, and fails on any warning. The variable silences a notice of the theme about MkDocs 2.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: lint docs
	$(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term

bench: setup
	$(BIN)/python benchmarks/text_path.py --json
	$(BIN)/python benchmarks/predict.py --json
	$(BIN)/python benchmarks/features.py --json
	$(BIN)/python benchmarks/tpt.py --json

clean:
	rm -rf .venv .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
