"""`llama-warden upgrade` under load, with a real llama-server on a GPU. docs/evidence/updates.md has the results.

    upgrade.py --warden LLAMA_WARDEN [--to LLAMA_WARDEN] --server LLAMA_SERVER --model MODEL.gguf --out DIR [--upgrades 20] [--clients 16]

Clients ask without a pause, half of them streamed, while the program that serves is replaced again and again. An answer counts as
failed as in update.py. The llama-server has to be the same process all the time, and to hold the same memory on the GPU; at the end
a restart of the model has to work, and when all is over nothing of ours may be on the GPU. Exit code 0: all of that holds. Else 1.
"""
import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import threading
import time

import update
from update import Client, now, say

CONFIG = """
server.port = 0
sensors.interval = "1s"
[models.m]
model = "{model}"
binary = "{server}"
args = {args}
preload = true
"""


class Warden(update.Warden):
    """The same with a llama-server that is built already."""

    def __init__(self, args, config=CONFIG):
        args.canary = None
        super().__init__(args)
        self.config.write_text(config.format(model=args.model.resolve(), server=args.server.resolve(), args=json.dumps(shlex.split(args.flags))))


def on_gpu():
    """MiB that the card has in use."""
    ran = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[0])


def servers(warden):
    return sorted(backend["pid"] for model in warden.status()["models"] for backend in model.get("backends", []) if backend.get("pid"))


def programs(warden):
    """Each process of ours: its number, KiB of its own memory, open files."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "exe").resolve().name.startswith(pathlib.Path(warden.program).name):
                rows = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                found.append({"pid": int(folder.name), "anon_kib": int(rows["RssAnon"].split()[0]), "files": len(list((folder / "fd").iterdir()))})
        except (OSError, KeyError, ValueError):
            continue
    return sorted(found, key=lambda one: one["pid"])


def main():
    args.out.mkdir(parents=True, exist_ok=True)
    empty = on_gpu()
    warden = Warden(args)
    warden.serve()
    over, done = threading.Event(), []
    clients = [Client(number, warden.port, over, done) for number in range(args.clients)]
    for client in clients:
        client.start()
    time.sleep(15)
    before, first, began = on_gpu(), servers(warden), programs(warden)
    say(f"{len(done)} requests so far; llama-server {first}, {before} MiB on the card, {empty} before")
    seconds, memory, pids = [], [], []
    for number in range(args.upgrades):
        ran = warden.run(f"upgrade-{number}", "upgrade", "--to", str(args.to or args.warden), "--config", str(warden.config))
        if ran["code"]:
            say(f"upgrade {number} failed: {ran['said'][-5:]}")
        seconds.append(round(ran["ended"] - ran["began"], 2))
        time.sleep(1)
        memory.append(on_gpu())
        pids.append(servers(warden))
    ended = programs(warden)
    restarted = warden.run("restart", "restart", "m", "--config", str(warden.config))
    last = servers(warden)
    time.sleep(5)
    over.set()
    for client in clients:
        client.join()
    failed = [one for one in done if one["wrong"]]
    warden.close()
    time.sleep(2)
    summary = {
        "requests": len(done), "streamed": sum(one["streamed"] for one in done), "failed": len(failed), "failures": failed[:20],
        "tokens": sum(one["tokens"] for one in done if not one["wrong"]),
        "median": statistics.median([one["seconds"] for one in done]), "longest": max(one["seconds"] for one in done),
        "upgrades": len(seconds), "upgrade_seconds": seconds, "llama_server": first, "same": all(one == first for one in pids),
        "mib_before": before, "mib_during": [min(memory), max(memory)], "mib_empty": empty, "mib_after": on_gpu(),
        "restart": restarted["code"], "after_restart": last, "ours_at_first": began, "ours_at_last": ended, "exit": warden.process.returncode,
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))
    fine = not failed and summary["same"] and not restarted["code"] and last != first and warden.process.returncode == 0
    return 0 if fine and max(memory) - before <= 64 and summary["mib_after"] - empty <= 64 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--to", help="another program; without it, itself")
    parser.add_argument("--server", required=True, type=pathlib.Path)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--flags", default="-c 32768 -np 16 -ngl 99 -fa on")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--upgrades", type=int, default=20)
    args = update.ARGS = parser.parse_args()
    args.out = args.out.resolve()
    raise SystemExit(main())
