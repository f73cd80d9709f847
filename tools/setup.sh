#!/bin/sh
# Find or make a Python that can run the project, and write build/python: a command that runs it.
#
# usage: tools/setup.sh PYTHON
#
# Where PYTHON already has all that is needed at run time and for the tests, it is used as it is and nothing is installed: the package
# is laid out in build/site. Otherwise .venv is made, the pinned requirements are installed there, and the package is installed editable.
set -eu

python=$1
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"

fail() {
    echo "setup: $1" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "expected Python 3.11 or later as PYTHON, got $("$python" --version 2>&1 || echo "no such command: $python")"

mkdir -p build

if "$python" tools/requirements.py met; then
    rm -rf build/site build/site.new build/lib build/lib.* # setuptools keeps files there that the sources no longer have
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --target build/site.new . ||
        fail "laying out the package in build/site failed; see above"
    mv build/site.new build/site
    path="'$here/build/site'\${PYTHONPATH:+:\$PYTHONPATH}:'$here'"
    run="$(command -v "$python")"
else
    if [ ! -x .venv/bin/python ]; then
        rm -rf .venv
        "$python" -m venv .venv || fail "making .venv failed; see above"
    fi
    if ! cmp -s requirements.txt .venv/requirements.txt; then
        echo "setup: installing the pinned requirements into .venv" >&2
        # without bytecode of modules that are never imported, half a minute's work
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
            -r requirements.txt || fail "installing requirements.txt failed; see above"
        cp requirements.txt .venv/requirements.txt
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . ||
        fail "installing the package into .venv failed; see above"
    path="\${PYTHONPATH:+\$PYTHONPATH:}'$here'"
    run="$here/.venv/bin/python"
fi

# -P: -m and -c must not import the checkout in the current folder. It is the last of the path, for `tools` alone.
cat >build/python.new <<END
#!/bin/sh
case \${1-} in -* | "") set -- -P "\$@" ;; esac
PYTHONPATH=$path exec '$run' "\$@"
END
chmod +x build/python.new
mv build/python.new build/python

# pip swallows what the build said
build/python -W ignore -c 'from icl_patch.ops import native; print("setup:", native.describe())' >&2
