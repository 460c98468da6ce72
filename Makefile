# Each command installs what it needs; `make setup` does only that. An editor then finds .venv, the stubs, and
# build/compile_commands.json for C++.
#   K=expression        make test, make test-tools: only the tests whose names match, and neither checks nor native tests
#   URING=on|off        io_uring backend (default), or POSIX threads only
#   PYTHON=python3.11   the interpreter that the environment is made of
#   WHEEL_PYTHONS="python3.11 python3.12"  what `make wheel` builds with: 3.12 makes the wheel of 3.12 and all later
#   MACHINE=aarch64     the processor that it builds for; default: this one's
K =
PYTHON ?= python3.11
URING ?= on
WHEEL_PYTHONS ?= python3.11 python3.12
MACHINE ?= $(shell uname -m)
VENV := .venv
BIN := $(VENV)/bin
INTEGRATIONS := .venv-integrations
DOCS := .venv-docs
WHEEL := .venv-wheel
WHEELS := $(WHEEL)/built-$(MACHINE)-$(shell echo $(WHEEL_PYTHONS) | tr ' ' -)
# Warnings are errors here alone: who builds a release has another compiler, with other warnings.
BUILD_OPTIONS = --config-settings=cmake.define.FLOWSTONE_URING=$(URING) \
    --config-settings=cmake.define.FLOWSTONE_TESTING=ON --config-settings=cmake.define.FLOWSTONE_WERROR=ON \
    --config-settings=cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS=ON
NATIVE_SOURCES := CMakeLists.txt $(shell find native third_party -type f)

# Tests start hundreds of processes; where none of them may keep what it compiled, each one compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-tools docs test-docs test-integrations test-wheels test-upstream-dcp test-oldest-torch wheel bench bench-full bench-ranks bench-dcp bench-interference bench-scale bench-pairs soak check check-native setup clean
.DELETE_ON_ERROR:

demo: setup
	$(BIN)/flowstone demo

# Three processes share the tests, on two cores: half of them wait for a disk, a deadline or processes of their own.
# OpenMP's threads would wait by spinning, and take the processor from the others. The native tests are built (with
# sanitizers: the release build is what Python's tests run; `make check-native` has all four) and run beside them, and
# give way to all. They begin before the check, which has work for one processor.
CHECK := $(BIN)/ruff check . && $(BIN)/mypy && sh native/format.sh --check
TOOLS := $(addprefix tests/,bench demo site study wheels)
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 3 --dist worksteal $(if $(K),-k '$(K)')
test: setup
ifdef K
	$(PYTEST) $(addprefix --ignore=,$(TOOLS))
else
	PATH="$(CURDIR)/$(BIN):$$PATH" nice -n 19 sh native/check.sh address > $(VENV)/native-tests 2>&1 & native=$$!; \
	$(CHECK) && $(PYTEST) $(addprefix --ignore=,$(TOOLS)); python=$$?; \
	wait $$native; native=$$?; cat $(VENV)/native-tests; \
	test $$python -eq 0 && test $$native -eq 0
endif

# What is not imported with Flowstone: benchmarks, study, demo, site and wheels. `pytest` alone runs both.
test-tools: setup
	$(PYTEST) $(TOOLS)

# Recipes for frameworks, in an environment that has these. torch comes first and alone, as dev has it: what the group
# asks for must not draw in another build of it.
test-integrations: $(INTEGRATIONS)/installed $(INTEGRATIONS)/servers/tried
	FLOWSTONE_INTEGRATIONS=all $(INTEGRATIONS)/bin/python -m pytest -o faulthandler_timeout=3600 tests/integrations

# build/site/: the documentation, to be opened or served by anything. A link that leads nowhere is an error.
docs: setup $(DOCS)/installed
	FLOWSTONE_PYTHON=$(BIN)/python NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "build/site/index.html; to read it: $(BIN)/python -m http.server -d build/site"

# Every page of it in a headless Chromium, on a desktop's screen and on a phone's.
test-docs: docs
	sh tools/system_packages.sh chromium
	$(DOCS)/bin/python -m pytest --noconftest tests/site/test_in_chromium.py

# dist/: the source distribution, and from it a wheel for each of WHEEL_PYTHONS, repaired and audited.
wheel: $(WHEELS)

$(WHEELS): $(WHEEL)/installed tools/wheel.py README.md $(NATIVE_SOURCES) $(shell find src -name '*.py*' -not -name '*.pyc')
	$(WHEEL)/bin/python tools/wheel.py --out dist --machine $(MACHINE) $(WHEEL_PYTHONS)
	touch $@

# The wheels where there is nothing: no compiler, no network, no PATH. What of this needs no wheel is in `make test-tools`.
test-wheels: setup wheel
	FLOWSTONE_DIST=dist $(BIN)/python -m pytest -o faulthandler_timeout=3600 tests/wheels

# torch's own tests of DCP, with our classes in the place of its own: half an hour. Their source is Debian's.
test-upstream-dcp: setup
	$(BIN)/python tools/upstream_dcp.py build/upstream-dcp

