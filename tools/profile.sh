#!/bin/sh
# Write docs/profiles/<device>.md: Nsight Compute on the headline kernels, where there are a GPU, ncu and the right to read its counters,
# and torch.profiler on decode steps.
set -eu

run=build/python
text=build/profile/ncu.txt
mkdir -p build/profile
if ! $run -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "Skipped: there is no CUDA device" >"$text"
elif ! command -v ncu >/dev/null; then
    echo "Skipped: there is no ncu" >"$text"
else
    # the clocks are left as they are: the machine may be shared
    ncu --clock-control none --nvtx --nvtx-include icl-patch/ --section SpeedOfLight --section Occupancy --section WarpStateStats \
        $run -m icl_patch.bench.profiling kernels >"$text" 2>build/profile/ncu.err || cat build/profile/ncu.err >>"$text"
fi
$run -m icl_patch.bench.profiling page "${ICL_RESULTS:-docs/profiles}" "$text"
[ -z "${ICL_RESULTS-}" ] || cp "$text" "$ICL_RESULTS"
