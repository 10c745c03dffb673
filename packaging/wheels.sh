#!/usr/bin/env bash
# Python wheels for x86-64 Linux: one of llama-warden, and one of a patched llama-server that llama-warden finds (docs/releasing.md).
#
#   packaging/wheels.sh [--quick] [--binary PATH] [--profile NAME] [--backend cpu|cuda] [--cache DIR] [--out DIR]
#
# Without --binary, llama-warden is compiled (profile `dist`) for an old glibc. --quick, for tests: compresses little, and llama-server has one
# set of instructions (AVX2). --backend cuda needs a toolkit and uses the machine's own compilers. --cache: what `llama-warden build`
# downloads, and its compiler cache. Prints the paths of the wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

glibc=2.28 binary="" profile=dist backend=cpu out=target/wheels level=9 options=(-D LLAMA_BUILD_UI=OFF)
target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
cache="$target/wheel-build/cache"
while [ $# -gt 0 ]; do
    case $1 in
        --quick) level=1 options+=(-D GGML_CPU_ALL_VARIANTS=OFF); shift; continue ;;
        --binary) binary="$(realpath -e "$2")" ;;
        --profile) profile=$2 ;;
        --backend) backend=$2 ;;
        --cache) cache="$(realpath -m "$2")" ;;
        --out) out=$2 ;;
        *) sed -n '4s/^# *//p' "$0" >&2; echo "unknown: $1" >&2; exit 2 ;;
    esac
    shift 2
done
[ "$(uname -m)" = x86_64 ] || { echo "wheels are made for x86-64 on x86-64" >&2; exit 1; }
for program in python3 strip; do
    command -v "$program" >/dev/null || { echo "$program is missing: apt install python3 python3-venv binutils" >&2; exit 1; }
done
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}"
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C
umask 022

# The tools, in a place of their own: other versions are another folder.
tools="$target/wheel-tools/$(sha256sum <packaging/wheels/tools.txt | cut -c1-16)"
if [ ! -f "$tools/complete" ]; then
    rm -rf "$tools"
    python3 -m venv "$tools"
    "$tools/bin/python3" -m pip --quiet --disable-pip-version-check install --only-binary :all: --require-hashes -r packaging/wheels/tools.txt
    touch "$tools/complete"
fi
zig="$("$tools/bin/python3" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')"
export ZIG_GLOBAL_CACHE_DIR="$target/wheel-tools/zig" ZIG_LOCAL_CACHE_DIR="$target/wheel-tools/zig"

if [ -z "$binary" ]; then
    # shellcheck source=packaging/flags.sh
    (. packaging/flags.sh && reproducibly "$PWD" "${CARGO_HOME:-$HOME/.cargo}" "$target" &&
        WARDEN_TRACER_UNWINDER="$(realpath -e "$(cc -print-file-name=libgcc_s.so.1)")" CARGO_ZIGBUILD_ZIG_PATH="$zig" PATH="$tools/bin:$PATH" cargo zigbuild --profile "$profile" --locked -p llama-warden --target "x86_64-unknown-linux-gnu.$glibc" 2>&1) |
        tee "$tools/cargo.log" >&2
    # A build without the tracer is no error of cargo's.
    ! grep -q "the tracer is left out" "$tools/cargo.log" || exit 1
    binary="$target/x86_64-unknown-linux-gnu/$profile/llama-warden" wanted="manylinux_${glibc/./_}_x86_64"
else
    wanted=""
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
strip --strip-debug -o "$work/llama-warden" "$binary"
program="$work/llama-warden"
version="$(env -i "$program" version)" && version="${version##* }"

# zig as a C and a C++ compiler for the old glibc. Where it is compiled is not in the result.
mkdir -p "$tools/compilers"
for pair in zig-cc:cc zig-c++:c++; do
    script="$(
        cat <<END
#!/bin/sh
target=x86_64-linux-gnu.$glibc
case \$1 in -dumpmachine | --version) target=x86_64-linux-gnu ;; esac
# zig switches off the 512-bit registers, and -mavx512f does not switch them on again.
case " \$* " in *" -mavx512f "*) set -- "\$@" -mevex512 ;; esac
export ZIG_GLOBAL_CACHE_DIR='$ZIG_GLOBAL_CACHE_DIR' ZIG_LOCAL_CACHE_DIR='$ZIG_LOCAL_CACHE_DIR'
exec '$zig' ${pair#*:} -target "\$target" -fno-sanitize=undefined -ffile-prefix-map="\${PWD%/build}"=llama.cpp "\$@"
END
    )"
    # A compiler cache sees a new compiler in a file with a new time.
    [ "$(cat "$tools/compilers/${pair%:*}" 2>/dev/null)" = "$script" ] || echo "$script" >"$tools/compilers/${pair%:*}"
    chmod 755 "$tools/compilers/${pair%:*}"
done
compilers=()
if [ "$backend" = cpu ]; then
    for kind in EXE SHARED MODULE; do options+=(-D "CMAKE_${kind}_LINKER_FLAGS=-s"); done
    compilers=(CC="$tools/compilers/zig-cc" CXX="$tools/compilers/zig-c++")
    server_wanted="manylinux_${glibc/./_}_x86_64"
else
    server_wanted=""
fi
# No configuration of this user is read, and the build goes into a store of its own.
: >"$work/empty.toml"
env "${compilers[@]}" "$program" build --config "$work/empty.toml" --set "paths.cache_dir=$cache" --set "paths.data_dir=$target/wheel-build/data" \
    --sdist --backend "$backend" --arch any "${options[@]}" --json >"$work/build.json"

mkdir -p "$out"
pack() { # pack WANTED WORD...: makes a wheel, and gives it the tag that auditwheel says; fails if WANTED is an older glibc
    local wanted=$1 wheel tag
    shift
    write() { python3 packaging/wheels/pack.py --version "$version" --level "$level" --tag "$1" --out "$2" "${@:3}"; }
    wheel="$(write linux_x86_64 "$work" "$@")"
    "$tools/bin/auditwheel" show "$wheel" >"$work/show"
    tag="$(tr '\n' ' ' <"$work/show" | sed -n 's/.*following platform tag: *"\([a-z0-9_]*\)".*/\1/p')"
    [ -n "$tag" ] || { cat "$work/show" >&2; return 1; }
    # `linux_x86_64` means that the wheel needs libraries which a system may not have.
    if [ -n "$wanted" ] && { [[ "$tag" != manylinux_* ]] || [ "$(printf '%s\n' "$tag" "$wanted" | sort -V | tail -1)" != "$wanted" ]; }; then
        cat "$work/show" >&2
        echo "$(basename "$wheel") is to run on $wanted, and needs $tag" >&2
        return 1
    fi
    write "$tag" "$out" "$@"
}
python3 packaging/sbom.py --version "$version" >"$work/llama-warden.cdx.json"
pack "$wanted" warden --program "$program" --sbom "$work/llama-warden.cdx.json"
pack "$server_wanted" server --build "$work/build.json" --backend "$backend"
