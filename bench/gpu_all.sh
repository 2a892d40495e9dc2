#!/usr/bin/env bash
# On a machine with a GPU: build, run its tests and its benchmark, in less than 8 minutes.
#
#   bench/gpu_all.sh [tests|bench|all] [arguments for pytest or bench/gpu.py]
#
# PYTHON (python3) has torch. What it lacks for the build comes from KVSERVER_WHEELS, a folder of wheels, where that is set,
# else from the package index. Nothing is installed into PYTHON's own environment. Figures go to $OUT or build/gpu.
# Tests that fail do not keep the benchmark from running. KVSERVER_SIMULATED_GPU=1 tries all this out without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
shift || true
PYTHON=$(command -v "${PYTHON:-python3}")
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1
[ "$what" = tests ] || [ "${KVSERVER_SIMULATED_GPU:-}" = 1 ] || export KVSERVER_REQUIRE_GPU=1
mkdir -p "$OUT"

# ---- an environment that sees PYTHON's packages, which may itself be a venv -------------------
env=build/gpu-env
[ -x $env/bin/python ] || "$PYTHON" -m venv --without-pip $env
site=$($env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import site, sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' >"$site/parent.pth"
export PATH=$PWD/$env/bin:$(dirname "$PYTHON"):$PATH
for folder in /usr/local/cuda/bin; do [ -d $folder ] && PATH=$PATH:$folder; done
pip() { $env/bin/python -m pip --disable-pip-version-check -q "$@"; }
from=()
[ -z "${KVSERVER_WHEELS:-}" ] || from=(--no-index --find-links "$KVSERVER_WHEELS")
began=$SECONDS
pip install "${from[@]}" "scikit-build-core>=0.10" "nanobind>=2.4" ninja cmake pytest "pyzmq>=25" "msgspec>=0.18" "prometheus-client>=0.17"
pip install --no-deps --no-build-isolation --force-reinstall -C build-dir=build/gpu-build .
echo "built in $((SECONDS - began)) s"

# ---- what it runs on --------------------------------------------------------------------------
{
echo "date    $(date -u +%Y-%m-%dT%H:%MZ)"
echo "commit  ${KVSERVER_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | sed 's/^/device  /' || true
(cd tests && python -c 'import kvserver._native as n; print("cuda   ", n.built_with_cuda())')
} | tee "$OUT/machine.log"

status=0
if [ "$what" != bench ]; then
    extra=()
    [ "$what" = tests ] && extra=("$@")
    timeout 210 $env/bin/python -c 'import sys, pytest; sys.path.pop(0); sys.exit(pytest.main(sys.argv[1:]))' \
        -q tests/gpu tests/native/test_device_contract.py "${extra[@]}" 2>&1 | tee "$OUT/tests.log" || status=$?
    echo "tests ended with $status after $((SECONDS - began)) s"
fi
if [ "$what" != tests ]; then
    extra=()
    [ "$what" = bench ] && extra=("$@")
    [ "${KVSERVER_SIMULATED_GPU:-}" = 1 ] && extra+=(--simulated)
    $env/bin/python bench/gpu.py --out "$OUT/gpu.json" "${extra[@]}" 2>&1 | tee "$OUT/gpu.log" || status=$?
fi
echo "all in $((SECONDS - began)) s"
exit $status
