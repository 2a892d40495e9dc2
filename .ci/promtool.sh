#!/usr/bin/env bash
# Put promtool below the folder $1, from Debian's package `prometheus`: unpacked, not installed, and no root needed.
set -euo pipefail
rm -rf "$1"
mkdir -p "$1"
cd "$1"

fail() {
    echo "make rules: there is no promtool on PATH, and $1; put one on PATH (it is part of Prometheus)" >&2
    exit 1
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian to take it from"
own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache") # so that the machine's lists stay as they are
apt-get -q download prometheus >log 2>&1 || {
    mkdir -p lists/partial cache/archives/partial
    { apt-get -q "${own[@]}" update && apt-get -q "${own[@]}" download prometheus; } >>log 2>&1
} || fail "Debian's package could not be downloaded, see $PWD/log"
dpkg-deb -x prometheus_*.deb .
rm -rf prometheus_*.deb lists cache
usr/bin/promtool --version >>log 2>&1 || fail "the one of Debian's package does not run here"
