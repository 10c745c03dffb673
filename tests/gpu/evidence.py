"""Measures on a GPU what the patches do to memory, speed and answers. docs/evidence/patches.md has the results.

    evidence.py images   --server BIN --models DIR [--env NAME=VALUE]... [--requests 300]
    evidence.py prefill  --server BIN --models DIR [--env NAME=VALUE]... [--prompts 3]
    evidence.py decode   --server BIN --against BIN --models DIR [--env ...]
    evidence.py parallel --server BIN --against BIN --models DIR [--env ...] [--requests 200] [--pause SECONDS] [--reclaim]

Each prints one line of JSON. `--env` is for `--server`; `--against` is a second server, without any variable. `--gpu 1` or
`--gpu 0,1` says which devices it may use, `--flag=-sm --flag=tensor` is added to both servers' flags. With `--reclaim` the first
server is asked to give memory back again and again while it computes. Device memory is the process's own, from NVML.
"""
import argparse
import base64
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib

from channel import Asking, Channel

MARKER = "<__picture__>"


class Vram:
    """MiB of device memory that a server uses: its own where NVML tells, else what all use less what was used before."""

    def __init__(self, gpus):
        self.gpus = gpus
        try:
            import pynvml
            pynvml.nvmlInit()
            self.devices, self.nvml = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in gpus], pynvml
        except Exception:  # no package or no device: the program, which may be missing as well
            self.nvml = None
        self.before = self.total()

    def total(self):
        if self.nvml:
            return sum(self.nvml.nvmlDeviceGetMemoryInfo(device).used for device in self.devices) / 2**20
        if not _has("nvidia-smi"):
            return 0.0
        text = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i",
                               ",".join(map(str, self.gpus))], capture_output=True, text=True).stdout
        return float(sum(map(float, text.split())))

    def of(self, server):
        if self.nvml:
            own = [process.usedGpuMemory for device in self.devices
                   for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(device)
                   if process.pid == server.process.pid and process.usedGpuMemory]
            if own:
                return sum(own) / 2**20
        return self.total() - self.before


def _has(program):
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.get_exec_path())


