#!/usr/bin/env bash
# All measurements of docs/evidence/, on a machine with an NVIDIA GPU, the CUDA toolkit, cmake and ninja:
#
#     tests/gpu/all.sh LLAMA_WARDEN BASE NEWEST OUT
#
# LLAMA_WARDEN is the program, BASE and NEWEST are sources of llama.cpp (b8827, and the newest), OUT is a folder for
# results.jsonl and the logs. Builds go to the usual folders (XDG_CACHE_HOME, XDG_DATA_HOME). Parts that need no quiet
# machine run beside the next build. Needs python3.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
warden=$1 base=$2 newest=$3 out=$4
arch=${ARCH:-90}
mkdir -p "$out"
models=$out/models
say() { printf '%s %s\n' "$(date +%T)" "$*" | tee -a "$out/progress"; }

build() { # build NAME SOURCE OPTION...: a build in the store; its path in $out/NAME
    local name=$1 source=$2
    shift 2
    if "$warden" build --source "$source" --backend cuda --arch "$arch" --json "$@" >"$out/$name.json" 2>"$out/$name.log"; then
        python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["binary"])' "$out/$name.json" >"$out/$name"
        say "built $name: $(cat "$out/$name")"
    else
        say "build $name failed: $(tail -5 "$out/$name.log")"
    fi
}

measure() { # measure LABEL ARGUMENT...: one line of JSON
    local label=$1
    shift
    timeout 400 python3 "$here/evidence.py" "$@" --models "$models" --label "$label" >>"$out/results.jsonl" 2>>"$out/errors"
    say "measured $label: exit $?"
}

cap=LLAMA_WARDEN_GRAPH_CACHE_CAP=16
purge=LLAMA_WARDEN_POOL_BUDGET_MIB=256
reset=LLAMA_WARDEN_CUBLAS_RESET_EVERY=1000

mkdir -p "$models"
{
    python3 "$here/sized_model.py" llama-gpu "$models/llama.gguf"
    python3 "$here/sized_model.py" gemma4-gpu "$models/gemma4.gguf"
    python3 "$here/sized_model.py" gemma4-vision-gpu "$models/mmproj.gguf"
} >"$out/models.log" 2>&1 &
build base "$base" -D LLAMA_BUILD_WEBUI=OFF
wait
build base-plain "$base" -D LLAMA_BUILD_WEBUI=OFF --plain

build newest "$newest" &
B=$(cat "$out/base")
measure base/nothing images --server "$B" &
measure base/graph-cache-cap images --server "$B" --env $cap --report &
measure base/no-cuda-graphs images --server "$B" --env GGML_CUDA_DISABLE_GRAPHS=1
measure base/pool-purge images --server "$B" --env $purge &
measure base/cublas-reset images --server "$B" --env $reset &
measure base/memory-report images --server "$B" --report &
wait

build base-legacy "$base" -D LLAMA_BUILD_WEBUI=OFF -D GGML_CUDA_NO_VMM=ON &
N=$(cat "$out/newest")
measure newest/nothing images --server "$N"
measure newest/graph-cache-cap images --server "$N" --env $cap --report
measure newest/no-cuda-graphs images --server "$N" --env GGML_CUDA_DISABLE_GRAPHS=1
wait

# From here on nothing else runs.
P=$(cat "$out/base-plain") L=$(cat "$out/base-legacy")
all=(--env $cap --env LLAMA_WARDEN_POOL_BUDGET_MIB=1 --env LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=50
    --env LLAMA_WARDEN_CUBLAS_RESET_EVERY=200 --env LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S=1)
timeout 500 "$warden" diagnose --trace --json --workload same-image --binary "$P" -- -m "$models/gemma4.gguf" \
    --mmproj "$models/mmproj.gguf" -ngl 99 -c 8192 -np 1 --cache-ram 0 --ctx-checkpoints 0 >"$out/trace.json" 2>>"$out/errors"
say "traced: exit $?" # 3: a leak was found
measure base/decode decode --server "$B" --against "$P" --env $cap
for turn in 1 2; do
    measure legacy/nothing-$turn prefill --server "$L" --prompts 2
    measure legacy/pool-purge-$turn prefill --server "$L" --prompts 2 --env $purge --report
done
measure base/parallel parallel --server "$B" --against "$P" --requests 200 "${all[@]}" --report
measure base/inert parallel --server "$B" --against "$P" --requests 200
measure legacy/parallel parallel --server "$L" --against "$P" --requests 200 "${all[@]}" --report
if command -v compute-sanitizer >/dev/null; then
    # The checker has to see the server end by itself, so a TERM is passed on to the server alone.
    wrapped=$out/under-memcheck
    cat >"$wrapped" <<EOF
#!/bin/bash
compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 99 --log-file $out/memcheck.log $B "\$@" &
checker=\$!
pass_on() { for p in /proc/[0-9]*; do [ "\$(readlink "\$p/exe" 2>/dev/null)" = "$B" ] && kill -TERM "\${p#/proc/}"; done; }
trap pass_on TERM
wait \$checker
wait \$checker
EOF
    chmod +x "$wrapped"
    measure base/memcheck parallel --server "$wrapped" --against "$B" --requests 12 --output 24 "${all[@]}" --report
    tail -3 "$out/memcheck.log" | tee -a "$out/progress"
    measure base/memcheck-reclaim parallel --server "$wrapped" --against "$B" --requests 12 --output 24 --env $cap --reclaim --report
    tail -3 "$out/memcheck.log" | tee -a "$out/progress"
fi
timeout 600 python3 "$here/policy.py" --warden "$warden" --server "$P" --models "$models" --out "$out/policy" \
    >"$out/policy.json" 2>>"$out/errors"
say "policies: exit $?"
if [ -n "${READER:-}" ]; then # the example `gpu` of warden-sensors
    timeout 100 python3 "$here/vram.py" --server "$P" --models "$models" --reader "$READER" >"$out/vram.json" 2>>"$out/errors"
    say "readings of VRAM: exit $?"
fi
build newest-plain "$newest" --plain
measure newest/decode decode --server "$N" --against "$(cat "$out/newest-plain")" --env $cap
measure newest/inert parallel --server "$N" --against "$(cat "$out/newest-plain")" --requests 200
say "done"
