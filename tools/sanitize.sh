#!/bin/sh
# Run CUDA tests under compute-sanitizer: races in shared memory, reads and writes out of bounds.
#
# usage: tools/sanitize.sh [TOOLS FILE TESTS]; by default racecheck and memcheck over five tests of the native inversion
set -eu

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # in torch's own segments what is out of bounds is another tensor's

if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize: skipped, there is no compute-sanitizer"
    exit 0
fi
file=${2:-tests/gpu/test_gpu_inversion.py}
tests=${3:-every_dtype and (5376 or (4097 and fp64))}
for tool in ${1:-racecheck memcheck}; do
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 build/python -m pytest -m gpu "$file" -k "$tests"
done
