#!/bin/sh
# On a machine with a CUDA device, in less than 9 minutes: the GPU tests, the headline benchmarks, the memory checks, or PARTS of them, with
# SCALE times the time for each. Each part has a limit of its own, and the next one runs whatever came of it; what was measured is written as
# it is measured. Exit 1 if any part failed.
set -u

run=build/python
failed=""
results=${ICL_RESULTS:-bench/results}
scale=${SCALE:-1}

part() { # NAME SECONDS COMMAND...
    name=$1 seconds=$(($2 * scale))
    shift 2
    case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
    echo "gpu: $name, at most $seconds s"
    begun=$(date +%s)
    timeout -s INT -k 10 "$seconds" "$@" # interrupted, pytest still says what had failed by then
    status=$?
    [ $status -eq 124 ] && echo "gpu: $name ran out of time"
    [ $status -eq 0 ] || failed="$failed $name"
    echo "gpu: $name took $(($(date +%s) - begun)) s, status $status"
}

# Without these the tests would be skipped, one and all.
$run -c '
import torch
from icl_patch import kernels
from icl_patch.ops import native
assert torch.cuda.is_available(), "expected a CUDA device, torch sees none"
assert native.cuda_architectures, "expected the CUDA part of the native library, it was built without nvcc"
' || exit 1
workers=$($run -c 'import os, xdist; print(f"-n {min(len(os.sched_getaffinity(0)), 14)} --dist worksteal")' 2>/dev/null)
part tests 165 $run -m pytest -m gpu $workers
part kernels 130 $run -m icl_patch bench inversion linear throughput --device cuda --quick --fresh --seconds $((30 * scale)) --out "$results"
part generation 140 $run -m icl_patch bench generation --device cuda --quick --fresh --seconds $((50 * scale)) --out "$results"
part sanitizer 50 sh tools/sanitize.sh
[ -z "$failed" ] || { echo "gpu: failed:$failed"; exit 1; }
