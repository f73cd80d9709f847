#!/bin/sh
# Run the native CUDA tests under compute-sanitizer: reads and writes out of bounds, races in shared memory.
set -eu

if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize: skipped, there is no compute-sanitizer"
    exit 0
fi
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 build/python -m pytest -m gpu tests/test_gpu_inversion.py -k "every_dtype or like_plain_torch or of_nothing"
done
