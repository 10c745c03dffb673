"""A leaking llama-server that is asked to give memory back, on a GPU. docs/evidence/policies.md has the results.

    reclaim.py --warden LLAMA_WARDEN --server LLAMA_SERVER --models DIR [--requests 1000] [--room 1000] [--seconds 420]

LLAMA_SERVER is a build of b8827 with the patch sets, DIR has gemma4.gguf and mmproj.gguf as tests/gpu/all.sh makes them
(presets gemma4-gpu and gemma4-vision-gpu of sized_model.py).

Two models are served by the same build, with an image in each request: `saw` has a soft budget of host memory (its size when
it is ready and --room MiB) and `growth = "recycle"`, `free` has no policy at all. One client asks both, one request after the
other, so that both decode on the same machine in the same moments: every request of `free` stands between two of `saw`.

Prints a table, and then one line of JSON. Exit code 0: no request failed, nothing was replaced, memory was given back at least
once (what leaks for want of room may not come back, once there is room) and stayed below the budget but for what came between two readings, and decoding was as fast within 2 %. Else 1.
"""
import argparse
import atexit
import http.client
import json
import os
import pathlib
import re
import signal
import statistics
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
replace = "sequential"

[models.free]
model = "{models}/gemma4.gguf"
policy.growth = "off"

