#!/bin/sh
# @WHAT@ under the workload @WORKLOAD@, with nothing but llama-server, curl and a shell.
# Seen with llama-warden diagnose:
@SHOWN@#
#   sh reproduce.sh [REQUESTS]
#
# LLAMA_SERVER is the binary to use, MODEL and MMPROJ the files, PORT the port (18080).
set -eu
server=@BINARY@
[ -z "${LLAMA_SERVER:-}" ] || server=$LLAMA_SERVER
@FILES@port=${PORT:-18080}
requests=${1:-@REQUESTS@}
# So many are sent at a time.
together=@TOGETHER@
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
log=$work/log

@EXPORTS@@UNSET@unset LLAMA_API_KEY
"$server" @ARGS@ --host 127.0.0.1 --port "$port" >"$log" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null || :; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

n=0
ended() {
    echo "llama-server has ended by itself after $n requests; its last lines:" >&2
    tail -n 12 "$log" >&2
    exit 1
}

waited=0
until curl -sf -o /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$pid" 2>/dev/null || ended
    waited=$((waited + 1))
    [ "$waited" -lt 900 ] || { echo "llama-server is not ready after $waited s" >&2; exit 1; }
    sleep 1
done
# Something else may listen there.
kill -0 "$pid" 2>/dev/null || ended

# Anonymous memory of the process in KiB, swapped out or not.
host() {
    sum=0
    while read -r key value _; do
        case $key in RssAnon: | VmSwap:) sum=$((sum + value)) ;; esac
    done <"/proc/$pid/status"
    echo "$sum"
}

# VRAM of the process in MiB, if nvidia-smi tells it.
vram() {
    command -v nvidia-smi >/dev/null 2>&1 || { echo "?"; return; }
    nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits 2>/dev/null | {
        found="?"
        while IFS=' ,' read -r one mib; do [ "$one" = "$pid" ] && found=$mib; done
        echo "$found"
    }
}

# Sends request number $1; says why if it is not answered.
body() {
    case $(($1 % @BODIES@)) in
@PATHS@    esac
    code=$(sed "s/@N@/$1/g;s/@ROUND@/$(($1 / @BODIES@))/g" "$here/requests/$(($1 % @BODIES@)).json" |
        curl -s -o "$work/$1" -w '%{http_code}' -H 'Content-Type: application/json' --data-binary @- \
            "http://127.0.0.1:$port$path") || :
    case $code in 2??) rm -f "$work/$1"; return 0 ;; esac
    echo "request $1 failed: status $code: $(head -c 300 "$work/$1" 2>/dev/null)" >&2
    rm -f "$work/$1"
    return 1
}

# The start of a process grows: the figure that counts is that of the last two thirds.
third=$((requests / 3))
first=0 first_host=0 first_vram="?" failed=0 told=0 n=0
echo "requests  host KiB  VRAM MiB"
while [ "$n" -lt "$requests" ]; do
    sent=""
    while [ "$n" -lt "$requests" ] && { [ -z "$sent" ] || [ $((n % together)) -ne 0 ]; }; do
        body "$n" &
        sent="$sent $!"
        n=$((n + 1))
    done
    for one in $sent; do
        wait "$one" || failed=$((failed + 1))
    done
    kill -0 "$pid" 2>/dev/null || ended
    if [ "$first" -eq 0 ] && [ "$n" -gt "$third" ]; then
        first=$n first_host=$(host) first_vram=$(vram)
    fi
    if [ $((n - told)) -ge 10 ] || [ "$n" -eq "$requests" ]; then
        told=$n
        echo "$n  $(host)  $(vram)"
    fi
done
if [ "$failed" -gt 0 ]; then
    echo "$failed of $n requests failed" >&2
    [ "$failed" -lt "$n" ] || exit 1
fi
rest=$((n - first))
[ "$rest" -gt 0 ] || exit 0
last_host=$(host) last_vram=$(vram)
echo "host: $(((last_host - first_host) / rest)) KiB a request over the last $rest"
case $first_vram$last_vram in
*\?*) ;;
*) echo "VRAM: $(((last_vram - first_vram) * 1024 / rest)) KiB a request over the last $rest" ;;
esac
