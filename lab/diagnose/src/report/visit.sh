# Sends request number $1, and shows what is answered: the words, or the figures of a stream.
body() {
    case $1 in
@PATHS@    esac
    took=$(curl -s -o "$work/answer" -w 'status %{http_code}, first byte after %{time_starttransfer} s, all after %{time_total} s' \
        -H 'Content-Type: application/json' --data-binary "@$here/requests/$1.json" "http://127.0.0.1:$port$path") || :
    echo "request $1: $took"
    # Of a stream the last figures count; what is one piece is shown as it is.
    if grep -q '^data: ' "$work/answer"; then
        grep '_ms":' "$work/answer" | tail -n 1 | grep -o '"[a-z]*_\(n\|ms\|per_second\)":[0-9.]*' | tr '\n' ' '
        echo
    else
        head -c 2000 "$work/answer"
        echo
    fi
}

while [ "$n" -lt "$times" ]; do
    n=$((n + 1))
    at=0
    while [ "$at" -lt @BODIES@ ]; do
        body "$at"
        kill -0 "$pid" 2>/dev/null || ended
        at=$((at + 1))
    done
done
