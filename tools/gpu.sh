#!/bin/sh
# The first hour on a machine with a CUDA device, in parts of less than ten minutes:
#   A  versions, one test of each kernel                               D  large offsets, then all GPU tests
#   B  the inversion's and the products' benchmarks                      E  compute-sanitizer, then Nsight Compute's profiles
#   C  the decode steps' and generations' benchmarks                     F  tuning, and the products once more
# PART="A B" takes those; without it all are taken in turn, as long as what is left of BUDGET seconds (1800) holds the next one's limit.
# Each step has a limit and writes as it goes, under ICL_RESULTS (bench/results); the next one runs whatever came of it. A part's output is
# in gpu-<part>.log there. A step that passed is not run again until the code changes. Exit 1 if a step failed, 3 if a part had to wait.
set -u

run=build/python
results=${ICL_RESULTS:-bench/results}
budget=${BUDGET:-1800}
make=${MAKE:-make}
started=$(date +%s)
failed=""
left=""
mkdir -p "$results"
code=$(find csrc icl_patch triton_kernels bench tests tools -type f ! -name '*.json' ! -name '*.pyc' ! -path 'bench/results/*' | sort | xargs cat | cksum | tr ' ' -)

now() { echo $(($(date +%s) - started)); }
say() { echo "gpu: $*" | tee -a "$log"; }

step() { # NAME SECONDS COMMAND...
    name=$part-$1
    case $1 in setup | versions) again=yes ;; *) again= ;; esac
    shift
    if [ -z "$again" ] && grep -qx "$code $name" "$results/gpu.done" 2>/dev/null; then
        say "$name has passed before"
        return
    fi
    seconds=$1
    shift
    rest=$((end - $(now)))
    [ "$seconds" -le "$rest" ] || seconds=$rest
    if [ "$seconds" -lt 1 ]; then
        say "$name has no time left"
        failed="$failed $name"
        status=1
        return
    fi
    say "$name, at most $seconds s"
    begun=$(now)
    { # interrupted, pytest still says what had failed by then
        timeout -s INT -k 10 "$seconds" "$@" 2>&1
        echo $? >"$results/gpu.status"
    } | tee -a "$log"
    status=$(cat "$results/gpu.status")
    case $status in
    0) echo "$code $name" >>"$results/gpu.done" ;;
    124 | 137) say "$name ran out of time" ;;
    esac
    [ "$status" -eq 0 ] || failed="$failed $name"
    say "$name took $(($(now) - begun)) s, status $status"
}

bench() { # SECONDS TO BEGIN CASES, NAME, OPTIONS...
    begin=$1
    shift
    $run -m icl_patch bench "$@" --device cuda --quick --seconds "$begin" --out "$results"
}

# timeout runs programs, not functions: this script calls itself for those
case ${1-} in
bench) shift; bench "$@"; exit ;;
tuned)
    cp triton_kernels/configs/*.json "$results/configs/" && $make build/python && results=$results/tuned && bench "$2" linear
    exit ;;
esac

workers() { $run -c 'import sys, os, xdist; print(f"-n {min(len(os.sched_getaffinity(0)), int(sys.argv[1]))} --dist worksteal")' "$1" 2>/dev/null; }

# Without a device and the native kernels tests would be skipped, one and all.
versions='
import torch
from icl_patch.bench.results import environment
from icl_patch.ops import native
assert torch.cuda.is_available(), "expected a CUDA device, torch sees none"
print(environment(torch.device("cuda")), native.describe())
assert native.cuda_architectures, "expected the CUDA part of the native library, it was built without nvcc"
'
kernels='patched_linear or record_linear or read_direction or norms or gated_product or low_rank_term or expert_linear
 or (every_dtype and 5376) or exact_replay or captured or exact_step or (headline and 1152)'
triton_tests='test_record_linear and fp32 or test_read_direction or test_running_sums or test_both_kernels and bf16'

part_A() {
    step tests 400 $run -m pytest $(workers 8) --maxfail=15 --durations=8 -m gpu -k "$(echo $kernels)" tests/gpu
}
part_B() {
    step inversion 100 sh "$0" bench 30 inversion
    step linear 260 sh "$0" bench 180 linear
}
part_C() {
    for job in "generation 400 240" "answer 150 60"; do
        set -- $job
        step "$1" "$2" env TORCH_CUDNN_SDPA_DEPRIORITIZED=1 TORCHINDUCTOR_COMPILE_THREADS=12 sh "$0" bench "$3" "$1"
    done
}
part_D() {
    step offsets 120 $run -m pytest -m gpu -k "two_to_the_31" tests/gpu
    step tests 290 $run -m pytest -m gpu $(workers 12)
}
part_E() {
    step sanitizer 200 sh tools/sanitize.sh
    step triton-memcheck 150 sh tools/sanitize.sh "memcheck" tests/gpu/test_kernels_gpu.py "$triton_tests"
    step profile 230 $run tools/profiles.py
}
part_F() {
    mkdir -p "$results/configs"
    step tune 400 $run -m icl_patch tune --device cuda --dtype bf16 --quick --out triton_kernels/configs
    step tuned 180 sh "$0" tuned 60
}

# Inductor's own processes can outlive a test's by minutes; C sets how many it has
export ICL_RESULTS="$results" TORCHINDUCTOR_COMPILE_THREADS=1
for next in A:590 B:360 C:560 D:420 E:590 F:580; do
    part=${next%:*} limit=${next#*:}
    case " ${PART:-$part} " in *" $part "*) ;; *) continue ;; esac
    log=$results/gpu-$part.log
    if [ -n "$left" ] || { [ -z "${PART-}" ] && [ $((budget - $(now))) -lt "$limit" ]; }; then
        left="$left $part"
        continue
    fi
    end=$(($(now) + limit))
    step setup 200 "$make" "$run"
    [ "$status" -eq 0 ] || break
    step versions 60 $run -c "$versions"
    [ "$status" -eq 0 ] || break
    "part_$part"
done
rm -f "$results/gpu.status"
[ -z "$left" ] || echo "gpu: left for another time, make gpu PART=\"${left# }\""
[ -z "$failed" ] || { echo "gpu: failed:$failed"; exit 1; }
[ -z "$left" ] || exit 3
