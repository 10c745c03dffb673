"""What one `llama-warden reclaim` gives back after ordinary work, with real weights, on a CPU or a GPU. docs/evidence/policies.md has the results.

    reclaimed.py --warden LLAMA_WARDEN --server LLAMA_SERVER --model MODEL.gguf --out DIR [--flags "-c 16384 -np 4 -ngl 99"] [--requests 400]

LLAMA_SERVER is a build of `llama-warden build`. Four clients ask prompts of 20 to 2,000 tokens, each new, then eight conversations take four
turns each. When the process is idle, it is asked to give memory back. Prints one line of JSON: memory of the process in MiB (own pages on the
host, the card's) when it was ready, after the work, after the reclaim and after as much work again, what each part gave back, and how long the
reclaim and the first answers before and after it took. Exit code 0: all requests succeeded, and both answers are equal.
"""
import argparse
import http.client
import json
import pathlib
import random
import statistics
import subprocess
import threading
import time

import update
import upgrade
from update import WORDS, say


def ask(port, messages, tokens=16):
    """Text and milliseconds of an answer."""
    body = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "seed": 1}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text[:500]
    connection.close()
    return json.loads(text)["choices"][0]["message"]["content"], (time.monotonic() - began) * 1000


def prompt(rng, tokens):
    return " ".join(rng.choice(WORDS) + str(rng.randrange(100)) for _ in range(max(tokens // 3, 1)))


def work(port, seed, requests):
    failures = []

    def client(number):
        rng = random.Random(seed * 100 + number)
        try:
            for _ in range(requests // 4):
                ask(port, [{"role": "user", "content": prompt(rng, rng.choice([20, 100, 500, 2000]))}], rng.choice([4, 32]))
            for _ in range(2):
                talk = []
                for _ in range(4):
                    talk.append({"role": "user", "content": prompt(rng, 200)})
                    talk.append({"role": "assistant", "content": ask(port, talk)[0]})
        except Exception as wrong:
            failures.append(repr(wrong))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return failures


def memory(pid):
    """Own pages on the host and memory on the card of a process, in MiB."""
    rows = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    try:
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        apps = [line.split(",") for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()]
        # In a container, numbers of processes differ; ours is the only one there.
        card = sum(int(used) for _, used in apps)
    except (OSError, subprocess.CalledProcessError, ValueError):
        card = None
    return {"host": round(int(rows["RssAnon"].split()[0]) / 1024, 1), "card": card}


def main():
    args = update.ARGS
    args.out.mkdir(parents=True, exist_ok=True)
    warden = upgrade.Warden(args)
    warden.serve()
    pid, rows, failures = warden.wait(lambda: upgrade.servers(warden), 120)[0], {}, []
    rows["ready"] = memory(pid)
    failures += work(warden.port, 1, args.requests)
    question = [{"role": "user", "content": prompt(random.Random(5), 300)}]
    ask(warden.port, question)
    before = [ask(warden.port, question) for _ in range(5)]
    time.sleep(3)
    rows["after the work"] = memory(pid)
    ran = warden.run("reclaim", "reclaim", "m", "--json")
    rows["after the reclaim"] = memory(pid)
    after = [ask(warden.port, question) for _ in range(5)]
    failures += work(warden.port, 2, args.requests)
    time.sleep(3)
    rows["after as much again"] = memory(pid)
    warden.close()
    say(json.dumps({"model": args.model.name, "memory": rows, "reclaim": json.loads(ran["printed"] or "null"),
                    "seconds": round(ran["ended"] - ran["began"], 2), "failures": failures, "ms_before": [round(ms, 1) for _, ms in before], "ms_after": [round(ms, 1) for _, ms in after],
                    "medians": [round(statistics.median(ms for _, ms in some), 1) for some in (before, after)]}))
    return 0 if not failures and {text for text, _ in before} == {text for text, _ in after} else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True, type=pathlib.Path)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--flags", default="-c 16384 -np 4 -ngl 99")
    parser.add_argument("--requests", type=int, default=400)
    args = update.ARGS = parser.parse_args()
    raise SystemExit(main())
