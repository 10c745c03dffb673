"""`llama-warden update` and `rollback` under load, with real builds on a GPU. docs/evidence/updates.md has the results.

    update.py --warden LLAMA_WARDEN --model MODEL.gguf --out DIR --first="--source OLD.tar.gz" --update=--sdist
              [--build="--backend cuda -D LLAMA_BUILD_UI=OFF"] [--clients 8] [--canary 240s]

Builds the older llama-server, serves a model with it, has clients ask it without a pause, half of them streamed, runs
`llama-warden update` with the words given, and then `llama-warden rollback`, while they ask on. An answer that is not whole
counts as failed: any status but 200, less or more tokens than were asked for, a stream without a reason for its end or `[DONE]`.
Where pip finds source archives is as usual (PIP_FIND_LINKS, PIP_NO_INDEX, ...). DIR gets the logs, one line of JSON for each
request, and a summary, which is printed too. Exit code 0: updated, rolled back, and no request failed. Else 1.
"""
import argparse
import atexit
import http.client
import json
import os
import pathlib
import random
import re
import shlex
import signal
import statistics
import subprocess
import threading
import time

CONFIG = """
server.port = 0
sensors.interval = "1s"
{internal}
[models.m]
model = "{model}"
args = {args}
preload = true
on_death = "continue"
"""
WORDS = "a river runs by the old mill and nobody counts what it takes along but the miller who sleeps".split()
BEGAN = time.monotonic()


def now():
    return round(time.monotonic() - BEGAN, 3)


