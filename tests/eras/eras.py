#!/usr/bin/env python3
"""Builds, verifies and serves llama-server from many revisions and forks, and prints a table of it for docs/compatibility.md:

    tests/eras/eras.py LLAMA_WARDEN OUT [--together N] [--jobs N] NAME=SOURCE...

LLAMA_WARDEN is the program, OUT is a folder for the table, results.jsonl and the logs, and each SOURCE is what
`llama-warden build --source` takes (a folder or an archive), or the URL of a repository with a revision (`URL#REV`, for
`build --git`). For each of them, on the CPU:

    build -> serve -> chat, whole and streamed -> embeddings -> two replacements while eight clients ask -> stop

Builds go to the usual folders (XDG_CACHE_HOME, XDG_DATA_HOME). A source that fails is a row with the reason; the others go on.
The exit code is 1 then. Needs what a build needs, and python3.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback

CLIENTS = 8
REQUESTS = 240
TOKENS = 12
READY = 120
LINES = 12


class Trouble(Exception):
    """What went wrong, in words for the table."""


def run(command, log, limit, **more):
    with open(log, "ab") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=limit, check=False, **more)
    return done.returncode, done.stdout.decode(errors="replace")


def tail(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return " / ".join(line.strip() for line in file.read().splitlines()[-LINES:] if line.strip())
    except OSError:
        return ""


def build(args, source, folder):
    where = ["--git" if "://" in source else "--source", source]
    command = [args.warden, "build", *where, "--backend", args.backend, "--json"]
    command += ["--arch", args.arch] if args.arch else []
    command += ["--jobs", str(args.jobs)] if args.jobs else []
    log = os.path.join(folder, "build.log")
    begun = time.monotonic()
    plain = False
    code, out = run(command, log, args.build_limit)
    if code == 3:
        plain = True
        code, out = run([*command, "--plain"], log, args.build_limit)
    if code != 0:
        raise Trouble(f"build: exit {code}: {tail(log)[-300:]}")
    with open(os.path.join(folder, "build.json"), "w", encoding="utf-8") as file:
        file.write(out)
    built = json.loads(out)
    provenance = built["provenance"]
    return {
        "id": built["id"],
        "binary": built["binary"],
        "seconds": round(time.monotonic() - begun),
        "compile": round(provenance["timings"]["compile"]),
        "plain": plain,
        "fixes": provenance["fixes"],
        "number": provenance["plan"]["source"]["revision"]["build_number"],
        "commit": (provenance["plan"]["source"]["revision"]["commit"] or "")[:9],
        "measured": provenance["verified"].get("measured", {}),
        "checks": [check["name"] for check in provenance["verified"]["checks"]],
    }


class Server:
    """`llama-warden serve` with a model for words and one for vectors."""

    def __init__(self, args, built, folder, models):
        self.args, self.folder = args, folder
        self.log = os.path.join(folder, "serve.log")
        self.config = os.path.join(folder, "warden.toml")
        flags = json.dumps(["-np", "2", "-c", "4096", "-t", "1", *args.flags])
        # Some builds do not start with the mean; their check says so.
        pooling = "last" if "embedding-last" in built["checks"] else "mean"
        short = f"/tmp/lw-eras-{os.getpid()}-{os.path.basename(folder)[:20]}"
        os.makedirs(short, mode=0o700, exist_ok=True)
        self.short = short
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(
                f"server.port = 0\nadmin.socket = '{short}/admin.sock'\npaths.runtime_dir = '{short}/run'\n"
                f"paths.state_dir = '{folder}/state'\n"
                f"[models.chat]\nbuild = '{built['id']}'\nmodel = '{models}/chat.gguf'\nargs = {flags}\npreload = true\n"
                f"[models.embed]\nbuild = '{built['id']}'\nmodel = '{models}/chat.gguf'\npreload = true\n"
                f"args = {json.dumps(['-c', '512', '-t', '1', '--embeddings', '--pooling', pooling, *args.flags])}\n"
            )
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen([args.warden, "serve", "--config", self.config], stdout=out, stderr=out)
        self.port = self.until(self.address, READY, "it does not listen")

    def until(self, ask, limit, what):
        end = time.monotonic() + limit
        while time.monotonic() < end:
            try:
                found = ask()
            except (OSError, http.client.HTTPException):
                found = None
            if found:
                return found
            if self.process.poll() is not None:
                raise Trouble(f"serve: ended with {self.process.returncode}: {tail(self.log)[-300:]}")
            time.sleep(0.05)
        raise Trouble(f"serve: {what} within {limit} s: {tail(self.log)[-300:]}")

    def address(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)\n", file.read())
        return int(found.group(1)) if found else None

    def ask(self, path, body=None, limit=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def restart(self, log):
        code, out = run([self.args.warden, "restart", "chat", "--admin-socket", f"{self.short}/admin.sock"], log, READY)
        if code != 0:
            raise Trouble(f"restart: exit {code}: {out} {tail(log)[-200:]}")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def chat(server, words, stream):
    body = {
        "model": "chat", "messages": [{"role": "user", "content": words}], "max_tokens": TOKENS, "temperature": 0,
        "stream": stream,
    }
    status, text = server.ask("/v1/chat/completions", body)
    if status != 200:
        raise Trouble(f"chat: {status}: {text[:200]}")
    if not stream:
        answer = json.loads(text)
        words, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        if not words.strip() or not reason or answer["usage"]["completion_tokens"] != TOKENS:
            raise Trouble(f"chat: not whole: {text[:200]}")
        return words
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise Trouble(f"stream: not whole: {text[-200:]}")
    choices = [choice for event in events[:-1] for choice in json.loads(event).get("choices", [])]
    words = "".join(choice["delta"].get("content") or "" for choice in choices)
    if not words.strip() or not any(choice.get("finish_reason") for choice in choices):
        raise Trouble(f"stream: without words or an end: {text[-200:]}")
    return words


def embeddings(server):
    status, text = server.ask("/v1/embeddings", {"model": "embed", "input": "hello"})
    if status != 200:
        raise Trouble(f"embeddings: {status}: {text[:200]}")
    if not any(json.loads(text)["data"][0]["embedding"]):
        raise Trouble("embeddings: all zero")


def replaced(server, folder):
    """Two replacements while clients ask; every answer has to be whole."""
    numbers, failed, lock = iter(range(REQUESTS)), [], threading.Lock()
    served, enough = [0], threading.Event()

    def client():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                chat(server, f"request {number}", number % 2 == 0)
            except Exception as error:  # every way to fail counts
                with lock:
                    failed.append(f"{number}: {error}")
            with lock:
                served[0] += 1
                if served[0] >= REQUESTS // 8:
                    enough.set()

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    enough.wait(READY)
    restarts = 0
    try:
        for _ in range(2):
            server.restart(os.path.join(folder, "restart.log"))
            restarts += 1
    finally:
        for one in clients:
            one.join()
    if failed:
        raise Trouble(f"replacement: {len(failed)} of {REQUESTS} failed: {failed[0][:200]}")
    return restarts


def listening(server):
    """What the chat model's process listens on, as the kernel shows its command line."""
    children = subprocess.run(["ps", "-eo", "ppid,args"], stdout=subprocess.PIPE, check=False).stdout.decode(errors="replace")
    own = [line for line in children.splitlines() if line.split(None, 1)[:1] == [str(server.process.pid)] and "--host" in line]
    return "socket" if own and ".sock" in own[0] else "port" if own else "?"


