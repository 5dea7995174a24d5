# Each target makes .venv by itself, from nothing but make and a Python 3.12 to 3.14 (PYTHON=... chooses one).

.PHONY: venv quickstart test proof lint lock
.NOTPARALLEL:

# Setup leaves compiling to the first import, so what compiles to must be kept, even where the environment says not to:
# every process would otherwise compile all of JAX again.
export PYTHONDONTWRITEBYTECODE =

# What training needs.
venv:
	@scripts/setup.sh base

# Trains a small model on 8 simulated devices.
quickstart: venv
	.venv/bin/python -m jaxpar train configs/quickstart.toml

# Two processes of tests; those of one file share what they compile.
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadfile

# The tests; PYTEST_ARGS goes to pytest, as in make test PYTEST_ARGS=tests/data
test: .dev
	$(PYTEST) -m "not proof" $(PYTEST_ARGS)

# The full matrices and long runs.
proof: .dev
	$(PYTEST) -m proof $(PYTEST_ARGS)

lint: .dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	bash -n .ci/run
	for script in scripts/*.sh; do sh -n "$$script" || exit 1; done

# Writes the locks anew from pyproject.toml; LOCK_ARGS=--upgrade takes the newest versions.
lock:
	scripts/make_lock.sh $(LOCK_ARGS)

.PHONY: .dev
.dev:
	@scripts/setup.sh dev
	@scripts/setup.sh gpu
