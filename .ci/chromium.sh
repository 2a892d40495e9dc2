#!/usr/bin/env bash
# Put a Chromium and its driver below the folder $1, of Debian's packages with all that they need and the system lacks: unpacked, not
# installed, and no root needed. $1/chromium and $1/chromedriver start them. Where that cannot be, the tests of the page are skipped.
set -euo pipefail
rm -rf "$1"
mkdir -p "$1"
cd "$1"

fail() {
    echo "tests of the page need Chromium: $1; put chromium and chromedriver on PATH" >&2
    exit 0
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian to take it from"
packages=(chromium chromium-driver fonts-dejavu-core)
own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache") # so that the machine's lists stay as they are
missing() { apt-get -s "$@" --no-install-recommends install "${packages[@]}" 2>>log | sed -n 's/^Inst \([^ ]*\) .*/\1/p'; }
get() { names=$(missing "$@") && [ -n "$names" ] && apt-get -q "$@" download $names >>log 2>&1; }
get ${APT_OPTIONS:-} || {
    mkdir -p lists/partial cache/archives/partial
    apt-get -q "${own[@]}" update >>log 2>&1 && get "${own[@]}" ${APT_OPTIONS:-}
} || fail "Debian's packages could not be downloaded, see $PWD/log"
for package in *.deb; do dpkg-deb -x "$package" .; done
rm -rf ./*.deb lists cache

cat >fonts.conf <<END
<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>$PWD/usr/share/fonts</dir><cachedir>$PWD/fontcache</cachedir></fontconfig>
END
libraries=$(find "$PWD" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -sd:)
start() { # name, program
    printf '#!/usr/bin/env bash\nexport LD_LIBRARY_PATH=%q FONTCONFIG_FILE=%q\nexec %q "$@"\n' "$libraries" "$PWD/fonts.conf" "$PWD/$2" >"$1"
    chmod +x "$1"
}
start chromedriver usr/bin/chromedriver
start chromium.new usr/lib/chromium/chromium
./chromium.new --version >>log 2>&1 || fail "the one of Debian's packages does not run here, see $PWD/log"
mv chromium.new chromium
