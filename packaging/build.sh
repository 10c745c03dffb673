#!/usr/bin/env bash
# Packages of llama-warden for this machine: a Debian package, and a tarball with checksums and a list of what is in it.
#
#   packaging/build.sh [--quick] [--binary PATH | --profile FILE] [--version VERSION] [--out DIR]
#
# Without --binary it is compiled, optimised; with --profile, for the load that packaging/profile.sh has recorded. --quick compresses little, for tests. Two runs of the same sources with the same compiler give the same bytes: all times in the
# packages are SOURCE_DATE_EPOCH, or that of the last commit.
set -euo pipefail
cd "$(dirname "$0")/.."

binary="" profile="" version="" out=target/packages level=9 format=xz
while [ $# -gt 0 ]; do
    case $1 in
        --quick) level=1 format=gzip; shift; continue ;;
        --binary) binary=$2 ;;
        --profile) profile="$(realpath -e "$2")" ;;
        --version) version=$2 ;;
        --out) out=$2 ;;
        *) echo "usage: packaging/build.sh [--quick] [--binary PATH | --profile FILE] [--version VERSION] [--out DIR]; unknown: $1" >&2; exit 2 ;;
    esac
    shift 2
done
[ -z "$binary" ] || [ -z "$profile" ] || { echo "--binary and --profile exclude each other" >&2; exit 2; }
for program in dpkg-deb dpkg-shlibdeps strip python3; do
    command -v "$program" >/dev/null || { echo "$program is missing: apt install dpkg-dev binutils python3" >&2; exit 1; }
done
if [ -z "$binary" ]; then
    # Where it was compiled is nobody's business, and differs.
    target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
    # shellcheck source=packaging/flags.sh
    . packaging/flags.sh
    place="$target/dist"
    words=()
    if [ -n "$profile" ]; then
        for_load "$profile"
        # Names in the profile are those of a build with --target, and so fit only such a build.
        host="$(rustc -vV | sed -n 's/^host: //p')" && words=(--target "$host") place="$target/$host/dist"
    fi
    (reproducibly "$PWD" "${CARGO_HOME:-$HOME/.cargo}" "$target" && cargo build --profile dist --locked -p llama-warden "${words[@]}")
    binary="$place/llama-warden"
fi
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}"
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C
umask 022
[ -n "$version" ] || version="$(env -i "$binary" version)" && version="${version##* }"
arch="$(dpkg --print-architecture)"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
stage="$work/stage" papers="$work/papers"
mkdir -p "$papers"

program="$papers/llama-warden"
strip --strip-debug -o "$program" "$binary"
chmod 755 "$program"
warden() { env -i HOME="$work" PATH="$PATH" "$program" "$@"; }
for shell in bash zsh fish; do warden completions "$shell" >"$papers/completions.$shell"; done
warden man "$papers/man" >/dev/null
python3 packaging/sbom.py --version "$version" >"$papers/llama-warden.cdx.json"

# What is in both.
put() { install -D -m "${3:-644}" "$1" "$2"; }
documents() { # documents FOLDER
    local folder=$1
    put LICENSE "$folder/LICENSE"
    put "$papers/llama-warden.cdx.json" "$folder/llama-warden.cdx.json"
    put README.md "$folder/README.md"
    # With all that they speak of: configurations of balancers, of Kubernetes, dashboards, rules.
    find docs -type f | sort | while read -r file; do put "$file" "$folder/$file"; done
}

# The tarball: unpacked anywhere.
name="llama-warden-$version-$(uname -s | tr '[:upper:]' '[:lower:]')-$(uname -m)"
top="$work/tarball/$name"
put "$program" "$top/llama-warden" 755
documents "$top"
put CHANGELOG.md "$top/CHANGELOG.md"
for shell in bash zsh fish; do put "$papers/completions.$shell" "$top/completions/llama-warden.$shell"; done
for page in "$papers"/man/*; do put "$page" "$top/man/$(basename "$page")"; done
put packaging/warden.toml "$top/warden.toml"
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work/tarball" -c "$name" | gzip "-${level}n" >"$out/$name.tar.gz"

# The Debian package.
put "$program" "$stage/usr/bin/llama-warden" 755
put packaging/warden.toml "$stage/etc/llama-warden/warden.toml"
put packaging/logrotate "$stage/etc/logrotate.d/llama-warden"
put packaging/deb/sysusers "$stage/usr/lib/sysusers.d/llama-warden.conf"
# Made as `service install` makes it, for the oldest systemd that this package may meet.
unit() { warden service show --root "$stage" --program /usr/bin/llama-warden --systemd 252 | sed '1s/.*/# Of the package llama-warden. To change it: systemctl edit llama-warden/'; }
mkdir -p "$stage/usr/lib/systemd/system"
unit >"$stage/usr/lib/systemd/system/llama-warden.service"
put "$papers/completions.bash" "$stage/usr/share/bash-completion/completions/llama-warden"
put "$papers/completions.zsh" "$stage/usr/share/zsh/vendor-completions/_llama-warden"
put "$papers/completions.fish" "$stage/usr/share/fish/vendor_completions.d/llama-warden.fish"
for page in "$papers"/man/*; do
    mkdir -p "$stage/usr/share/man/man1"
    gzip -9nc "$page" >"$stage/usr/share/man/man1/$(basename "$page").gz"
done
documents "$stage/usr/share/doc/llama-warden"
mv "$stage/usr/share/doc/llama-warden/LICENSE" "$stage/usr/share/doc/llama-warden/copyright"
gzip -9nc CHANGELOG.md >"$stage/usr/share/doc/llama-warden/changelog.gz"

mkdir -p "$work/shlibs/debian"
printf 'Source: llama-warden\n\nPackage: llama-warden\nArchitecture: any\n' >"$work/shlibs/debian/control"
libraries="$(cd "$work/shlibs" && dpkg-shlibdeps -O -e"$stage/usr/bin/llama-warden" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')"
[ -n "$libraries" ] || { echo "dpkg-shlibdeps does not say which libraries the program needs" >&2; exit 1; }
mkdir -p "$stage/DEBIAN"
size="$(du -k -s --apparent-size --exclude=DEBIAN "$stage" | cut -f1)"
sed -e "s/@VERSION@/$version/; s/@ARCH@/$arch/; s/@SIZE@/$size/; s/@LIBRARIES@/$libraries/" packaging/deb/control >"$stage/DEBIAN/control"
(cd "$stage" && find etc -type f | sort | sed 's|^|/|') >"$stage/DEBIAN/conffiles"
(cd "$stage" && find . -path ./DEBIAN -prune -o -type f -printf '%P\n' | sort | xargs -d '\n' md5sum) >"$stage/DEBIAN/md5sums"
for script in preinst postinst prerm postrm; do put "packaging/deb/$script" "$stage/DEBIAN/$script" 755; done
find "$stage" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group "-Z$format" "-z$level" --threads-max=1 --build "$stage" "$out/llama-warden_${version}_$arch.deb" >/dev/null

(cd "$out" && sha256sum "$name.tar.gz" "llama-warden_${version}_$arch.deb" >"SHA256SUMS")
echo "$out/$name.tar.gz"
echo "$out/llama-warden_${version}_$arch.deb"
echo "$out/SHA256SUMS"