def one(args, name, source, models):
    folder = os.path.join(args.out, name)
    os.makedirs(folder, exist_ok=True)
    row = {"name": name}
    server = None
    try:
        row.update(build(args, source, folder))
        server = Server(args, row, folder, models)
        for path in ("chat", "embed"):
            server.until(lambda: server.ask(f"/props?model={path}")[0] == 200, READY, f"{path} is not ready")
        whole, streamed = chat(server, "hello", False), chat(server, "hello", True)
        row["chat"], row["stream"], row["same"] = True, True, whole == streamed
        embeddings(server)
        row["embeddings"] = True
        row["page"] = server.ask("/")[0]
        row["listens"] = listening(server)
        row["replacements"] = replaced(server, folder)
        row["exit"] = server.stop()
        if row["exit"] != 0:
            raise Trouble(f"serve: ended with {row['exit']}")
    except Trouble as error:
        row["error"] = str(error)
    except subprocess.TimeoutExpired as error:
        row["error"] = f"took longer than {error.timeout} s: {error.cmd[1]}"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    finally:
        if server:
            server.stop()
            subprocess.run(["rm", "-rf", server.short], check=False)
    with open(os.path.join(args.out, "results.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{time.strftime('%T')} {name}: {row.get('error', 'well')}", flush=True)
    return row


def table(rows):
    head = ["source", "build", "built", "fixes", "listens on", "head of a stream", "HTTP threads", "`/`", "chat", "streamed",
            "embeddings", f"{REQUESTS} requests, two replacements"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    heads = {"before_first_token": "before the first token", "after_first_token": "with the first token"}
    threads = {"fixed": "fixed", "on_demand": "on demand"}
    yes = lambda row, key: "yes" if row.get(key) else "no"
    for row in rows:
        measured = row.get("measured", {})
        number = f"b{row['number']}, " if row.get("number") else ""
        built = f"{row['seconds']} s" if "seconds" in row else "no"
        cells = [row["name"], f"{number}{row.get('commit', '')}", built, ", ".join(row.get("fixes", [])) or "none",
                 row.get("listens", ""), heads.get(measured.get("stream_head"), "not known"),
                 threads.get(measured.get("http_threads"), "not known"), str(row.get("page", "")),
                 yes(row, "chat"), yes(row, "stream"), yes(row, "embeddings"),
                 "none failed" if row.get("replacements") == 2 else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{row['name']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("warden")
    parser.add_argument("out")
    parser.add_argument("sources", nargs="+", metavar="NAME=SOURCE")
    parser.add_argument("--together", type=int, default=1, help="sources at a time")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at a time for each of them")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--arch", default="", help="as `build --arch` takes it")
    parser.add_argument("--flags", default="", help="more flags for llama-server, separated by blanks")
    parser.add_argument("--build-limit", type=float, default=3600, help="seconds that a build may take")
    args = parser.parse_args()
    args.warden, args.out, args.flags = os.path.abspath(args.warden), os.path.abspath(args.out), args.flags.split()
    models = os.path.join(args.out, "models")
    os.makedirs(models, exist_ok=True)
    subprocess.run([args.warden, "sample-model", "-o", f"{models}/chat.gguf"], check=True, stdout=subprocess.DEVNULL)
    sources = [source.split("=", 1) for source in args.sources]
    with concurrent.futures.ThreadPoolExecutor(args.together) as pool:
        rows = list(pool.map(lambda source: one(args, *source, models), sources))
    text = table(rows)
    with open(os.path.join(args.out, "table.md"), "w", encoding="utf-8") as file:
        file.write(text)
    print(text)
    sys.exit(1 if any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
