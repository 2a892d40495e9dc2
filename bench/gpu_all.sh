#!/usr/bin/env bash
# On a machine with a GPU, in one call: build, tests and benchmarks, in order of worth. Every part has a limit of its own.
#
#   bench/gpu_all.sh [all|tests|bench|PART ...] [-- arguments for pytest or bench/gpu.py]
#
# Parts: bytes alone memcheck racecheck (tests), and sections of bench/gpu.py, joined by commas (bench). Without any: all.
#
# PYTHON (python3)        has torch; nothing is installed into its environment. The benchmark needs torch: the ceiling is CUDA's.
# KVSERVER_WHEELS         a folder of wheels for what PYTHON lacks; else the package index is asked
# KVSERVER_BUILD=0        PYTHON has kvserver already
# KVSERVER_GPU_SIZES      small (default) or full
# KVSERVER_GPU_SECONDS    of one call, 360; a part that runs when they are over is ended, later ones are left out
# KVSERVER_COMMIT         where there is no repository to ask
# KVSERVER_REQUIRE_GPU=1  `tests` fail where there is no GPU instead of being skipped; a benchmark always fails
# OUT                     where <date>-<device>-{tests,bench}.{json,md} and the logs go: bench/results
# KVSERVER_SIMULATED_GPU=1 tries all this out without a GPU, writes to build/gpu-simulated, and marks the results as simulated.
#
# A part that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
tests=(bytes alone memcheck racecheck)
bench=(runs,transfers goal,pinning busy_runs chunks,daemon ways busy neighbours)
all=(bytes alone memcheck runs,transfers busy_runs goal,pinning chunks,daemon ways racecheck busy neighbours)
chosen=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    all) chosen+=("${all[@]}") ;;
    tests) chosen+=("${tests[@]}") ;;
    bench) chosen+=("${bench[@]}") ;;
    -*) echo "gpu_all.sh: arguments for pytest or bench/gpu.py come after --, not $1" >&2; exit 2 ;;
    *) chosen+=("$1") ;;
    esac
    shift
done
[ $# = 0 ] || shift
[ ${#chosen[@]} -gt 0 ] || chosen=("${all[@]}")
is_test() { case " ${tests[*]} " in *" $1 "*) ;; *) return 1 ;; esac }
only_tests=1
for name in "${chosen[@]}"; do is_test "$name" || only_tests=0; done
simulated=${KVSERVER_SIMULATED_GPU:-0}
PYTHON=$(command -v "${PYTHON:-python3}") || { echo "gpu_all.sh: there is no ${PYTHON:-python3}" >&2; exit 2; }
if [ "$simulated" = 1 ]; then
    OUT=${OUT:-$PWD/build/gpu-simulated}
    case $(realpath -m "$OUT") in "$PWD"/bench/results*) echo "gpu_all.sh: a simulation's measurements do not belong into $OUT" >&2; exit 2 ;; esac
    echo "SIMULATED: no GPU is used; what follows shows that the scripts run, and nothing about speed"
elif [ $only_tests = 0 ]; then
    export KVSERVER_REQUIRE_GPU=1
fi
export OUT=${OUT:-$PWD/bench/results} PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 # as the daemon has it: in a benchmark torch starts the driver before kvserver could set it
parts=build/gpu-parts
rm -rf $parts
mkdir -p "$OUT" $parts
: >$parts/left_out.txt
status=0
seconds=${KVSERVER_GPU_SECONDS:-360}
left() { # seconds: the part's own limit, or what is left of the call; at least 1
    local rest=$((seconds - SECONDS))
    [ $rest -lt "$1" ] || rest=$1
    [ $rest -gt 1 ] && echo $rest || echo 1
}
limited() { # seconds, command: first asked to end, so that it writes what it has
    timeout -s INT -k 8 "$(left "$1")" "${@:2}"
}
fail() { # what ended, status
    echo "$1: ended with $2$([ "$2" != 124 ] || echo ', its time was over')" | tee -a $parts/left_out.txt >&2
    status=1
}
mark() { # what has been done
    printf '== %3d s  %s\n' $SECONDS "$1" | tee -a $parts/times.txt
}

