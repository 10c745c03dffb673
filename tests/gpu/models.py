"""More models than memory: requests for all of them through llama-warden, and what came of it.

    models.py --warden llama-warden --server llama-server --requests 600 [--flags "-np 2 -ngl 99"] MODEL.gguf ...

Each file is served under as many names as --names says in all. A third of the requests is for one favourite, a quarter for three models in
turn, the rest for any. Prints one line of JSON: how many failed, how long they took, how many models were loaded, and the time from the end of
a process that made room to the start of the next one.
"""

import argparse
import datetime
import json
import os
import random
import re
import shlex
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

PORT = 8199


def configuration(folder, args):
    lines = ["server.port = %d" % PORT, "admin.socket = '%s/admin.sock'" % folder]
    lines += ["paths.runtime_dir = '%s/run'" % folder, "paths.state_dir = '%s/state'" % folder]
    lines += ["[defaults]", "binary = '%s'" % args.server, "args = %s" % json.dumps(shlex.split(args.flags))]
    for number in range(args.names):
        path = os.path.abspath(args.files[number % len(args.files)])
        lines += ["[models.m%d]" % number, "model = '%s'" % path]
    path = os.path.join(folder, "warden.toml")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def order(names, count):
    """Which model each request is for; the same for every run."""
    dice = random.Random(7)
    for number in range(count):
        share = dice.random()
        if share < 0.35:
            yield names[0]
        elif share < 0.6:
            yield names[1 + number // 25 % 3]
        else:
            yield dice.choice(names)


def ask(model, number):
    body = {"model": model, "messages": [{"role": "user", "content": "say %d" % number}], "max_tokens": 4}
    request = urllib.request.Request(
        "http://127.0.0.1:%d/v1/chat/completions" % PORT,
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=900) as answer:
        return "choices" in json.load(answer)


def drive(wanted):
    """All requests by 16 clients: how long each took, and which failed."""
    lock, numbers = threading.Lock(), iter(range(len(wanted)))
    took, failed = [], []

    def client():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            began = time.monotonic()
            try:
                whole = ask(wanted[number], number)
            except (OSError, ValueError, urllib.error.HTTPError) as error:
                whole = False
                print("request %d for %s: %r" % (number, wanted[number], error))
            took.append(time.monotonic() - began)
            if not whole:
                failed.append(number)

    clients = [threading.Thread(target=client) for _ in range(16)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return sorted(took), failed


def swaps(log):
    """Milliseconds from the end of a process to the start of the next one, of models for which others made room."""
    ended, wanted, gaps = None, set(), []
    for line in open(log):
        event = re.match(r"(\S+Z)\s+INFO \S*view::event: (.*)", line)
        if not event:
            continue
        at = datetime.datetime.fromisoformat(event[1].replace("Z", "+00:00")).timestamp()
        room = re.search(r"wanted=(\S+)", event[2])
        start = re.match(r'starting model="(.*?)"', event[2])
        if event[2].startswith("stopped"):
            ended = at
        elif room:
            wanted.add(room[1])
        elif start and start[1] in wanted and ended:
            wanted.discard(start[1])
            gaps.append(round((at - ended) * 1000))
    return sorted(gaps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--names", type=int, default=12)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--flags", default="-np 2 -c 4096 -ngl 99", help="of llama-server")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lwm") as folder:
        config, log = configuration(folder, args), os.path.join(folder, "log")
        with open(log, "w") as out:
            warden = subprocess.Popen([args.warden, "serve", "--config", config], stdout=out, stderr=out)
        deadline = time.monotonic() + 60
        while "listening on" not in open(log).read():
            if warden.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("llama-warden does not serve:\n" + open(log).read())
            time.sleep(0.05)
        began = time.monotonic()
        wanted = list(order(["m%d" % number for number in range(args.names)], args.requests))
        took, failed = drive(wanted)
        seconds = time.monotonic() - began
        warden.terminate()
        warden.wait()
        gaps, text = swaps(log), open(log).read()
        print(json.dumps({
            "requests": len(took),
            "failed": len(failed),
            "seconds": round(seconds),
            "p50": round(took[len(took) // 2], 2),
            "p99": round(took[len(took) * 99 // 100], 2),
            "longest": round(took[-1], 2),
            "loads": len(re.findall(r"event: ready model=", text)),
            "made_room": len(re.findall(r"view::event: unloaded: it makes room", text)),
            "out_of_memory": len(re.findall(r"out of memory", text)),
            "gap_ms_p50": gaps[len(gaps) // 2] if gaps else None,
        }))


if __name__ == "__main__":
    main()