[models.saw]
model = "{models}/gemma4.gguf"
[models.saw.policy]
{policy}
"""
OFF = 'growth = "off"'
MIB = 2**20


class Warden:
    """An instance of its own, with a home of its own; gone when the block is left."""

    def __init__(self, args, policy):
        self.program, self.home = args.warden, pathlib.Path(tempfile.mkdtemp(prefix="lw"))
        self.env = {**os.environ, "LLAMA_MEDIA_MARKER": "<__picture__>"}
        for name in ("CONFIG", "DATA", "STATE", "CACHE", "RUNTIME"):
            folder = self.home / name.lower()
            folder.mkdir(mode=0o700)
            self.env[f"XDG_{name}_HOME" if name != "RUNTIME" else "XDG_RUNTIME_DIR"] = str(folder)
        models = pathlib.Path(args.models).resolve()
        flags = ["--mmproj", str(models / "mmproj.gguf"), *TEXT, "-ngl", "99", "--chat-template", "chatml"]
        config = CONFIG.format(server=args.server, models=models, args=json.dumps(flags), policy=policy)
        (self.home / "warden.toml").write_text(config)
        self.log = open(self.home / "warden.log", "w")
        command = [self.program, "serve", "--config", str(self.home / "warden.toml")]
        self.process = subprocess.Popen(command, env=self.env, stdout=self.log, stderr=subprocess.STDOUT)
        atexit.register(self.close)
        self.port = int(self.wait(lambda: re.search(r"listening on http://[\d.]+:(\d+)", self.said()), 60).group(1))
        self.wait(lambda: all(model["state"] == "loaded" for model in self.status()["models"]), 240)

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
        ran = subprocess.run([self.program, "status", "--json"], env=self.env, capture_output=True, text=True, timeout=30)
        return json.loads(ran.stdout)["fleet"] if ran.stdout.strip() else {"models": [{"state": "unknown"}]}

    def backend(self, name):
        model = next((model for model in self.status()["models"] if model.get("name") == name), None)
        return model["backends"][0] if model and model["backends"] else {}

    def ledger(self):
        found = list(self.home.rglob("ledger.jsonl"))
        return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []

    def ask(self, model, index):
        """Tokens a second of one answer; what went wrong instead."""
        image = "data:image/png;base64," + picture(index)
        body = {"model": model, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}},
                                                          {"type": "text", "text": "tell"}]}]}
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            value = json.loads(text)
            if answer.status != 200 or value["usage"]["completion_tokens"] != 64:
                return f"{answer.status}: {text[:200]!r}"
            return float(value["timings"]["predicted_per_second"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the request failed
            return repr(error)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


class Watch(threading.Thread):
    """Host memory and VRAM of both models, once a second."""

    def __init__(self, warden):
        super().__init__(daemon=True)
        self.warden, self.over, self.seen = warden, threading.Event(), {"saw": [], "free": []}

    def run(self):
        while not self.over.wait(1):
            try:
                models = self.warden.status()["models"]
            except Exception:  # noqa: BLE001 - one look less
                continue
            for model in models:
                for backend in model.get("backends", []):
                    if model["name"] in self.seen and backend.get("host"):
                        host = (backend["host"]["anon"] + backend["host"]["swap"]) / MIB
                        vram = sum(one["bytes"] for one in backend["memory"]["vram"]) / MIB
                        self.seen[model["name"]].append((host, vram))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--requests", type=int, default=1000, help="to the model under the policy")
    parser.add_argument("--room", type=int, default=1000, help="MiB that the budget leaves above the size when ready")
    parser.add_argument("--every", type=int, default=2, help="each so manieth request is also sent to the other model")
    parser.add_argument("--seconds", type=int, default=420)
    parser.add_argument("--out", help="folder for the log and the ledger")
    args = parser.parse_args()
    began = time.monotonic()

    # How large such a process is, before anything is asked of it.
    probe = Warden(args, OFF)
    probe.wait(lambda: probe.backend("saw").get("host_at_ready"), 30)
    ready = probe.backend("saw")["host_at_ready"]["anon"] / MIB
    probe.close()

    soft = round(ready + args.room)
    policy = f'growth = "recycle"\nquiet_for = "100ms"\nquiet_within = "20s"\nmin_interval = "20s"\nhost = {{ soft = "{soft}MiB" }}'
    warden = Warden(args, policy)
    warden.wait(lambda: warden.backend("saw").get("reclaim", {}).get("parts") is not None, 30)
    parts = warden.backend("saw")["reclaim"]["parts"]
    watch = Watch(warden)
    watch.start()
    speeds, failed = {"saw": [], "free": []}, []
    for index in range(args.requests):
        for model in ("saw", "free") if index % args.every == 0 else ("saw",):
            got = warden.ask(model, index)
            if isinstance(got, str):
                failed.append(f"{model} {index}: {got}")
            else:
                speeds[model].append(got)
        if time.monotonic() - began > args.seconds:
            break
    time.sleep(2)
    watch.over.set()
    watch.join(40)

    ledger = warden.ledger()
    reclaims = [entry for entry in ledger if entry.get("kind") == "reclaim"]
    replaced = [entry for entry in ledger if entry.get("kind") != "reclaim"]
    status = subprocess.run([args.warden, "status"], env=warden.env, capture_output=True, text=True).stdout
    backend = warden.backend("saw")
    if args.out:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "warden.log").write_text(warden.said())
        (out / "status.txt").write_text(status)
        (out / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ledger))
    warden.close()

    host = {name: [one[0] for one in seen] for name, seen in watch.seen.items()}
    vram = {name: [one[1] for one in seen] for name, seen in watch.seen.items()}
    # Warm requests only: the first ones load kernels.
    median = {name: statistics.median(some[20:]) if len(some) > 40 else 0.0 for name, some in speeds.items()}
    ratio = median["saw"] / median["free"] if median["free"] else 0.0
    peak = max(host["saw"], default=0.0)
    # A reading a second, and a second until the answer: what grew in between is on top.
    allowed = soft * 1.05
    growth = {one["series"]: one["verdict"] for one in backend.get("memory", {}).get("growth", [])}
    ms = [entry["ms"] for entry in reclaims]
    given = {part: sum(entry["given"][part] for entry in reclaims) / MIB
             for part in ("graphs_host", "graphs_device", "pools", "cublas", "heap")}
    good = {
        "no request failed": not failed and len(speeds["saw"]) > 0,
        "nothing was replaced": not replaced,
        "given back at least once": len(reclaims) >= 1,
        "below the budget": 0 < peak <= allowed,
        "as fast within 2 %": ratio >= 0.98,
    }

    print(f"{'':28} {'saw':>12} {'free':>12}")
    rows = [
        ("answers", len(speeds["saw"]), len(speeds["free"])),
        ("MiB host, when ready", f"{ready:.0f}", ""),
        ("MiB host, budget", soft, "none"),
        ("MiB host, peak", f"{peak:.0f}", f"{max(host['free'], default=0):.0f}"),
        ("MiB host, last", f"{(host['saw'] or [0])[-1]:.0f}", f"{(host['free'] or [0])[-1]:.0f}"),
        ("MiB VRAM, peak", f"{max(vram['saw'], default=0):.0f}", f"{max(vram['free'], default=0):.0f}"),
        ("tokens/s, median", f"{median['saw']:.1f}", f"{median['free']:.1f}"),
        ("given back, times", len(reclaims), ""),
        ("ms, median and longest", f"{statistics.median(ms):.0f}, {max(ms)}" if ms else "-", ""),
        ("replaced", sum(e["model"] == "saw" for e in replaced), sum(e["model"] == "free" for e in replaced)),
    ]
    for name, saw, free in rows:
        print(f"{name:28} {saw!s:>12} {free!s:>12}")
    for part, mib in given.items():
        print(f"{'MiB given back, ' + part:28} {mib:>12.0f}")
    for entry in reclaims:
        before, after = ((entry.get(key) or {}).get("anon", 0) / MIB for key in ("host_before", "host_after"))
        print(f"  {entry['at']} {entry['reason']}: {before:.0f} -> {after:.0f} MiB, {entry['outcome']}, {entry['ms']} ms")
    for name, is_so in good.items():
        print(f"{'yes' if is_so else 'NO':4} {name}")
    print(json.dumps({"parts": parts, "soft_mib": soft, "ready_mib": round(ready), "peak_mib": round(peak),
                      "free_peak_mib": round(max(host["free"], default=0)), "reclaims": len(reclaims), "ms": ms,
                      "given_mib": {part: round(mib) for part, mib in given.items()}, "replaced": len(replaced),
                      "failed": failed[:5], "answers": {name: len(some) for name, some in speeds.items()},
                      "tokens_per_second": median, "ratio": round(ratio, 4), "growth": growth,
                      "seconds": round(time.monotonic() - began), "good": good}))
    raise SystemExit(0 if all(good.values()) else 1)


if __name__ == "__main__":
    main()
