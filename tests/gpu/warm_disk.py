"""The first turn of each conversation after an exit and a start of llama-warden, with and without `warm = "disk"`, on a GPU.

    warm_disk.py --warden LLAMA_WARDEN --server LLAMA_SERVER --model MODEL.gguf --out DIR [--conversations 4] [--tokens 16000]
                 [--flags "-c 131072 -np 4 -ngl 99"] [--lines 'mitigations = ["slot-checkpoints"]']

Each conversation has about the given number of prompt tokens. After two turns, llama-warden exits and starts again; then each conversation
takes its third turn. Prints, for `warm = "disk"` and `warm = "off"`: milliseconds to the first token (median) of the second turn (undisturbed)
and of the third, evaluated prompt tokens of the third, seconds of the exit and of the start until the model is loaded, and the events of the
save and of the restore. Exit code 0: with `warm = "disk"`, each third turn had its prompt in the cache.
"""
import argparse
import http.client
import json
import pathlib
import statistics
import time

import update
import upgrade
from update import WORDS, now, say

CONFIG = upgrade.CONFIG + 'warm = "{mode}"\nreplace = "sequential"\n{lines}\n'


class Warden(upgrade.Warden):
    def __init__(self, args, mode):
        super().__init__(args, CONFIG.replace("{mode}", mode).replace("{lines}", args.lines))


def turn(port, messages):
    """Sends one turn: milliseconds to the first token, cached and evaluated prompt tokens. Adds the answer and a question."""
    body = {"model": "m", "messages": messages, "max_tokens": 8, "stream": True, "temperature": 0, "seed": 1, "timings_per_token": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, first, text, timings = connection.getresponse(), None, "", {}
    assert answer.status == 200, answer.read(500)
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        timings = event.get("timings") or timings
        for choice in event.get("choices", []):
            delta = choice["delta"].get("content") or ""
            first = first or (time.monotonic() if delta else None)
            text += delta
    connection.close()
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and what comes next?"}]
    return round(((first or time.monotonic()) - began) * 1000, 1), timings.get("cache_n"), timings.get("prompt_n")


def conversation(number, tokens):
    words = [f"{WORDS[(number * 7 + place * (number + 3)) % len(WORDS)]}{place % 97}" for place in range(tokens // 3)]
    return [{"role": "user", "content": " ".join(words)}]


def measure(args, mode):
    args.out = args.base / mode
    args.out.mkdir(parents=True, exist_ok=True)
    warden = Warden(args, mode)
    warden.serve()
    talks = [conversation(number, args.tokens) for number in range(args.conversations)]
    first = [turn(warden.port, talk) for talk in talks]
    second = [turn(warden.port, talk) for talk in talks]
    began = now()
    warden.close()
    exit_s, began, log = round(now() - began, 2), now(), warden.said()
    warden = Warden(args, mode)
    warden.serve()
    start_s = round(now() - began, 2)
    third = [turn(warden.port, talk) for talk in talks]
    warden.close()
    log += warden.said()
    events = [line.split("event: ")[1] for line in log.splitlines() if "event: on disk" in line or "event: loaded again" in line]
    row = {"warm": mode, "tokens": first[0][2], "first_ms": [t[0] for t in first], "second_ms": [t[0] for t in second], "third_ms": [t[0] for t in third],
           "second_median_ms": statistics.median(t[0] for t in second), "third_median_ms": statistics.median(t[0] for t in third),
           "third_cached": [t[1] for t in third], "third_evaluated": [t[2] for t in third], "exit_s": exit_s, "start_s": start_s, "events": events}
    say(json.dumps(row))
    return row


def main():
    args = update.ARGS
    args.base = args.out.resolve()
    rows = [measure(args, mode) for mode in ("off", "disk")]
    (args.base / "summary.json").write_text(json.dumps(rows, indent=1))
    return 0 if all(cached and cached > 8 * evaluated for cached, evaluated in zip(rows[1]["third_cached"], rows[1]["third_evaluated"])) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True, type=pathlib.Path)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--flags", default="-c 131072 -np 4 -ngl 99")
    parser.add_argument("--lines", default="", help="more lines of the model's configuration")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16000)
    args = update.ARGS = parser.parse_args()
    raise SystemExit(main())
