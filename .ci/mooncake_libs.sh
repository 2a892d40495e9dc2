#!/usr/bin/env bash
# Let the client of Mooncake Store in the venv $1 load: where the system lacks a library that it needs, take those of Debian's packages,
# unpacked beside the library's own, where it looks first; nothing is installed, and no root needed.
set -euo pipefail
python=$PWD/$1/bin/python
loads() { "$python" -c "import mooncake.store" 2>"$work/log"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
loads && exit

fail() {
    cat "$work/log" >&2
    echo "tests of Mooncake need libraries of the system: $1; install libibverbs1, libnuma1 and libcurl4" >&2
    exit 1
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian to take them from"
folder=$("$python" -c "import sysconfig; print(sysconfig.get_path('platlib'))")/mooncake_transfer_engine_non_cuda.libs
packages=(libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1)
cd "$work"
own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache") # so that the machine's lists stay as they are
apt-get -q download "${packages[@]}" >>log 2>&1 || {
    mkdir -p lists/partial cache/archives/partial
    { apt-get -q "${own[@]}" update && apt-get -q "${own[@]}" download "${packages[@]}"; } >>log 2>&1
} || fail "Debian's packages could not be downloaded"
for package in *.deb; do dpkg-deb -x "$package" unpacked; done
find unpacked -name 'lib*.so.*' -exec cp -a {} "$folder" \;
loads || fail "those of Debian's packages do not do"
