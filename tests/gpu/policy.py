"""A leaking llama-server under policies, on a GPU. docs/evidence/policies.md has the results.

    policy.py --warden LLAMA_WARDEN --server PLAIN_LLAMA_SERVER --models DIR [--requests 900] [--recycles 3]

Serves two models with the same workload, one image a request: `growth` is replaced by its slope, long before its
budget; `budget` by a budget of VRAM. Beside it, what `llama-warden status` says of VRAM is compared with nvidia-smi.
Prints one object of JSON: answers, what differed from nvidia-smi, and each replacement as the ledger has it.
"""
import argparse
import atexit
import http.client
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import tempfile
import threading
import time

from evidence import TEXT, picture

CONFIG = """
server.port = 0
sensors.interval = "1s"

[defaults]
binary = "{server}"
args = {args}
preload = true
record = true
replace = "sequential"

[defaults.policy]
quiet_for = "100ms"
quiet_within = "20s"
min_interval = "20s"
min_interval_hard = "5s"

[models.growth]
model = "{models}/gemma4.gguf"
[models.growth.policy]
growth = "recycle"
vram = {{ soft = "5GiB", hard = "6GiB" }}

[models.budget]
model = "{models}/gemma4.gguf"
[models.budget.policy]
growth = "off"
vram = {{ soft = "{soft}MiB", hard = "{hard}MiB" }}
"""


class Warden:
    def __init__(self, args, home):
        self.program, self.home = args.warden, home
        self.env = {**os.environ, "LLAMA_MEDIA_MARKER": "<__picture__>"}
        for name in ("CONFIG", "DATA", "STATE", "CACHE", "RUNTIME"):
            folder = home / name.lower()
            folder.mkdir(mode=0o700)
            self.env[f"XDG_{name}_HOME" if name != "RUNTIME" else "XDG_RUNTIME_DIR"] = str(folder)
        models = pathlib.Path(args.models)
        flags = ["--mmproj", str(models / "mmproj.gguf"), *TEXT, "-ngl", "99", "--chat-template", "chatml"]
        (home / "warden.toml").write_text(CONFIG.format(
            server=args.server, models=models, args=json.dumps(flags), soft=args.soft, hard=args.soft + 400))
        self.log = open(home / "warden.log", "w")
        command = [self.program, "serve", "--config", str(home / "warden.toml")]
        self.process = subprocess.Popen(command, env=self.env, stdout=self.log, stderr=subprocess.STDOUT)
        atexit.register(lambda: self.process.poll() is None and self.process.terminate())
        self.port = self.wait(lambda: re.search(r"listening on http://[\d.]+:(\d+)", self.said()), 60).group(1)
        self.wait(lambda: all(m["state"] == "loaded" for m in self.status()["models"]), 240)

    def said(self):
        return (self.home / "warden.log").read_text()

    def wait(self, look, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := look():
                return found
            if self.process.poll() is not None:
                raise SystemExit(f"llama-warden ended:\n{self.said()[-3000:]}")
            time.sleep(0.1)
        raise SystemExit(f"nothing within {seconds} s:\n{self.said()[-3000:]}")

    def status(self):
        text = subprocess.run([self.program, "status", "--json"], env=self.env, capture_output=True, text=True).stdout
        return json.loads(text)["fleet"] if text.strip() else {"models": [{"state": "unknown"}]}

    def ledger(self):
        found = list(self.home.rglob("ledger.jsonl"))
        entries = [json.loads(line) for line in found[0].read_text().splitlines()] if found else []
        return [entry for entry in entries if entry.get("kind") != "reclaim"]

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Client(threading.Thread):
    """Image after image to one model, with pauses as people make them."""

    def __init__(self, warden, model, requests, over):
        super().__init__(daemon=True)
        self.warden, self.model, self.requests, self.over = warden, model, requests, over
        self.answered, self.failed = 0, []

    def run(self):
        pauses = random.Random(self.model)
        for index in range(self.requests):
            if self.over.is_set():
                return
            image = "data:image/png;base64," + picture(index)
            body = {"model": self.model, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
                    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}},
                                                              {"type": "text", "text": "tell"}]}]}
            try:
                connection = http.client.HTTPConnection("127.0.0.1", int(self.warden.port), timeout=300)
                connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200 and json.loads(text)["usage"]["completion_tokens"] == 64:
                    self.answered += 1
                else:
                    self.failed.append(f"{answer.status}: {text[:200]!r}")
            except Exception as error:  # noqa: BLE001 - whatever it is, the request failed
                self.failed.append(repr(error))
            time.sleep(pauses.random() * 0.3)


