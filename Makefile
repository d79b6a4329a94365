# make demo    install into .venv and run the demo
# make test    install into .venv and run the tests
# make bench   the measured table (with Python 3.13: against nemo-lens)
# make bench-train   what instrumentation costs a training step, plain and compiled (installs torch; some 20 minutes)
# make bench-startup   what `import lensfast` costs, and the size of the wheel
# make docs    build the documentation site into build/docs
# make wheels   build the wheels of every CPython here, install and test them (dist/)
# make release-check   build what a release publishes, twice, and check it
# make lint, make types, make workflows-lint, make instructions, make sanitize: what CI runs as well

PYTHON ?= python3
VENV ?= .venv
# nemo-lens needs 3.13; a pyenv shim may be on PATH and not run.
BENCH_PYTHON ?= $(shell for p in python3.13 $(HOME)/.pyenv/versions/3.13*/bin/python $(PYTHON); do \
    $$p -c '' 2> /dev/null && echo $$p && break; done)
BENCH_VENV ?= .venv-bench
BENCH_OPTIONS ?=
# The CPU is enough, and smaller: BENCH_TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
BENCH_TORCH ?= torch
DEMO_OPTIONS ?=
WHEELS_OPTIONS ?=
RELEASE_OPTIONS ?=

SOURCES := pyproject.toml setup.py lensfast/_gate.pyx $(wildcard csrc/*)
PIP := -m pip --disable-pip-version-check --quiet

.PHONY: demo test bench bench-train bench-startup docs instructions lint types workflows-lint sanitize wheels release-check clean

demo: $(VENV)/.demo
	@$(VENV)/bin/python -m lensfast demo $(DEMO_OPTIONS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(TEST_OPTIONS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

# Disabled sites in three processes: what a site costs depends a little on where the loader puts it.
bench: $(BENCH_VENV)/.bench
	@rm -f $(BENCH_VENV)/bench*.json $(BENCH_VENV)/bench.log
	@$(call time_sites,bench,1)
	@$(call time_sites,bench/test_sites.py,2)
	@$(call time_sites,bench/test_sites.py,3)
	$(BENCH_VENV)/bin/python bench/table.py $(BENCH_VENV)/bench?.json $(BENCH_OPTIONS)

define time_sites
$(BENCH_VENV)/bin/python -m pytest $(1) -q --benchmark-disable-gc --benchmark-columns=min,median,rounds \
    --benchmark-json=$(BENCH_VENV)/bench$(2).json >> $(BENCH_VENV)/bench.log || (cat $(BENCH_VENV)/bench.log; exit 1)
endef

bench-train: $(BENCH_VENV)/.bench-train
	$(BENCH_VENV)/bin/python bench/train.py $(BENCH_OPTIONS)

bench-startup: $(VENV)/.demo
	$(VENV)/bin/python bench/startup.py $(BENCH_OPTIONS)

# Instructions per site, disabled or enabled, against bench/instructions.json; needs valgrind and a C compiler.
instructions: $(VENV)/.dev
	$(VENV)/bin/python bench/instructions.py

# The tests of what is in C under AddressSanitizer and UndefinedBehaviorSanitizer, from a build of its own; needs gcc.
sanitize: $(VENV)/.dev
	rm -rf build/sanitize && mkdir -p build/sanitize
	git ls-files | tar -c -T - | tar -x -C build/sanitize
	cd build/sanitize && CFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" \
	    LENSFAST_REQUIRE_EXTENSION=1 $(abspath $(VENV))/bin/python setup.py --quiet build_ext --inplace
	cd build/sanitize && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 LENSFAST_REQUIRE_EXTENSION=1 PYTHONSAFEPATH= \
	    $(abspath $(VENV))/bin/python -m pytest -p no:cacheprovider -q \
	    -k "not python" tests/test_gate.py tests/test_spans.py tests/test_trace_fn.py tests/test_groups.py \
	    tests/test_native_spans.py tests/test_export.py tests/test_fork.py

# With warnings as errors. lensfast is read from the source tree: no compiler is needed.
docs: .venv-docs/.group
	.venv-docs/bin/python -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/docs
	@echo "the documentation is in build/docs/index.html"

# WHEELS_OPTIONS="--tests smoke --emulate --python PATH"; needs no C compiler.
wheels: .venv-wheels/.group
	.venv-wheels/bin/python tools/wheels.py $(WHEELS_OPTIONS)

# What the release workflow runs before it publishes; needs a C compiler. RELEASE_OPTIONS="--tag v1.2.3 --output dist"
release-check: .venv-release/.group
	.venv-release/bin/python tools/release_check.py $(RELEASE_OPTIONS)

workflows-lint: .venv-workflows/.group
	PATH="$(CURDIR)/.venv-workflows/bin:$$PATH" actionlint
	.venv-workflows/bin/zizmor --offline --pedantic --quiet .github

# The tools of one dependency group, in an environment of their own.
.venv-%/.group: pyproject.toml
	@$(call check,$(PYTHON))
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing the tools for it into $(@D) ..."
	@$(@D)/bin/python $(PIP) install --upgrade "pip>=25.1"
	@$(@D)/bin/python $(PIP) install --group $*
	@touch $@

$(VENV)/.demo: $(SOURCES)
	@$(call check,$(PYTHON))
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing lensfast into $(VENV) ..."
	@$(VENV)/bin/python $(PIP) install --upgrade "pip>=25.1"
	@PYTHONWARNINGS="ignore:Editable installation" $(VENV)/bin/python $(PIP) install --editable ".[sdk,rich]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@$(VENV)/bin/python $(PIP) install --group dev
	@touch $@

$(BENCH_VENV)/.bench: $(SOURCES)
	@$(MAKE) --no-print-directory VENV=$(BENCH_VENV) PYTHON=$(BENCH_PYTHON) $(BENCH_VENV)/.dev
	@$(BENCH_VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 13))' \
	    && $(BENCH_VENV)/bin/python $(PIP) install nemo-lens==0.1.0 \
	    || echo "nemo-lens needs Python 3.13: rows against it are left out (set BENCH_PYTHON)"
	@touch $@

$(BENCH_VENV)/.bench-train: $(BENCH_VENV)/.bench
	@echo "installing torch into $(BENCH_VENV) ..."
	@$(BENCH_VENV)/bin/python $(PIP) install $(BENCH_TORCH)
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) .venv-wheels .venv-docs .venv-release .venv-workflows build dist *.egg-info lensfast/*.so

# Says what is missing on a bare machine, before pip does in its own words.
define check
command -v $(1) > /dev/null || { echo "there is no $(1) here (Debian, Ubuntu: apt install python3 python3-venv)"; exit 1; }; \
$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "lensfast needs Python 3.11 or newer; $(1) is $$($(1) --version). Choose another: make PYTHON=python3.12 ..."; exit 1; }; \
$(1) -c 'import venv, ensurepip' 2> /dev/null || { \
    echo "the venv module of $(1) is not complete (Debian, Ubuntu: apt install python3-venv)"; exit 1; }; \
$(1) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
    && command -v $${CC:-cc} > /dev/null || \
    echo "note: no C compiler or no Python headers here, so lensfast is installed with its slower pure-Python gate." \
         "For the C gate: apt install gcc python3-dev (Debian, Ubuntu), then make clean"
endef
