#!/bin/sh
# Sets up .venv from a lock, from nothing but a POSIX shell and a Python 3.12 to 3.14 with its venv module.
#
#   scripts/setup.sh base    what training needs
#   scripts/setup.sh dev     that, and what the tests and the linter need
#   scripts/setup.sh gpu     the GPU compiler, in .venv/gpu-compiler: only the processes that compile for GPUs see it
#
# Does nothing if .venv already holds what the lock names. Set PYTHON to choose the interpreter.
set -eu
cd "$(dirname "$0")/.."

supported="3.12 3.13 3.14"
name=$1
lock=requirements/$name.lock

# What the environment was made from; a moved checkout counts as another one, because .venv holds absolute paths.
key() {
    cat "requirements/$1.lock" pyproject.toml
    pwd
}

is_current() {
    [ -x .venv/bin/python ] && key "$1" | cmp -s - ".venv/$1.stamp" && .venv/bin/python -c '' 2>/dev/null
}

# Prints "MAJOR.MINOR" of an interpreter, or fails if it is not there or does not start (a version manager's shim, say).
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

is_supported() {
    case " $supported " in *" $1 "*) return 0 ;; esac
    return 1
}

# Sets python to the first interpreter that will do, or ends with what was found instead.
find_python() {
    seen=""
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12; do
        version=$(version_of "$candidate") || continue
        if ! is_supported "$version"; then
            seen="$seen
  $candidate is Python $version"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            seen="$seen
  $candidate is Python $version, but without its venv module (on Debian and Ubuntu: apt install python$version-venv)"
        else
            python=$candidate
            return
        fi
    done
    echo "jaxpar needs Python 3.12, 3.13 or 3.14. Found:${seen:-
  no python3 that runs}" >&2
    echo "Install one of them, or name it: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
}

if is_current "$name"; then
    exit 0
fi

# JAX tries every CUDA plugin that it can import and reports at length that there is no GPU: not in .venv itself.
if [ "$name" = gpu ]; then
    [ -x .venv/bin/python ] || "$0" base
    echo "installing $(grep -c '==' "$lock") packages of the GPU compiler from $lock into .venv/gpu-compiler"
    rm -rf .venv/gpu-compiler
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
        --require-hashes --no-deps --only-binary=:all: --target .venv/gpu-compiler --requirement "$lock"
    key gpu >.venv/gpu.stamp
    exit 0
fi

if ! { [ -x .venv/bin/python ] && is_supported "$(version_of .venv/bin/python)"; }; then
    find_python
    echo "making .venv with $python (Python $version)"
    "$python" -m venv --clear .venv
fi

echo "installing $(grep -c '==' "$lock") packages from $lock into .venv (a minute or two the first time)"
# Only what the lock names, each file checked against its hash; no package is built here. Compiling all modules now takes
# longer than compiling those that are used when they are first imported.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    --require-hashes --no-deps --only-binary=:all: --requirement "$lock"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    --no-deps --no-index --no-build-isolation --editable .

key "$name" >".venv/$name.stamp"
# The dev lock holds everything that the base lock does, in the same versions.
if [ "$name" = dev ]; then
    key base >.venv/base.stamp
fi
