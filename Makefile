# Everything runs in .venv, which is made when it is first needed and renewed when the requirements change.
# Tools are called as .venv/bin/tool, never as `python -m tool`: that would put this folder on sys.path, and a
# package called `kernels` there breaks transformers (pyproject.toml says why).

PYTHON ?= python3
JOBS   ?= 2# processes that run unit tests side by side
BIN    := .venv/bin
READY  := .venv/.ready
PAGES  := build/html/index.html

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup book lab serve test test-gpu test-long bench lint browser lock clean chapters model

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(READY) ## Make the virtual environment; every other target does so when it has to

book: chapters ## Execute the chapters, build the book, check its pages in a browser
	rm -rf build/pages build/html
	$(BIN)/jupyter-book build build/executed --path-output build/pages -W -n --keep-going --quiet > /dev/null
	mv build/pages/_build/html build/html
	$(BIN)/pytest tests/test_published_book.py
	@echo "The book: $(CURDIR)/$(PAGES)"

lab: $(READY) ## Open the chapters in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=. chapters

serve: $(READY) ## Serve the built book on http://127.0.0.1:8000
	@test -f $(PAGES) || { echo "There is no book yet: run 'make book' first."; exit 1; }
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/html 8000

test: lint model ## Style, types, unit tests, and every chapter
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --ignore=tests/test_published_book.py
	$(BIN)/python tools/execute_chapters.py

test-gpu: $(READY) ## Everything, on a machine with a CUDA device
	$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("make test-gpu needs a CUDA device")'
	env -u TRITON_INTERPRET $(MAKE) test

test-long: $(READY) ## New random traces for memory and scheduling: about a quarter of an hour on two cores
	OMP_NUM_THREADS=1 MIE_PROFILE=long $(BIN)/pytest -n 2 tests/test_memory_properties.py tests/test_schedule_properties.py

bench: chapters ## Count and time everything that is measured, run chapters from 03 on again; print all measurements
	$(BIN)/mie doctor
	$(BIN)/mie bench memory
	$(BIN)/mie bench pool
	$(BIN)/mie bench throughput
	$(BIN)/python tools/execute_chapters.py --again $$(grep -lE 'measure\(|\.times\.' chapters/*.ipynb | grep -v /0[12]-)
	$(BIN)/python tools/print_measurements.py

lint: $(READY) ## Style of code and notebooks, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -q tests/test_notebooks.py
	$(BIN)/mypy

browser: ## Install Chromium for the checks of the built pages, where that can be done
	@bash tools/install_browser.sh

lock: $(READY) ## Write the versions that are installed now into requirements.lock
	$(BIN)/python tools/write_lock.py > requirements.lock.new && mv requirements.lock.new requirements.lock

clean: ## Remove what the targets above have made, but keep .venv
	rm -rf build .ruff_cache .mypy_cache .hypothesis

chapters: model
	$(BIN)/python tools/execute_chapters.py

model: $(READY)
	$(BIN)/mie doctor --fetch

$(READY): pyproject.toml requirements.lock
	bash tools/make_environment.sh $(PYTHON)
	touch $@
