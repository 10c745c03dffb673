#!/bin/sh
# Shows whether llama-server mixes conversations, with nothing but llama-server, curl, awk and a shell.
# Seen with llama-warden diagnose:
@SHOWN@#
#   sh reproduce.sh
#
# LLAMA_SERVER is the binary to use, MODEL and MMPROJ the files, PORT the port (18080).
set -eu
server=@BINARY@
[ -z "${LLAMA_SERVER:-}" ] || server=$LLAMA_SERVER
@FILES@port=${PORT:-18080}
# Further from the right answer than this many nats is not the right one.
limit=@LIMIT@
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
log=$work/log
pid=""

@EXPORTS@@UNSET@unset LLAMA_API_KEY
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || :; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

ended() {
    echo "llama-server has ended by itself; its last lines:" >&2
    tail -n 12 "$log" >&2
    exit 1
}

# Starts llama-server with these further arguments.
start() {
    "$server" @ARGS@ "$@" --host 127.0.0.1 --port "$port" >"$log" 2>&1 &
    pid=$!
    waited=0
    until curl -sf -o /dev/null "http://127.0.0.1:$port/health"; do
        kill -0 "$pid" 2>/dev/null || ended
        waited=$((waited + 1))
        [ "$waited" -lt 900 ] || { echo "llama-server is not ready after $waited s" >&2; exit 1; }
        sleep 1
    done
    # Something else may listen there.
    kill -0 "$pid" 2>/dev/null || ended
}

finish() {
    kill "$pid" 2>/dev/null || :
    wait "$pid" 2>/dev/null || :
    pid=""
}

# Sends request $1 with cache_prompt $2; the answer goes to file $3.
ask() {
    sed "s/\"cache_prompt\":true/\"cache_prompt\":$2/" "$here/requests/$1.json" |
        curl -sf -o "$3" -H 'Content-Type: application/json' --data-binary @- "http://127.0.0.1:$port/completion" ||
        { echo "request $1 failed" >&2; return 1; }
}

# The likeliest first tokens of an answer: number and log probability, a line each.
likeliest() {
    grep -oE '"(id|logprob)":[-+0-9.e]+' "$1" | sed 's/.*://' | paste - - | sed -n '2,6p'
}

# Distance in nats of answer $2 from answer $1, weighted by the probabilities of the first.
distance() {
    { likeliest "$1"; echo "-"; likeliest "$2"; } | awk '
        $1 == "-" { second = 1; next }
        !second { id[++n] = $1; one[n] = $2; next }
        { two[$1] = $2; if (!seen || $2 < least) least = $2; seen = 1 }
        END {
            for (at = 1; at <= n; at++) {
                apart = (id[at] in two) ? one[at] - two[id[at]] : one[at] - least
                if (!(id[at] in two) && apart < 0) apart = 0
                if (apart < 0) apart = -apart
                weight += exp(one[at]); sum += exp(one[at]) * apart
            }
            if (n && seen) printf "%.4f\n", sum / weight; else print "?"
        }'
}

# Conversation and turn of request $1.
name() {
    case $1 in
@NAMES@    esac
    echo "$called"
}

echo "the right answers: one slot, no reuse"
start @TRUTH@
at=0
while [ "$at" -lt @BODIES@ ]; do
    ask "$at" false "$work/right.$at"
    at=$((at + 1))
done
finish

echo "all conversations"
start
n=0
while read -r batch; do
    sent=""
    for one in $batch; do
        n=$((n + 1))
        echo "$n $one" >>"$work/sent"
        ask "$one" true "$work/answer.$n" &
        sent="$sent $!"
    done
    for one in $sent; do wait "$one" || :; done
    kill -0 "$pid" 2>/dev/null || ended
done <<'ORDER'
@ORDER@ORDER
finish

wrong=0
while read -r number one; do
    [ -s "$work/answer.$number" ] || continue
    own=$(distance "$work/right.$one" "$work/answer.$number")
    [ "$own" != "?" ] || { echo "request $number: the answer has no log probabilities" >&2; continue; }
    awk "BEGIN { exit !($own > $limit) }" || continue
    wrong=$((wrong + 1))
    best="" nearest=""
    at=0
    while [ "$at" -lt @BODIES@ ]; do
        other=$(distance "$work/right.$at" "$work/answer.$number")
        if [ -z "$best" ] || awk "BEGIN { exit !($other < $best) }"; then best=$other nearest=$at; fi
        at=$((at + 1))
    done
    echo "request $number ($(name "$one")): $own nats from the right answer; nearest: $(name "$nearest"), $best nats"
done <"$work/sent"
echo "$wrong of $n answers are not the right ones"
