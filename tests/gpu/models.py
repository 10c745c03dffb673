"""More models than memory: requests for all of them through llama-warden, and what came of it.

    models.py --warden llama-warden --server llama-server --requests 600 [--flags "-np 2 -ngl 99"]
        [--leaking 2 --seeing MODEL.gguf --projector MMPROJ.gguf] MODEL.gguf ...

Each file is served under as many names as --names says in all; --leaking of them serve the model with the projector, get an image with each
request, and have no mitigation, so that they leak on builds that do. A third of the requests is for one favourite, a quarter for three models
in turn, the rest for any. Prints one line of JSON: how many failed, how long they took, how many models were loaded and left, how many of those
leaked, and the time from the end of a process that made room to the start of the next one.
"""

import argparse
import base64
import datetime
import json
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib

PORT = 8199


def configuration(folder, args):
    lines = ["server.port = %d" % PORT, "admin.socket = '%s/admin.sock'" % folder]
    lines += ["paths.runtime_dir = '%s/run'" % folder, "paths.state_dir = '%s/state'" % folder]
    if args.looks:
        lines += ["log.level = 'info,warden_supervisor::memory::loading=trace'"]
    lines += ["[defaults]", "binary = '%s'" % args.server, "args = %s" % json.dumps(shlex.split(args.flags))]
    for number in range(args.names):
        sees = "m%d" % number in leaking(args)
        file = args.seeing if sees else args.files[number % len(args.files)]
        lines += ["[models.m%d]" % number, "model = '%s'" % os.path.abspath(file)]
        if sees:
            words = ["--mmproj", os.path.abspath(args.projector), "--cache-ram", "0", "--ctx-checkpoints", "0"]
            lines += ["args = %s" % json.dumps(shlex.split(args.flags) + words)]
    path = os.path.join(folder, "warden.toml")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def leaking(args):
    """Those that get images. Not the favourite: it never rests, and what memory is at rest is what growth is read from."""
    return ["m%d" % number for number in range(1, 1 + args.leaking)]


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


def picture(number):
    """A PNG of 640x480 whose colour is its number's."""
    row = b"\0" + bytes([number % 256, number // 256 % 256, 99]) * 640
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", 640, 480, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * 480)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def ask(model, number, sees):
    content, tokens = "say %d" % number, 4
    if sees:
        content, tokens = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": picture(number)}}], 64
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    request = urllib.request.Request(
        "http://127.0.0.1:%d/v1/chat/completions" % PORT,
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=900) as answer:
        return "choices" in json.load(answer)


def drive(wanted, seeing=()):
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
                whole = ask(wanted[number], number, wanted[number] in seeing)
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
    """Milliseconds from the end of the last process that made room for a model to the start of that model's, and those of them in which
    there was room, at most: since the last look before the one that let the model in."""
    makes_room, ended, gaps, ours, looks = {}, {}, [], [], []
    for line in open(log):
        event = re.match(r"(\S+Z)\s+(?:INFO|TRACE) (\S+): (.*)", line)
        if not event:
            continue
        at = datetime.datetime.fromisoformat(event[1].replace("Z", "+00:00")).timestamp()
        if event[3].startswith("looked for room"):
            looks = looks[-1:] + [at]
        if event[2] != "event":
            continue
        room = re.match(r"unloaded to free memory for `(.*?)`.* model=(\S+)", event[3])
        stopped = re.match(r"stopped: .* model=(\S+)", event[3])
        start = re.match(r"starting: .* model=(\S+)", event[3])
        if room:
            makes_room[room[2]] = room[1]
        elif stopped and stopped[1] in makes_room:
            ended[makes_room.pop(stopped[1])] = at
        elif start:
            if start[1] in ended:
                end = ended.pop(start[1])
                gaps.append(round((at - end) * 1000))
                ours.append(round((at - max(end, looks[0] if len(looks) == 2 else end)) * 1000))
            # What still ends was not needed.
            makes_room = {who: wanted for who, wanted in makes_room.items() if wanted != start[1]}
    return sorted(gaps), sorted(ours)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--names", type=int, default=12)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--leaking", type=int, default=0, help="so many of the names get images")
    parser.add_argument("--seeing", help="the model that they serve")
    parser.add_argument("--projector")
    parser.add_argument("--flags", default="-np 2 -c 4096 -ngl 99", help="of llama-server")
    parser.add_argument("--looks", action="store_true", help="tell how long there was room before a start")
    parser.add_argument("--log", help="keep llama-warden's log in this file")
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
        seeing = leaking(args)
        took, failed = drive(wanted, seeing)
        seconds = time.monotonic() - began
        warden.terminate()
        warden.wait()
        (gaps, ours), text = swaps(log), open(log).read()
        if args.log:
            shutil.copy(log, args.log)
        left = re.findall(r" event: unloaded to free memory for .* model=(m\d+)", text)
        print(json.dumps({
            "requests": len(took),
            "failed": len(failed),
            "seconds": round(seconds),
            "p50": round(took[len(took) // 2], 2),
            "p99": round(took[len(took) * 99 // 100], 2),
            "longest": round(took[-1], 2),
            "loads": len(re.findall(r" event: ready after ", text)),
            "made_room": len(left),
            "made_room_of_leaking": sum(1 for model in left if model in seeing),
            "said_to_leak": sorted(set(re.findall(r" event: .*leak.* model=(m\d+)", text))),
            "out_of_memory": len(re.findall(r"out of memory", text)),
            "gap_ms_p50": gaps[len(gaps) // 2] if gaps else None,
            "gap_ms_p90": gaps[len(gaps) * 9 // 10] if gaps else None,
            "gap_ms_most": gaps[-1:],
            "gaps_over_50_ms": sum(1 for gap in gaps if gap > 50),
            # Only if looks are in the log (`--looks`).
            "with_room_ms_p50_p90_most": [ours[len(ours) // 2], ours[len(ours) * 9 // 10], ours[-1]] if ours and args.looks else None,
        }))


if __name__ == "__main__":
    main()
