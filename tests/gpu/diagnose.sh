#!/usr/bin/env bash
# What `llama-warden diagnose` finds by itself, on a machine with an NVIDIA GPU, the CUDA toolkit, cmake and ninja:
#
#     tests/gpu/diagnose.sh LLAMA_WARDEN BASE NEWEST OUT
#
# LLAMA_WARDEN is the program, BASE and NEWEST are sources of llama.cpp (b8827, and the newest), OUT is a folder for the
# tables, reports and logs. TRACER is the library of `cargo build --release -p warden-tracer` (beside LLAMA_WARDEN unless it
# is named), for what it costs to be traced. Nothing but the models' seeds is given to it: what leaks and what cures it is what it says.
# Each part ends at a time limit with the table so far.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
warden=$1 base=$2 newest=$3 out=$4
arch=${ARCH:-90}
tracer=${TRACER:-$(dirname "$warden")/libwarden_tracer.so}
mkdir -p "$out"
out=$(cd "$out" && pwd)
say() { printf '%s %s\n' "$(date +%T)" "$*" | tee -a "$out/progress"; }

build() { # build NAME SOURCE OPTION...: a patched build in the store; its path in $out/NAME.path
    local name=$1 source=$2
    shift 2
    if "$warden" build --source "$source" --backend cuda --arch "$arch" --json -D LLAMA_BUILD_WEBUI=OFF "$@" >"$out/$name.build" 2>"$out/$name.log"; then
        python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["binary"])' "$out/$name.build" >"$out/$name.path"
        say "built $name"
    else
        say "build $name failed: $(tail -5 "$out/$name.log")"
    fi
}

ask() { # ask NAME SECONDS BUILD ARGUMENT... -- FLAG...: one experiment
    local name=$1 limit=$2 build=$3
    shift 3
    timeout -s INT -k 20 "$limit" "$warden" diagnose --binary "$(cat "$out/$build.path")" "$@" >"$out/$name.txt" 2>"$out/$name.err"
    say "$name: exit $?"
}

cost() { # cost NAME BUILD FLAG...: speed and processor time with the tracer and without, one line of JSON
    local name=$1 build=$2
    shift 2
    timeout 300 python3 "$here/cost.py" "$(cat "$out/$build.path")" "$tracer" "$@" >"$out/$name.json" 2>"$out/$name.err"
    say "$name: exit $? $(cat "$out/$name.json")"
}

images=(-m "$out/gemma4.gguf" --mmproj "$out/gemma4-vision.gguf" -c 16384 -np 1 -ngl 99 -fa on --cache-ram 0)
kinds=(--workload same-image --workload short-text)

for preset in gemma4 gemma4-vision llama; do
    python3 "$here/sized_model.py" $preset-gpu "$out/$preset.gguf"
done >"$out/models.log"
build base "$base"
build newest "$newest" &
ask trace 150 base --trace "${kinds[@]}" -- "${images[@]}"
ask bisect 400 base --bisect "${kinds[@]}" --report "$out/report" -- "${images[@]}"
wait
# On a machine that does nothing else by now.
cost cost-gemma4 base -m "$out/gemma4.gguf" -c 4096 -np 1 -ngl 99 -fa on --cache-ram 0
cost cost-llama base -m "$out/llama.gguf" -c 4096 -np 1 -ngl 99 -fa on --cache-ram 0
ask newest 400 newest --bisect "${kinds[@]}" -- "${images[@]}"
say "done"
