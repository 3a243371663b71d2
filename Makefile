# Needs only Python 3.10 or newer and access to PyPI (the CUDA variant g++ and Python's headers too); every target sets
# itself up in .venv.
PYTHON ?= python3

.PHONY: demo test build property lint fuzz mutants sanitize clean

# The main job on the CPU: publish to a local Hub, fetch, generate, and run a prompt that the stock path can't hold.
demo:
	@$(PYTHON) tools/environment.py requirements.txt
	@.venv/bin/python tools/build.py cpu >/dev/null
	@.venv/bin/python examples/demo.py

# Everything, with the GPU tests where there is a GPU. TESTS and PYTEST_ARGS narrow it down.
test:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python tools/run_tests.py $(TESTS) $(PYTEST_ARGS)

# Random calls of every operation, judged by an error bound: EXAMPLES of them on the torch backend. SEED draws others.
EXAMPLES ?= 10000
property:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python -m pytest -s -n auto --maxprocesses 6 --dist worksteal tests/test_property.py --examples $(EXAMPLES) $(if $(SEED),--property-seed $(SEED)) $(PYTEST_ARGS)

# Both variants, in build/.
build:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python tools/build.py all

# ruff, mypy --strict of the package, clang-format, the C++ sources' warnings as errors, clang-tidy of the launcher.
lint:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python tools/lint.py

# libFuzzer over the operators' argument checks and launches; needs clang. SECONDS says how long.
SECONDS ?= 120
fuzz:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python tools/build.py cuda >/dev/null
	@.venv/bin/python tools/fuzz.py --seconds $(SECONDS)

# Seeded faults in the package, the launcher and the kernels, one at a time: do the tests notice? Writes docs/mutation.md.
# ONLY: those whose name, file or program has this in it.
mutants:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python tests/mutation.py --write $(if $(ONLY),--only "$(ONLY)")

# compute-sanitizer's four tools over every SM90 program, on a GPU; their reports go to build/sanitizer.log.
SANITIZER ?= compute-sanitizer
sanitize:
	@$(PYTHON) tools/environment.py requirements-test.txt
	@.venv/bin/python tests/gpu/sanitizer_sweep.py --variant "$$(.venv/bin/python tools/build.py cuda)" --log build/sanitizer.log --sanitizer "$(SANITIZER)"

clean:
	rm -rf build .venv