# ---- what it runs on: first, so that it is known of a run that dies -----------------------------
export KVSERVER_COMMIT=${KVSERVER_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
date=$(date -u +%Y-%m-%dT%H:%MZ)
device=simulated arch=
if [ "$simulated" != 1 ]; then
    IFS=, read -r device arch < <(timeout 30 nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null)
    arch=$(echo "$arch" | tr -d '. ')
    { exec 9<>/dev/nvidia0; } 2>/dev/null # open until the end: else the driver starts the GPU anew for each process
fi
{
    echo "date $date, commit $KVSERVER_COMMIT"
    uname -a
    lscpu | grep -E '^(CPU\(s\)|Model name|NUMA node)'
    free -g
    df -h /dev/shm . | sed 's/^/  /'
    ulimit -l
    [ "$simulated" = 1 ] && echo "SIMULATED GPU" ||
        { timeout 30 nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max,compute_mode,mig.mode.current --format=csv
          timeout 30 nvidia-smi || echo "nvidia-smi does not work"; }
} 2>&1 | tee $parts/machine.txt
head=$("$PYTHON" -c 'import json, sys; print(json.dumps({"device": sys.argv[1], "date": sys.argv[2], "commit": sys.argv[3], "simulated": sys.argv[4] == "1"}))' \
    "${device:-unknown}" "$date" "$KVSERVER_COMMIT" "$simulated")
stem=$OUT/${date%T*}-$(echo "${device:-unknown}" | tr -cs 'A-Za-z0-9\n' -)
mark "what it runs on"

# ---- an environment that sees PYTHON's packages, which may itself be a venv -------------------
python=$PYTHON
build() {
    local env=build/gpu-env site from=() need=("scikit-build-core>=0.10" "nanobind>=2.4" pytest pytest-xdist "pyzmq>=25" "msgspec>=0.18" "cbor2>=5.6" "rich>=13" "prometheus-client>=0.17")
    [ -x $env/bin/python ] || "$PYTHON" -m venv --without-pip $env || return
    site=$($env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' >"$site/parent.pth"
    for tool in cmake ninja; do command -v $tool >/dev/null || need+=($tool); done
    [ -z "${KVSERVER_WHEELS:-}" ] || from=(--no-index --find-links "$KVSERVER_WHEELS")
    local pip=($env/bin/python -m pip --disable-pip-version-check -q install --no-compile)
    limited 60 "${pip[@]}" "${from[@]}" "${need[@]}" || return
    limited "$([ -n "$arch" ] && echo 90 || echo 150)" "${pip[@]}" --no-deps --no-index --no-build-isolation --force-reinstall -C build-dir=build/gpu-build \
        -C cmake.define.KVSERVER_TESTING=ON ${arch:+-C cmake.define.KVSERVER_CUDA=ON -C "cmake.define.KVSERVER_CUDA_ARCHITECTURES=$arch-real"} . || return
    python=$PWD/$env/bin/python
}
PATH=$PWD/build/gpu-env/bin:$(dirname "$PYTHON"):$PATH
[ ! -d /usr/local/cuda/bin ] || PATH=$PATH:/usr/local/cuda/bin
if [ "${KVSERVER_BUILD:-1}" = 1 ]; then
    build || { fail "the build" $?; exit 1; }
    mark "built${arch:+ for sm_$arch}"
fi

# ---- smoke: copies within this process; if that cannot be, to memory that another one made ------
smoke() { limited 60 "$python" bench/gpu_smoke.py; }
smoke
result=$?
if [ $result = 3 ] && [ "${KVSERVER_REQUIRE_GPU:-}" != 1 ]; then
    echo "== no GPU: the tests that need one will be skipped; KVSERVER_REQUIRE_GPU=1 makes that a failure" >&2
    stem=$parts/no-gpu # no results
elif [ $result != 0 ]; then
    [ $result != 3 ] || { fail smoke 3; exit 1; }
    echo "== smoke failed with memory of its own; once more with a child's" >&2
    export KVSERVER_VMM=child
    smoke || { fail smoke $?; exit 1; }
fi
mark smoke

# ---- the parts ----------------------------------------------------------------------------------
run_part() { # its name, its log, its limit, command: all output goes into a file, since a process that is left would keep a pipe open
    limited "$3" "${@:4}" >$parts/now.log 2>&1
    local result=$?
    cat $parts/now.log
    cat $parts/now.log >>"$stem-$2.log"
    [ $result = 0 ] || [ $result = 5 ] || fail "$1" $result # 5: `-k` chose none of these tests
    return $result
}
pytest=("$python" -c 'import sys, pytest; sys.path.pop(0); sys.exit(pytest.main(sys.argv[1:]))' -v -p no:cacheprovider -o faulthandler_timeout=40)
lanes=$(($(nproc) / 2))
[ $lanes -le 6 ] || lanes=6
run_tests() { # its name, its limit, arguments
    run_part "$1" tests "$2" "${pytest[@]}" --durations=10 --junitxml="$parts/$1.xml" "${@:3}"
}
sanitize() { # a tool of compute-sanitizer: the smallest copies by each kernel, with each width of its accesses
    local tool=(compute-sanitizer --tool "$1" --error-exitcode 7)
    [ "$simulated" != 1 ] || tool=(env) # there is no device to look at
    run_part "$1" sanitizer 45 "${tool[@]}" "${pytest[@]}" tests/gpu/test_gpu_kernels.py \
        -k "staged and MLA and SGLang and a_layout or staged and MLA and not_aligned"
}
benchmark() { # its sections, its limit, arguments
    local limit=$(left "$2") extra=()
    [ "$simulated" != 1 ] || extra=(--simulated)
    run_part "$1" bench "$limit" "$python" bench/gpu.py --only "$1" --seconds "$limit" --out "$parts/${1%%,*}.json" \
        --sizes "${KVSERVER_GPU_SIZES:-small}" "${extra[@]}" "${@:3}"
    [ $? != 9 ] || { echo "== a copy moved wrong bytes: nothing more is measured, nor written" >&2; exit 1; }
}
report() { # name, parts, options
    "$python" bench/gpu_report.py "$stem-$1" --head "$head" --machine $parts/machine.txt --left-out $parts/left_out.txt "${@:2}" &&
        echo "== $stem-$1.json and .md"
}

rm -f "$stem"-{tests,sanitizer,bench}.log
for name in "${chosen[@]}"; do
    if [ $((SECONDS + 5)) -ge "$seconds" ]; then
        echo "$name: not begun, the time was over" | tee -a $parts/left_out.txt >&2
        status=1
        continue
    fi
    case $name in
    bytes) run_tests bytes 150 -n $lanes --maxschedchunk 1 tests/gpu tests/native/test_device_contract.py \
        -k "(test_gpu_ or cuda) and not memory_of_a_killed_engine" "$@" ;;
    alone) run_tests alone 45 tests/gpu -k memory_of_a_killed_engine "$@" ;; # it counts what all processes have of the GPU
    memcheck | racecheck) sanitize "$name" ;;
    busy) benchmark busy 180 "$@" ;;
    goal,*) benchmark "$name" 120 "$@" ;;
    *) benchmark "$name" 90 "$@" ;;
    esac
    mark "$name"
done

cat $parts/times.txt >>$parts/machine.txt
shopt -s nullglob
found=($parts/*.xml)
[ ${#found[@]} = 0 ] || report tests --tests "${found[@]}" || fail "the tests' report" $?
found=($parts/*.json)
[ ${#found[@]} = 0 ] || report bench "${found[@]}" || fail "the benchmark's report" $?
cat $parts/times.txt
exit $status
