# The front door. Everything made goes to build/ (and dist/ for wheels); `make demo` and `make test` install what is missing.
#
#   make          build library, program, tests and benchmarks (release)
#   make demo     attention on real input: verified, timed, and one picture
#   make test     everything that can be checked on this machine
#   make bench    Tandem against PyTorch's CPU attention; table and plot
#   make lint     formatting and clang-tidy
#   make format   format all sources in place
#   make wheel    the Python package as dist/*.whl
#   make clean    remove build/ (but not build/venv) and dist/

build := build/release
python := build/venv/bin/python
jobs := $(shell nproc)

.PHONY: all bootstrap demo test bench lint format wheel clean
all: $(build)/build.ninja
	cmake --build $(build) -j $(jobs)

$(build)/build.ninja:
	scripts/bootstrap build
	cmake --preset release

bootstrap:
	scripts/bootstrap

demo: bootstrap all
	scripts/demo

test:
	scripts/test

bench: bootstrap
	scripts/install_python
	$(python) bench/cpu_vs_torch.py

lint:
	scripts/lint

format:
	git ls-files '*.cpp' '*.hpp' '*.c' '*.h' '*.cuh' '*.cu' | xargs clang-format-14 -i

wheel: bootstrap
	$(python) -m pip wheel --no-deps --no-build-isolation -w dist .

clean:
	find build -mindepth 1 -maxdepth 1 ! -name venv -exec rm -rf {} +
	rm -rf dist
