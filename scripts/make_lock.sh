#!/bin/sh
# Writes requirements/base.lock, dev.lock and gpu.lock from pyproject.toml: every package with its version and the hashes of
# its files, for all platforms and supported Pythons, without any index address.
#
#   scripts/make_lock.sh              keeps the versions that the locks hold where pyproject.toml still allows them
#   scripts/make_lock.sh --upgrade    takes the newest ones
#
# Needs the package index; works in an environment of its own, never in .venv.
set -eu
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv>=0.9"

compile() {
    "$scratch/venv/bin/uv" pip compile pyproject.toml --universal --python-version 3.12 --generate-hashes --quiet \
        --no-emit-index-url --no-emit-find-links --no-annotate --no-header "$@"
}

mkdir -p requirements
compile --group build --output-file requirements/base.lock "$@"
# The base lock constrains the other one, so that both hold the same version of everything that they share.
compile --group build --group dev --constraint requirements/base.lock --output-file requirements/dev.lock "$@"
# The GPU compiler lies beside that environment, and needs only what is not in it.
present=$(sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/--no-emit-package \1/p' requirements/dev.lock)
# shellcheck disable=SC2086
compile --extra plan-gpu --constraint requirements/dev.lock $present --output-file requirements/gpu.lock "$@"
