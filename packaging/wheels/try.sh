#!/usr/bin/env bash
# Installs the wheels in a folder into empty environments, with no compiler in PATH, and runs the quickstart until the model has answered.
#
#   packaging/wheels/try.sh FOLDER [MODEL]
#
# FOLDER: where packaging/wheels.sh has put the wheels. MODEL: a GGUF file; without it, the quickstart downloads its own. Prints the seconds
# from the start of `pip install` to the answer. If the tools of packaging/wheels.sh are there, also tries `uv tool install` and `uvx`.
set -euo pipefail
wheels="$(realpath -e "$1")" model="${2:+$(realpath -e "$2")}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export HOME="$work/home"
mkdir "$HOME"
unset "${!XDG_@}" "${!LLAMA_WARDEN_@}"
seconds() { python3 -c "print(f'{$EPOCHREALTIME - $1:.1f}')"; }

python3 -m venv "$work/env"
begun=$EPOCHREALTIME
"$work/env/bin/pip" --quiet --disable-pip-version-check install --no-index --find-links "$wheels" 'llama-warden[cpu]'
echo "pip install: $(seconds "$begun") s"
# Nothing but what was installed.
warden() { env PATH="$work/env/bin" "$work/env/bin/llama-warden" "$@"; }
for compiler in cc gcc c++ clang cmake cargo; do
    ! env PATH="$work/env/bin" "$BASH" -c "command -v $compiler" || { echo "$compiler is in PATH" >&2; exit 1; }
done
warden builds list | tee "$work/builds"
grep -q "in use, bundled" "$work/builds"
id="$(sed -n '2s/ .*//p' "$work/builds")"
! warden builds rm "$id" 2>"$work/rm" || { echo "a bundled build was removed" >&2; exit 1; }
grep -q "was installed with llama-warden" "$work/rm"
warden builds gc --keep 0 --force

answered=""
while read -r line; do
    echo "$line"
    case $line in
        *"it said: "*)
            answered="${line#*it said: }"
            echo "from pip install to the answer: $(seconds "$begun") s"
            ;;
        *", 0 requests failed"*) replaced=1 ;;
        "quickstart: exit "*) exit 1 ;;
    esac
done < <(timeout 600 env PATH="$work/env/bin" "$work/env/bin/llama-warden" quickstart --port 0 --exit ${model:+--model "$model"} 2>&1 || echo "quickstart: exit $?")
[[ "$answered" == *Pacific* ]] || { echo "the answer is no sentence about the Pacific Ocean: $answered" >&2; exit 1; }
[ -n "${replaced:-}" ] || { echo "the quickstart did not replace the server without a failed request" >&2; exit 1; }

for uv in "${CARGO_TARGET_DIR:-target}"/wheel-tools/*/bin/uv; do
    [ -x "$uv" ] || continue
    export UV_TOOL_DIR="$work/tools" UV_TOOL_BIN_DIR="$work/uv-bin" UV_CACHE_DIR="$work/uv-cache" UV_PYTHON_DOWNLOADS=never
    offered=(--no-index --find-links "$wheels")
    begun=$EPOCHREALTIME
    "$uv" tool install --quiet "${offered[@]}" 'llama-warden[cpu]'
    "$work/uv-bin/llama-warden" builds list | grep -q "in use, bundled"
    echo "uv tool install: $(seconds "$begun") s"
    "$uv" tool run "${offered[@]}" --from 'llama-warden[cpu]' llama-warden builds list | grep -q "in use, bundled"
    "$uv" tool run "${offered[@]}" llama-warden version
    break
done