def smi():
    text = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True).stdout
    return {int(pid): int(mib) for pid, mib in (line.split(",") for line in text.strip().splitlines())}


def compare(warden, seen):
    """What status says, between two readings of nvidia-smi: within what those two say, or not."""
    before, status, after = smi(), warden.status(), smi()
    for model in status["models"]:
        for backend in model["backends"]:
            memory = backend.get("memory") or {}
            pid = backend.get("pid")
            ours = [round(v["bytes"] / 2**20) for v in memory.get("vram", [])]
            if pid in before and pid in after and ours and backend["phase"] == "ready":
                # A sample is up to a second old, and a step of growth is 2 MiB.
                low, high = min(before[pid], after[pid]) - 8, max(before[pid], after[pid]) + 2
                seen.append({"pid": pid, "ours": ours[0], "nvidia_smi": [before[pid], after[pid]],
                             "equal": ours[0] in (before[pid], after[pid]), "near": low <= ours[0] <= high})
    return status


def brief(entry):
    evidence = entry["evidence"]
    keep = {key: entry.get(key) for key in ("model", "reason", "mode", "from", "to", "cut", "gap_ms", "exit_ms", "ours_ms", "helped",
                                            "failed", "vram_before", "vram_after", "vram_after_exit")}
    keep["words"] = evidence.get("words")
    keep["requests"] = evidence.get("requests")
    keep["verdict"], keep["slope"] = evidence.get("verdict"), evidence.get("slope")
    keep["blame"], keep["series"] = evidence.get("blame"), evidence.get("series")
    keep["host"] = [(entry.get(key) or {}).get("anon") for key in ("host_before", "host_after")]
    return keep


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--recycles", type=int, default=3, help="of each model, then it ends")
    parser.add_argument("--soft", type=int, default=3300, help="MiB of VRAM")
    parser.add_argument("--seconds", type=int, default=400)
    parser.add_argument("--out", help="folder for the log, the recordings and the ledger")
    args = parser.parse_args()
    home = pathlib.Path(tempfile.mkdtemp(prefix="lw"))
    warden, over, seen = Warden(args, home), threading.Event(), []
    clients = [Client(warden, model, args.requests, over) for model in ("growth", "budget")]
    for client in clients:
        client.start()
    deadline = time.monotonic() + args.seconds
    status = {}
    while time.monotonic() < deadline and any(client.is_alive() for client in clients):
        status = compare(warden, seen)
        done = [entry["model"] for entry in warden.ledger()]
        if all(done.count(model) >= args.recycles for model in ("growth", "budget")):
            break
        time.sleep(2)
    over.set()
    for client in clients:
        client.join()
    result = {
        "answered": {client.model: client.answered for client in clients},
        "failed": {client.model: client.failed for client in clients},
        "vram": {"compared": len(seen), "equal": sum(one["equal"] for one in seen),
                 "not_near": [one for one in seen if not one["near"]], "last": seen[-2:]},
        "replacements": [brief(entry) for entry in warden.ledger()],
        "verdicts": [line[:300] for line in warden.said().splitlines() if "erdict" in line or "leak" in line][:40],
    }
    if args.out:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "warden.log").write_text(warden.said())
        (out / "status.json").write_text(json.dumps(status))
        for file in [*home.rglob("*.jsonl")]:
            (out / file.name).write_bytes(file.read_bytes())
    warden.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
