#!/usr/bin/env bash
# Records which code of llama-warden runs under load. With the profile, packaging/build.sh makes a faster and smaller program:
#
#   packaging/profile.sh [--out FILE]                 # target/llama-warden.profdata; some 15 minutes on two cores
#   packaging/build.sh --profile target/llama-warden.profdata
#
# Needs llvm-profdata: `rustup component add llvm-tools`, or Debian's llvm-19, or name one in LLVM_PROFDATA. A profile
# fits the sources that it was recorded from; of other sources the compiler uses what still fits.
set -euo pipefail
cd "$(dirname "$0")/.."

out=target/llama-warden.profdata
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2 ;;
        *) echo "usage: packaging/profile.sh [--out FILE]; unknown: $1" >&2; exit 2 ;;
    esac
    shift 2
done
host="$(rustc -vV | sed -n 's/^host: //p')"
# LLVM 19 is the first that reads the profiles of today's compilers.
is_usable() { [ -x "$1" ] && [ "$("$1" --version 2>/dev/null | sed -n 's/.*LLVM version \([0-9]*\).*/\1/p')" -ge 19 ]; }
profdata=""
for candidate in "${LLVM_PROFDATA:-}" "$(rustc --print sysroot)/lib/rustlib/$host/bin/llvm-profdata" $(printf '%s\n' /usr/lib/llvm-*/bin/llvm-profdata | sort -rV); do
    if is_usable "$candidate" 2>/dev/null; then profdata=$candidate && break; fi
done
[ -n "$profdata" ] || { echo "llvm-profdata of LLVM 19 or later is missing: rustup component add llvm-tools, or apt install llvm-19" >&2; exit 1; }

target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
raw="$target/profile-raw"
rm -rf "$raw"
# With --target, the flags apply to the program and not to build scripts; packaging/build.sh has to do the same.
CARGO_INCREMENTAL=0 RUSTFLAGS="${RUSTFLAGS:-} -Cprofile-generate=$raw" \
    cargo build --profile dist --locked -p llama-warden --target "$host" --target-dir "$target/profiling"
# The load of the bench: small requests, streams, bodies.
cargo bench --profile release -p warden-tests --bench peers --locked -- \
    --quick --peers none --binary "$target/profiling/$host/dist/llama-warden" latency rate paced spaced flood bodies
mkdir -p "$(dirname "$out")"
"$profdata" merge -o "$out" "$raw"
echo "$out"