# The oldest torch, in a bare Debian 13 that this makes under build/: needs root. A part of the tests, those of one rank;
# several ranks are the demo's.
test-oldest-torch: wheel
	sh tools/oldest_torch.sh dist build/debian-13 tests/test_checkpointer.py tests/load/test_load.py \
	    tests/save/test_lazy.py tests/runtime/test_threads.py tests/test_examples.py tests/state

check: setup
	$(CHECK)

check-native: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" sh native/check.sh

# A quarter of an hour; 2 GB; nothing is installed for it but fio.
bench: setup
	sh tools/system_packages.sh fio
	$(BIN)/python bench/run.py

# One to two hours; 5 GB, every rival and every goal; what docs/performance/rivals.md holds. Rivals' packages are installed
# under runs/bench/environments. After an interruption: make bench-full BENCH=--resume
bench-full: setup
	sh tools/system_packages.sh fio
	$(BIN)/python bench/run.py --set full --json runs/bench/full.json --update docs/performance/rivals.md \
	    --plots docs/figures $(BENCH)

# A quarter of an hour: a job of four ranks, with parts of a state and with replicas.
bench-ranks: setup
	sh tools/system_packages.sh fio
	mkdir -p runs/bench
	$(BIN)/python bench/run.py --only flowstone-ranks flowstone-replicas --bytes 5e9 --passes 1 \
	    --json runs/bench/ranks.json --section ranks --update docs/performance/ranks.md $(BENCH)

# Ten minutes: dcp.save and dcp.async_save, with DCP's own writer and with ours.
bench-dcp: setup
	sh tools/system_packages.sh fio
	mkdir -p runs/bench
	$(BIN)/python bench/run.py --only dcp-1 dcp-2 dcp-flowstone dcp-async dcp-flowstone-async --bytes 1.5e9 --passes 1 \
	    --json runs/bench/dcp.json --section dcp --update docs/performance/dcp.md $(BENCH)

# An hour and a half: GPT-2 trained with saves and without. After an interruption: make bench-interference BENCH=--resume
bench-interference: setup
	mkdir -p runs/bench
	$(BIN)/python bench/interference.py --json runs/bench/interference.json --update docs/performance/training.md \
	    --plots docs/figures $(BENCH)

# A quarter of an hour, 8 GB of memory: plans of large jobs, in one process.
bench-scale: setup
	mkdir -p runs/bench
	$(BIN)/python bench/scale.py --json runs/bench/scale.json --update docs/performance/scale.md --plots docs/figures

# Twenty minutes, and the other commit's set-up before: make bench-pairs AGAINST=HEAD~20 BENCH="--bytes 5e9 --rounds 40"
bench-pairs: setup
	@test -n "$(AGAINST)" || { echo "make bench-pairs AGAINST=COMMIT: which commit to compare this tree with"; exit 2; }
	mkdir -p runs/bench
	$(BIN)/python -m bench.pairs $(AGAINST) runs/bench --json runs/bench/pairs.json $(BENCH)

soak: setup
	$(BIN)/python -m pytest -m soak -o faulthandler_timeout=0  # each takes hours

setup: $(VENV)/installed

$(VENV)/system: Makefile tools/system_packages.sh
	sh tools/system_packages.sh doctest-dev
	mkdir -p $(VENV) && touch $@

$(VENV)/tools: pyproject.toml $(VENV)/system
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

# The build's options are part of the file's name, so that another URING= builds again.
$(VENV)/installed: $(VENV)/tools $(VENV)/uring-$(URING) $(NATIVE_SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation \
	    $(BUILD_OPTIONS) --editable .
	cd build && ln -sf "$$(ls -t cp*/compile_commands.json | head -1)" compile_commands.json
	touch $@

$(INTEGRATIONS)/tools: pyproject.toml $(VENV)/system
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(INTEGRATIONS)/bin/python -m pip install --quiet $(shell grep -o 'torch==[0-9.]*' pyproject.toml)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --group dev --group integrations
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps --group integrations-alone
	touch $@

$(INTEGRATIONS)/installed: $(INTEGRATIONS)/tools $(VENV)/uring-$(URING) $(NATIVE_SOURCES)
	PATH="$(CURDIR)/$(INTEGRATIONS)/bin:$$PATH" $(INTEGRATIONS)/bin/python -m pip install --quiet --no-build-isolation \
	    $(BUILD_OPTIONS) \
	    --config-settings=build-dir=$(INTEGRATIONS)/build --editable .
	touch $@

# Object stores of others. Where they cannot be installed, their tests are skipped, and say why.
$(INTEGRATIONS)/servers/tried: Makefile $(INTEGRATIONS)/tools
	-sh tools/system_packages.sh npm radosgw ceph-mon ceph-osd
	-npm install --silent --no-audit --no-fund --prefix $(INTEGRATIONS)/servers azurite@3.35.0
	mkdir -p $(INTEGRATIONS)/servers && touch $@

$(WHEEL)/installed: pyproject.toml
	test -x $(WHEEL)/bin/python || $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(WHEEL)/bin/python -m pip install --quiet --group wheel
	touch $@

$(DOCS)/installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --group docs
	touch $@

$(VENV)/uring-$(URING): $(VENV)/system
	rm -f $(VENV)/uring-*
	touch $@

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(DOCS) $(WHEEL) build dist