class Warden:
    """An instance with a home of its own; gone when this program ends."""

    def __init__(self, args):
        self.program, self.out = os.path.abspath(args.warden), args.out
        self.home = args.out / "home"
        self.env = dict(os.environ)
        for name in ("CONFIG", "DATA", "STATE", "CACHE", "RUNTIME"):
            folder = self.home / name.lower()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.env[f"XDG_{name}_HOME" if name != "RUNTIME" else "XDG_RUNTIME_DIR"] = str(folder)
        self.config = self.home / "warden.toml"
        internal = f'internal.update.canary = "{args.canary}"' if args.canary else ""
        self.config.write_text(CONFIG.format(model=args.model.resolve(), args=json.dumps(shlex.split(args.flags)), internal=internal))
        self.process = None

    def run(self, name, *words):
        """Runs a command to its end; its exit code, what it printed, and when it said what."""
        say(f"{name}: llama-warden {' '.join(words)}")
        began, said = now(), []
        with open(self.out / f"{name}.err", "w") as log, open(self.out / f"{name}.out", "w+") as printed:
            process = subprocess.Popen([self.program, *words], env=self.env, stdout=printed, stderr=subprocess.PIPE, text=True)
            for line in process.stderr:
                said.append((now(), line.rstrip()))
                log.write(f"{now():9.3f} {line}")
                log.flush()
            code = process.wait()
            printed.seek(0)
            text = printed.read()
        say(f"{name}: exit code {code} after {now() - began:.1f} s")
        return {"code": code, "began": began, "ended": now(), "printed": text, "said": said}

    def serve(self):
        self.log = open(self.out / "serve.log", "w")
        command = [self.program, "serve", "--config", str(self.config)]
        self.process = subprocess.Popen(command, env=self.env, stdout=self.log, stderr=subprocess.STDOUT)
        atexit.register(self.close)
        self.port = int(self.wait(lambda: re.search(r"listening on http://[\d.]+:(\d+)", self.said()), 60).group(1))
        self.wait(lambda: all(model["state"] == "loaded" for model in self.status()["models"]), 240)

    def said(self):
        return (self.out / "serve.log").read_text()

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

    def ledger(self):
        found = list(self.home.rglob("ledger.jsonl"))
        return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []

    def close(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


class Client(threading.Thread):
    """Asks until it is over: every other answer streamed, 8 to 48 tokens; conversations of up to three turns, which fit into 4,096 tokens."""

    def __init__(self, number, port, over, done):
        super().__init__(daemon=True)
        self.number, self.port, self.over, self.done = number, port, over, done

    def run(self):
        draws, count, turns = random.Random(self.number), 0, []
        while not self.over.is_set():
            length = draws.choice([10, 20, 20, 40, 80])
            text = f"{self.number}.{count}: " + " ".join(draws.choice(WORDS) for _ in range(length))
            turns = turns + [{"role": "assistant", "content": "so it is"}] if count % 3 and len(turns) < 6 else []
            turns = turns + [{"role": "user", "content": text}]
            tokens, streamed, began = draws.choice([8, 16, 32, 48]), (count + self.number) % 2 == 0, now()
            wrong = None
            try:
                self.ask(turns, tokens, streamed)
            except Exception as error:  # noqa: BLE001 - whatever it is, the request failed
                wrong = repr(error)
            self.done.append({"client": self.number, "request": count, "began": began, "seconds": round(now() - began, 3),
                              "streamed": streamed, "tokens": tokens, "wrong": wrong})
            count += 1
            time.sleep(draws.random() * 0.05)

    def ask(self, turns, tokens, streamed):
        body = {"model": "m", "messages": turns, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": streamed}
        if streamed:
            body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()  # fails if the body is cut off
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text[:300]}")
        if not streamed:
            value = json.loads(text)
            finish, got = value["choices"][0]["finish_reason"], value["usage"]["completion_tokens"]
        else:
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                raise RuntimeError(f"a stream without its end: {text[-300:]}")
            values = [json.loads(event) for event in events[:-1]]
            if bad := [value for value in values if "error" in value]:
                raise RuntimeError(f"an error in a stream: {bad[0]}")
            finish = [c["finish_reason"] for value in values for c in value.get("choices", []) if c.get("finish_reason")]
            finish = finish[0] if len(finish) == 1 else f"{len(finish)} of them"
            got = next((value["usage"]["completion_tokens"] for value in reversed(values) if value.get("usage")), None)
        if finish != "length" or got != tokens:
            raise RuntimeError(f"finish_reason {finish}, {got} of {tokens} tokens: {text[-300:]}")


class Watch(threading.Thread):
    """Which programs the model's processes are of, whenever that changes."""

    def __init__(self, warden, over):
        super().__init__(daemon=True)
        self.warden, self.over, self.seen = warden, over, []

    def run(self):
        while not self.over.wait(0.25):
            try:
                models = self.warden.status()["models"]
                canary = [model["canary"]["state"] for model in models if model.get("canary")]
                here = [[backend.get("phase"), pathlib.Path(backend["program"]).parent.name, backend.get("pid")]
                        for model in models for backend in model.get("backends", []) if backend.get("program")]
            except Exception:  # noqa: BLE001 - one look less
                continue
            if not self.seen or self.seen[-1]["processes"] != here:
                self.seen.append({"at": now(), "processes": here, "canary": canary})


def say(text):
    line = f"{now():8.1f} {text}"
    print(line, flush=True)
    with open(ARGS.out / "progress", "a") as progress:
        progress.write(line + "\n")


def part(done, begin, end):
    """What was asked from one moment to another."""
    own = sorted(one["seconds"] for one in done if begin <= one["began"] < end)
    at = lambda share: own[min(len(own) - 1, int(share * len(own)))] if own else None
    return {"requests": len(own), "failed": sum(1 for one in done if one["wrong"] and begin <= one["began"] < end),
            "p50": at(0.5), "p99": at(0.99), "longest": own[-1] if own else None, "seconds": round(end - begin, 1)}


def phases(ran):
    """Begin and end of each part of an update, by what it said."""
    marks = [("asking and building", ran["began"])]
    for when, line in ran["said"]:
        for name, pattern in (("canary", r"^update: .*canary"), ("bringing in", r"switches to the build"),
                              ("proof", r"against|proof|round 1")):
            if re.search(pattern, line) and name not in [mark[0] for mark in marks]:
                marks.append((name, when))
    ends = [when for _, when in marks[1:]] + [ran["ended"]]
    return [(name, begin, end) for (name, begin), end in zip(marks, ends)]


def main():
    ARGS.out.mkdir(parents=True, exist_ok=True)
    warden = Warden(ARGS)
    first = warden.run("build", "build", *shlex.split(ARGS.first), *shlex.split(ARGS.build), "--json")
    if first["code"]:
        raise SystemExit(f"the older build failed: {first['said'][-5:]}")
    warden.serve()
    say("serving")
    over, done = threading.Event(), []
    clients = [Client(number, warden.port, over, done) for number in range(ARGS.clients)]
    watch = Watch(warden, over)
    for thread in (*clients, watch):
        thread.start()
    loaded = now()
    time.sleep(20)
    say(f"{len(done)} requests so far")
    config = ["--config", str(warden.config)]
    updated = warden.run("update", "update", "--json", *config, *shlex.split(ARGS.update))
    time.sleep(10)
    say(f"{len(done)} requests so far")
    before = now()
    back = warden.run("rollback", "rollback", *config)
    time.sleep(20)
    after = now()
    over.set()
    for client in clients:
        client.join()
    # What was taken back is not brought in again by itself.
    again = warden.run("again", "update", "--json", *config, *shlex.split(ARGS.update))
    listed = warden.run("list", "builds", "list")
    report = json.loads(updated["printed"] or "{}")
    parts = {"before": part(done, loaded, updated["began"]), "the whole update": part(done, updated["began"], updated["ended"]),
             **{name: part(done, begin, end) for name, begin, end in phases(updated)},
             "the way back": part(done, before, back["ended"]), "behind it": part(done, back["ended"], after)}
    failed = [one for one in done if one["wrong"]]
    keep = ("model", "reason", "mode", "from", "to", "cut", "gap_ms", "drained", "drain_ms", "start_ms", "exit_ms", "ours_ms", "kind", "verdict")
    summary = {
        "requests": len(done), "streamed": sum(one["streamed"] for one in done), "failed": len(failed), "failures": failed[:20],
        "tokens": sum(one["tokens"] for one in done if not one["wrong"]),
        "longest": max((one["seconds"] for one in done), default=None),
        "median": statistics.median([one["seconds"] for one in done]) if done else None, "parts": parts,
        "codes": {"build": first["code"], "update": updated["code"], "rollback": back["code"], "again": again["code"]},
        "build_seconds": round(first["ended"] - first["began"], 1), "update_seconds": round(updated["ended"] - updated["began"], 1),
        "rollback_seconds": round(back["ended"] - back["began"], 1),
        "outcome": report.get("outcome"), "old": report.get("old"), "new": report.get("new"), "notes": report.get("notes"),
        "reasons": report.get("reasons"), "verdict": (report.get("proof") or {}).get("verdict"),
        "processes": watch.seen, "ledger": [{key: entry.get(key) for key in keep} for entry in warden.ledger()],
        "builds": listed["printed"],
    }
    (ARGS.out / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in done))
    (ARGS.out / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in warden.ledger()))
    (ARGS.out / "summary.json").write_text(json.dumps(summary, indent=1))
    warden.close()
    print(json.dumps(summary))
    say("done")
    return 0 if not failed and not any((updated["code"], back["code"])) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--first", required=True, help="what the older build is made of, as words for `llama-warden build`")
    parser.add_argument("--update", required=True, help="words for `llama-warden update`")
    parser.add_argument("--build", default="--backend cuda -D LLAMA_BUILD_UI=OFF", help="more words for `llama-warden build`")
    parser.add_argument("--flags", default="-c 32768 -np 8 -ngl 99 -fa on", help="for the llama-server that serves")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--canary", help="how long a canary is waited for, if not for as long as it takes")
    ARGS = parser.parse_args()
    ARGS.out = ARGS.out.resolve()
    raise SystemExit(main())
