#!/bin/sh
# Write docs/profiles/<device>.md: Nsight Compute on the headline kernels, where there are a GPU, ncu and the right to read its counters,
# and torch.profiler on decode steps.
set -eu

run=build/python
csv=build/profile/ncu.csv
mkdir -p build/profile
rm -f "$csv"
if ! $run -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    watched="there is no CUDA device"
elif ! command -v ncu >/dev/null; then
    watched="there is no ncu"
else
    # the clocks are left as they are: the machine may be shared
    ncu --csv --page raw --clock-control none --nvtx --nvtx-include icl-patch/ --metrics "$($run -m icl_patch.bench.profiling metrics)" \
        $run -m icl_patch.bench.profiling kernels >"$csv" 2>build/profile/ncu.err || cat build/profile/ncu.err >>"$csv"
    watched=$csv
fi
$run -m icl_patch.bench.profiling page "${ICL_RESULTS:-docs/profiles}" "$watched"
