#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, then the benchmark. Each call fits into 10 minutes.
#
#   bench/gpu_all.sh tests|bench|all [arguments for pytest or bench/gpu.py]
#
# PYTHON (python3)        has torch; nothing is installed into its environment. `bench` needs torch: the ceiling is CUDA's.
# KVSERVER_WHEELS         a folder of wheels for what PYTHON lacks; else the package index is asked
# KVSERVER_BUILD=0        PYTHON has kvserver already
# KVSERVER_GPU_SIZES      full (default) or small
# KVSERVER_GPU_SECONDS    of one call, 540; every part has a limit of its own besides, and what is over is ended
# KVSERVER_COMMIT         where there is no repository to ask
# KVSERVER_REQUIRE_GPU=1  `tests` fail where there is no GPU instead of being skipped; `bench` always fails
# OUT                     where <date>-<device>-{tests,bench}.{json,md} and the logs go: bench/results
# KVSERVER_SIMULATED_GPU=1 tries all this out without a GPU, writes to build/gpu-simulated, and marks the results as simulated.
#
# Tests that fail do not keep the benchmark from running, nor one part of it the others.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:?tests, bench or all}
shift
case $what in tests | bench | all) ;; *) echo "gpu_all.sh: tests, bench or all, not $what" >&2; exit 2 ;; esac
simulated=${KVSERVER_SIMULATED_GPU:-0}
PYTHON=$(command -v "${PYTHON:-python3}") || { echo "gpu_all.sh: there is no ${PYTHON:-python3}" >&2; exit 2; }
if [ "$simulated" = 1 ]; then
    OUT=${OUT:-$PWD/build/gpu-simulated}
    case $(realpath -m "$OUT") in "$PWD"/bench/results*) echo "gpu_all.sh: a simulation's measurements do not belong into $OUT" >&2; exit 2 ;; esac
    echo "SIMULATED: no GPU is used; what follows shows that the scripts run, and nothing about speed"
elif [ "$what" != tests ]; then
    export KVSERVER_REQUIRE_GPU=1
fi
export OUT=${OUT:-$PWD/bench/results} PYTHONUNBUFFERED=1
parts=build/gpu-parts
rm -rf $parts
mkdir -p "$OUT" $parts
: >$parts/left_out.txt
status=0
left() { # seconds: the part's own limit, or what is left of the call; at least 1
    local rest=$((${KVSERVER_GPU_SECONDS:-540} - SECONDS))
    [ $rest -lt "$1" ] || rest=$1
    [ $rest -gt 1 ] && echo $rest || echo 1
}
fail() { # what ended, status
    echo "$1: ended with $2$([ "$2" != 124 ] || echo ', its time was over')" | tee -a $parts/left_out.txt >&2
    status=1
}

