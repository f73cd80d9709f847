#!/bin/sh
# On a machine with a CUDA device, in less than 9 minutes: the GPU tests, the headline benchmarks, the memory checks. Each part has a limit of
# its own, and the next one runs whatever came of it; what was measured is written as it is measured. Exit 1 if any part failed.
set -u

run=build/python
failed=""
results=${ICL_RESULTS:-bench/results}

part() { # NAME SECONDS COMMAND...
    name=$1 seconds=$2
    shift 2
    echo "gpu: $name, at most $seconds s"
    begun=$(date +%s)
    timeout -k 5 "$seconds" "$@"
    status=$?
    [ $status -eq 124 ] && echo "gpu: $name ran out of time"
    [ $status -eq 0 ] || failed="$failed $name"
    echo "gpu: $name took $(($(date +%s) - begun)) s, status $status"
}

workers=$($run -c 'import xdist; print("-n 6 --dist worksteal")' 2>/dev/null)
part tests 155 $run -m pytest -m gpu $workers
part kernels 120 $run -m icl_patch bench inversion linear throughput --device cuda --quick --fresh --seconds 40 --out "$results"
part generation 180 $run -m icl_patch bench generation --device cuda --quick --fresh --seconds 60 --out "$results"
part sanitizer 60 sh tools/sanitize.sh
[ -z "$failed" ] || { echo "gpu: failed:$failed"; exit 1; }
