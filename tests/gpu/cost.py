#!/usr/bin/env python3
"""What it costs to be traced, on whatever the server runs on:

    tests/gpu/cost.py SERVER TRACER [FLAG...]

Two llama-servers with the same flags, one under LD_PRELOAD=TRACER (target/release/libwarden_tracer.so of `cargo build
--release -p warden-tracer`), are asked in turn. Prints one line of JSON: medians of the tokens a second and of the
processor time of a token, and the medians of the ratios of neighbouring answers.
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROUNDS = int(os.environ.get("ROUNDS", "20"))
TOKENS = int(os.environ.get("TOKENS", "256"))


class Server:
    def __init__(self, server, flags, folder, name, tracer=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        env = dict(os.environ)
        if tracer:
            env |= {"LD_PRELOAD": os.path.abspath(tracer), "LLAMA_WARDEN_TRACE": folder}
        with open(os.path.join(folder, name), "w") as log:
            command = [server, *flags, "--host", "127.0.0.1", "--port", self.url.rsplit(":", 1)[1]]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        sys.exit("a server did not get ready")

    def ran(self):
        """Nanoseconds of a processor so far."""
        tasks, total = f"/proc/{self.process.pid}/task", 0
        for thread in os.listdir(tasks):
            with open(f"{tasks}/{thread}/schedstat") as told:
                total += int(told.read().split()[0])
        return total

    def ask(self, seed):
        body = {"prompt": f"tell me about {seed}", "n_predict": TOKENS, "seed": seed, "cache_prompt": False, "ignore_eos": True}
        request = urllib.request.Request(self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        before = self.ran()
        with urllib.request.urlopen(request, timeout=300) as answer:
            speed = json.load(answer)["timings"]["predicted_per_second"]
        return speed, (self.ran() - before) / 1000 / TOKENS


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    server, tracer, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        both = [Server(server, flags, folder, "plain"), Server(server, flags, folder, "traced", tracer)]
        try:
            for one in both:
                one.wait()
                one.ask(0)
            if not any(name.endswith(".trace") for name in os.listdir(folder)):
                sys.exit("the tracer was not loaded")
            rounds = []
            for seed in range(1, ROUNDS + 1):
                order = [0, 1] if seed % 2 else [1, 0]
                costs = {which: both[which].ask(seed) for which in order}
                rounds.append((costs[0], costs[1]))
        finally:
            for one in both:
                one.process.kill()
                one.process.wait()
    found = {}
    for place, name in enumerate(["tokens_per_second", "processor_us_per_token"]):
        found[name] = round(statistics.median(plain[place] for plain, _ in rounds), 2)
        found[name + "_traced"] = round(statistics.median(traced[place] for _, traced in rounds), 2)
        found[name + "_ratio"] = round(statistics.median(traced[place] / plain[place] for plain, traced in rounds), 4)
    print(json.dumps(found))


main()