# ---- what it runs on: first, so that it is known of a run that dies -----------------------------
export KVSERVER_COMMIT=${KVSERVER_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
date=$(date -u +%Y-%m-%dT%H:%MZ)
{
    echo "date $date, commit $KVSERVER_COMMIT"
    uname -a
    nproc
    free -g
    df -h /dev/shm . | sed 's/^/  /'
    ulimit -l
    [ "$simulated" = 1 ] && echo "SIMULATED GPU" ||
        { timeout 30 nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max,compute_mode,mig.mode.current --format=csv
          timeout 30 nvidia-smi || echo "nvidia-smi does not work"; }
} 2>&1 | tee $parts/machine.txt
device=simulated
[ "$simulated" = 1 ] || device=$(timeout 30 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)
head=$("$PYTHON" -c 'import json, sys; print(json.dumps({"device": sys.argv[1], "date": sys.argv[2], "commit": sys.argv[3], "simulated": sys.argv[4] == "1"}))' \
    "${device:-unknown}" "$date" "$KVSERVER_COMMIT" "$simulated")
stem=$OUT/${date%T*}-$(echo "${device:-unknown}" | tr -cs 'A-Za-z0-9\n' -)

# ---- an environment that sees PYTHON's packages, which may itself be a venv -------------------
python=$PYTHON
build() {
    local env=build/gpu-env site from=() need=("scikit-build-core>=0.10" "nanobind>=2.4" pytest "pyzmq>=25" "msgspec>=0.18" "prometheus-client>=0.17")
    [ -x $env/bin/python ] || "$PYTHON" -m venv --without-pip $env || return
    site=$($env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' >"$site/parent.pth"
    for tool in cmake ninja; do command -v $tool >/dev/null || need+=($tool); done
    [ -z "${KVSERVER_WHEELS:-}" ] || from=(--no-index --find-links "$KVSERVER_WHEELS")
    local pip=($env/bin/python -m pip --disable-pip-version-check -q install)
    timeout -k 10 "$(left 120)" "${pip[@]}" "${from[@]}" "${need[@]}" || return
    timeout -k 10 "$(left 240)" "${pip[@]}" --no-deps --no-index --no-build-isolation --force-reinstall -C build-dir=build/gpu-build -C cmake.define.KVSERVER_TESTING=ON . || return
    python=$PWD/$env/bin/python
}
PATH=$PWD/build/gpu-env/bin:$(dirname "$PYTHON"):$PATH
[ ! -d /usr/local/cuda/bin ] || PATH=$PATH:/usr/local/cuda/bin
if [ "${KVSERVER_BUILD:-1}" = 1 ]; then
    build || { fail "the build" $?; exit 1; }
    echo "== built after $SECONDS s"
fi

# ---- smoke: copies within this process; if that cannot be, to memory that another one made ------
smoke() { timeout -k 10 "$(left 60)" "$python" bench/gpu_smoke.py; }
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

report() { # name, parts, options
    "$python" bench/gpu_report.py "$stem-$1" --head "$head" --machine $parts/machine.txt --left-out $parts/left_out.txt "${@:2}" && echo "== $stem-$1.json and .md"
}

if [ "$what" != bench ]; then
    extra=()
    [ "$what" = tests ] && extra=("$@")
    timeout -k 10 "$(left 420)" "$python" -c 'import sys, pytest; sys.path.pop(0); sys.exit(pytest.main(sys.argv[1:]))' \
        -q -p no:cacheprovider --junitxml=$parts/tests.xml tests/gpu tests/native/test_device_contract.py "${extra[@]}" 2>&1 |
        tee "$stem-tests.log"
    [ "${PIPESTATUS[0]}" = 0 ] || fail tests "${PIPESTATUS[0]}"
    [ ! -f $parts/tests.xml ] || report tests --tests $parts/tests.xml || fail "the tests' report" $?
    echo "== tests ended after $SECONDS s"
fi

if [ "$what" != tests ]; then
    extra=(--sizes "${KVSERVER_GPU_SIZES:-full}")
    [ "$simulated" = 1 ] && extra=(--simulated)
    [ "$what" = bench ] && extra+=("$@")
    : >"$stem-bench.log"
    part() { # its limit, its sections: in a process of its own, so that one that hangs costs no other
        local limit result
        limit=$(left "$1")
        timeout -k 10 "$limit" "$python" bench/gpu.py --only "$2" --seconds "$limit" --out "$parts/${2%%,*}.json" "${extra[@]}" 2>&1 |
            tee -a "$stem-bench.log"
        result=${PIPESTATUS[0]}
        [ "$result" = 0 ] || fail "$2" "$result"
        [ "$result" != 9 ] || { echo "== a copy moved wrong bytes: nothing more is measured, nor written" >&2; exit 1; }
    }
    part 90 ways,runs
    part 180 busy
    part 120 transfers
    part 90 chunks,daemon
    part 90 neighbours,pinning
    shopt -s nullglob
    report bench $parts/*.json || fail "the benchmark's report" $?
    echo "== benchmark ended after $SECONDS s"
fi
exit $status
