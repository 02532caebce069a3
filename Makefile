# The front door. Everything made goes to build/ (and dist/ for wheels); what is missing is installed first
# (scripts/bootstrap).
#
#   make          build the library and the program (release)
#   make demo     attention on real input: verified, timed, and one picture
#   make check    what to run before each commit: the parts that most changes break, in minutes
#   make test     everything that can be checked on this machine, by samples where all would take hours
#   make test-all the same without samples, before a release
#   make bench    Tandem against PyTorch's CPU attention: table and plot
#   make docs     the documentation as a site in build/site, from docs/, the headers and the docstrings
#   make lint     formatting and clang-tidy
#   make format   format all sources in place
#   make wheel    the Python package as dist/*.whl, with JAX and compiled GPU kernels inside, for any Linux with a C
#                 library no older than this machine's
#   make clean    remove build/ (but not build/venv) and dist/

build := build/release
python := build/venv/bin/python

.PHONY: all demo check test test-all bench docs lint format wheel clean
all:
	scripts/bootstrap build
	cmake --preset release
	cmake --build $(build) --target tandem tandem_cli

demo: all
	scripts/bootstrap demo
	scripts/demo

check:
	scripts/test check

test:
	scripts/test

test-all:
	scripts/test all

bench:
	scripts/bootstrap
	scripts/install_python
	$(python) bench cpu

docs:
	scripts/bootstrap docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict -q
	@echo "build/site/index.html; its search needs a server: $(python) -m http.server -d build/site"

lint:
	scripts/bootstrap
	scripts/lint

format:
	git ls-files '*.cpp' '*.hpp' '*.c' '*.h' '*.cuh' '*.cu' | xargs clang-format-14 -i
	git ls-files '*.py' '*.pyi' | xargs $(python) -m ruff format -q

wheel:
	scripts/bootstrap
	rm -rf build/wheelhouse
	export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
	$(python) -m pip wheel --no-deps --no-build-isolation -C build-dir=build/wheel -C cmake.define.TANDEM_SHIP_KERNELS=ON \
	  -w build/wheelhouse . && \
	PATH="$(CURDIR)/build/venv/bin:$$PATH" $(python) -m auditwheel repair -w dist build/wheelhouse/*.whl
	du -h dist/*.whl

clean:
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name venv -exec rm -rf {} +
	rm -rf dist