class Server:
    """A llama-server of our own on a port of its own; gone when the block is left."""

    def __init__(self, binary, arguments, env, log, layers="99"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [binary, *arguments, "--host", "127.0.0.1", "--port", str(self.port), "-ngl", layers]
        environment = {**os.environ, "LLAMA_MEDIA_MARKER": MARKER, **env}
        self.log = open(log, "w+")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError):
                if self.request("GET", "/health")[0] == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                sys.exit(f"{' '.join(command)} did not become ready:\n{pathlib.Path(log).read_text()[-3000:]}")
            time.sleep(0.05)

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def complete(self, body):
        status, text = self.request("POST", "/completion", body)
        if status != 200:
            sys.exit(f"status {status}: {text[:500]}")
        return json.loads(text)

    def host_mib(self):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def warden_lines(self):
        return [line.rstrip() for line in open(self.log.name) if line.startswith("llama-warden:")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.code = self.process.wait()


def report(path):
    """Sums of the counters in a memory report, by name."""
    names = ("computes graphs graphs_peak graph_nodes graph_host_bytes graph_device_bytes evicted trimmed live_splits "
             "effective_cap pool_bytes pool_peak purges purged_bytes cublas_handles workspace_bytes resets "
             "invalidations skipped errors").split()
    data = pathlib.Path(path).read_bytes() if os.path.exists(path) else b""
    if data[:8] != b"LWREPT1\0":
        return None
    contexts = []
    for index in range(62):
        record = data[128 + 256 * index:][:256]
        _, state, device, context, *values = struct.unpack("<IIiI30Q", record)
        if state:
            contexts.append(dict(zip(names, values)))
    return contexts


def slope(series):
    """Least squares over the last two thirds, per request."""
    tail = list(enumerate(series))[len(series) // 3:]
    mean_x = statistics.fmean(x for x, _ in tail)
    mean_y = statistics.fmean(y for _, y in tail)
    return sum((x - mean_x) * (y - mean_y) for x, y in tail) / sum((x - mean_x) ** 2 for x, _ in tail)


def picture(seed, width=640, height=480):
    """A PNG of coloured stripes."""
    rng = random.Random(seed)
    colours = bytes(rng.randrange(256) for _ in range(3 * 64))
    row = b"\0" + b"".join(colours[3 * (x // 10 % 64):][:3] for x in range(width))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * height, 1)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


def tokens(seed, count):
    rng = random.Random(seed)
    return [1] + [rng.randrange(300, 510) for _ in range(count - 1)]


def text_request(seed, prompt, output):
    return {"prompt": tokens(seed, prompt), "n_predict": output, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False}


class Run:
    """What every measurement needs: variables, a place for logs and the report."""

    def __init__(self, args):
        self.folder = tempfile.mkdtemp(prefix="evidence-")
        self.env = dict(pair.split("=", 1) for pair in args.env)
        self.report = os.path.join(self.folder, "report")
        if args.report:
            self.env["LLAMA_WARDEN_REPORT"] = self.report
        self.visible = {"CUDA_VISIBLE_DEVICES": args.gpu} if args.gpu else {}
        self.models, self.flags = pathlib.Path(args.models), args.flag
        self.vram = Vram([int(gpu) for gpu in args.gpu.split(",")] if args.gpu else [0])

    def server(self, binary, arguments, env=None, layers="99"):
        log = os.path.join(self.folder, f"log-{time.monotonic_ns()}")
        env = {**self.visible, **(self.env if env is None else env)}
        return Server(binary, [*arguments, *self.flags], env, log, layers)


TEXT = ["-c", "8192", "-np", "1", "-fa", "on", "--cache-ram", "0", "--ctx-checkpoints", "0"]


def images(args):
    run = Run(args)
    arguments = ["-m", str(run.models / "gemma4.gguf"), "--mmproj", str(run.models / "mmproj.gguf"), *TEXT,
                 "--chat-template", "chatml"]
    host, vram = [], []
    with run.server(args.server, arguments) as server:
        begun = time.monotonic()
        for index in range(args.requests):
            server.complete({"prompt": {"prompt_string": f"look {MARKER} tell", "multimodal_data": [picture(index)]},
                             "n_predict": args.output, "temperature": 0, "ignore_eos": True, "cache_prompt": False})
            host.append(server.host_mib())
            vram.append(run.vram.of(server))
        wall = time.monotonic() - begun
        time.sleep(args.idle)
        idle = [server.host_mib(), run.vram.of(server)]
        result = {"host_mib_per_request": round(slope(host), 4), "vram_mib_per_request": round(slope(vram), 4),
                  "host_mib": [round(host[0]), round(host[-1]), round(idle[0])],
                  "vram_mib": [round(vram[0]), round(vram[-1]), round(idle[1])],
                  "wall_s": round(wall, 1), "lines": server.warden_lines(), "report": report(run.report)}
    return result


def prefill(args):
    run = Run(args)
    arguments = ["-m", str(run.models / "llama.gguf"), "-c", "65536", "-np", "1", "-fa", "on", "-ctk", "q8_0", "-ctv",
                 "q8_0", "-b", "2048", "-ub", "512", "--cache-ram", "0", "--ctx-checkpoints", "0"]
    rounds = []
    with run.server(args.server, arguments) as server:
        server.complete(text_request(99, 600, 4))
        for index in range(args.prompts):
            seen, stop = [], threading.Event()

            def watch():
                while not stop.is_set():
                    seen.append(run.vram.of(server))
                    stop.wait(0.01)

            watcher = threading.Thread(target=watch)
            first = run.vram.of(server)
            watcher.start()
            timings = server.complete(text_request(index, args.tokens, 32))["timings"]
            stop.set()
            watcher.join()
            ended = run.vram.of(server)
            time.sleep(args.idle)
            rounds.append({"before": round(first), "peak": round(max(seen)), "at_end": round(ended),
                           "after": round(run.vram.of(server)), "prefill_ms": round(timings["prompt_ms"])})
        result = {"rounds": rounds, "prefill_ms": statistics.median(r["prefill_ms"] for r in rounds),
                  "lines": server.warden_lines(), "report": report(run.report)}
    return result


def decode(args):
    """Both servers in turn, several times; medians of tokens per second."""
    run = Run(args)
    speeds = {"server": [], "against": []}
    for _ in range(args.rounds):
        for name, binary, env in [("against", args.against, {}), ("server", args.server, run.env)]:
            with run.server(binary, ["-m", str(run.models / "llama.gguf"), *TEXT], env) as server:
                server.complete(text_request(0, 64, 64))
                speeds[name] += [server.complete(text_request(seed, 64, 512))["timings"]["predicted_per_second"]
                                 for seed in range(5)]
    median = {name: statistics.median(values) for name, values in speeds.items()}
    return {"tokens_per_second": {name: round(value, 1) for name, value in median.items()},
            "ratio": round(median["server"] / median["against"], 4),
            "spread": {name: [round(min(v), 1), round(max(v), 1)] for name, v in speeds.items()}}


def parallel(args):
    """Four prompts at a time in one call, so that both servers see the same batches; all texts must be the same."""
    run = Run(args)
    arguments = ["-m", str(run.models / args.model), "-c", "32768", "-np", "4", "-fa", "on", "--cache-ram", "0",
                 "--ctx-checkpoints", "0"]

    asked = {}

    def answers(binary, env):
        texts = []
        channel = Channel(os.path.join(run.folder, "reclaim")) if args.reclaim and env is run.env else None
        if channel:
            env["LLAMA_WARDEN_RECLAIM"] = channel.path
        with run.server(binary, arguments, env) as server:
            asking = Asking(channel) if channel else None
            if asking:
                asking.start()
            for call in range(args.requests // 4):
                prompts = [tokens(call * 4 + slot, 40 + 150 * (call % 5)) for slot in range(4)]
                body = {**text_request(0, 1, args.output), "prompt": prompts}
                answer = server.complete(body)
                texts += [one["content"] for one in answer]
                if args.pause and call % 5 == 4:
                    time.sleep(args.pause)  # long enough for what is given back while idle
            if asking:
                asked.update(asking.stop())
            lines = server.warden_lines()
        return texts, lines, server.code

    plain, _, _ = answers(args.against, {})
    again, _, _ = answers(args.against, {})
    ours, lines, code = answers(args.server, run.env)
    same = lambda one, other: sum(a == b for a, b in zip(one, other))
    return {"requests": len(plain), "plain_equals_itself": same(plain, again), "equal": same(plain, ours),
            "distinct": len(set(plain)), "exit": code, "asked": asked, "lines": lines, "report": report(run.report)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["images", "prefill", "decode", "parallel"])
    parser.add_argument("--server", required=True)
    parser.add_argument("--against")
    parser.add_argument("--models", required=True)
    parser.add_argument("--model", default="llama.gguf")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--report", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle", type=float, default=3)
    parser.add_argument("--label", default="")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--flag", action="append", default=[])
    parser.add_argument("--pause", type=float, default=0)
    parser.add_argument("--reclaim", action="store_true")
    args = parser.parse_args()
    if args.what in ("decode", "parallel") and not args.against:
        parser.error(f"{args.what} needs --against")
    print(json.dumps({"what": args.what, "label": args.label, "env": args.env, **globals()[args.what](args)}))


if __name__ == "__main__":
    main()
