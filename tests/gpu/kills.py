"""What becomes of answers that a llama-server was in the middle of when it died, with real weights on a GPU.

    kills.py --warden LLAMA_WARDEN --server LLAMA_SERVER --model MODEL.gguf --out DIR [--seconds 600] [--clients 6] [--every 5,9]

Six clients ask over each route that generates, streamed, while the llama-server is killed with SIGKILL every 5 to 9 seconds. An answer
counts as in flight if its first token had arrived and its last had not when the process was killed. Such an answer either ends whole
(the process that follows continued it), or with an error event. Anything else counts as wrong: a status other than 200, a stream
without its end, JSON of a schema or a tool that does not parse although the answer says that it is complete.
Prints a row for each route and a summary as JSON. Exit code 0: no answer was wrong. Errors are counted and do not change the exit code.
"""
import argparse
import collections
import http.client
import json
import os
import pathlib
import random
import signal
import threading
import time

import update
import upgrade
from update import now, say

CONFIG = upgrade.CONFIG + 'on_death = "continue"\n'
TOPICS = ["the sea", "a mill by a river", "bread", "how rain forms", "a lighthouse", "bees", "the moon", "old trains", "a city at night", "tea"]
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}, "lines": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 6}},
          "required": ["title", "lines"]}
TOOL = {"name": "write_note", "description": "Stores a note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}


def requests(draws):
    """One request of each kind: its name, path and body."""
    text = f"Write a long text about {draws.choice(TOPICS)} and {draws.choice(TOPICS)}."
    turns = [{"role": "user", "content": text}]
    chat = {"model": "m", "messages": turns, "max_tokens": 400, "stream": True, "temperature": draws.choice([0, 0.8])}
    return [
        ("chat", "/v1/chat/completions", chat),
        ("chat, schema", "/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": SCHEMA}}}),
        ("chat, tools", "/v1/chat/completions", chat | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
        ("completions", "/v1/completions", {"model": "m", "prompt": text, "max_tokens": 400, "stream": True}),
        ("completion", "/completion", {"model": "m", "prompt": text, "n_predict": 400, "stream": True}),
        ("messages", "/v1/messages", {"model": "m", "messages": turns, "max_tokens": 400, "stream": True}),
        ("responses", "/v1/responses", {"model": "m", "input": text, "max_output_tokens": 400, "stream": True}),
    ]


def carried(value):
    """Text that one event carries, and why the answer ends if it says so."""
    text, end = "", None
    for choice in value.get("choices", []):
        delta = choice.get("delta", {})
        text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        text += "".join(call.get("function", {}).get("arguments", "") for call in delta.get("tool_calls") or [])
        end = choice.get("finish_reason") or end
    if isinstance(value.get("delta"), str):
        text += value["delta"]
    elif isinstance(value.get("delta"), dict):
        text += value["delta"].get("text", "") + value["delta"].get("partial_json", "") + value["delta"].get("thinking", "")
        end = value["delta"].get("stop_reason") or end
    if isinstance(value.get("content"), str) and "stop" in value:
        text += value["content"]
        end = "stop" if value["stop"] else end
    if value.get("type") in ("response.completed", "response.incomplete"):
        end = value["type"]
    return text, end


class Client(threading.Thread):
    """Asks over all routes in turn until it is over."""

    def __init__(self, number, port, over, done):
        super().__init__(daemon=True)
        self.number, self.port, self.over, self.done = number, port, over, done

    def run(self):
        draws, turn = random.Random(self.number), self.number
        while not self.over.is_set():
            kinds = requests(draws)
            name, path, body = kinds[turn % len(kinds)]
            turn += 1
            one = {"kind": name, "began": now(), "first": None, "status": None, "text": "", "end": None, "error": None, "wrong": None}
            try:
                self.ask(path, body, one)
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer is wrong
                one["wrong"] = repr(error)
            one["ended"] = now()
            self.done.append(one)

    def ask(self, path, body, one):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        one["status"] = answer.status
        if answer.status != 200:
            one["wrong"] = f"{answer.status}: {answer.read(300)!r}"
            return
        for line in answer:
            line = line.decode().rstrip()
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                continue
            value = json.loads(data)
            if value.get("error") or value.get("type") == "error":
                one["error"] = json.dumps(value)[:400]
                continue
            text, end = carried(value)
            if text and one["first"] is None:
                one["first"] = now()
            one["text"] += text
            one["end"] = end or one["end"]
        connection.close()
        if one["error"] is None and one["end"] is None:
            one["wrong"] = "a stream without its end"
        # A model without a template for tools may answer a tool's request in words: that ends with `stop`.
        complete = {"chat, schema": "stop", "chat, tools": "tool_calls"}.get(one["kind"])
        if one["error"] is None and complete and one["end"] == complete:
            json.loads(one["text"])


def servers(warden):
    return [backend["pid"] for model in warden.status()["models"] for backend in model.get("backends", [])
            if backend.get("pid") and backend.get("phase") in ("ready", "Ready")]


def main():
    args = update.ARGS
    args.out.mkdir(parents=True, exist_ok=True)
    warden = upgrade.Warden(args, CONFIG)
    warden.serve()
    over, done, deaths = threading.Event(), [], []
    clients = [Client(number, warden.port, over, done) for number in range(args.clients)]
    for client in clients:
        client.start()
    draws, until = random.Random(1), time.monotonic() + args.seconds
    least, most = (float(word) for word in args.every.split(","))
    while time.monotonic() < until:
        time.sleep(draws.uniform(least, most))
        for pid in servers(warden):
            # Before the kill: an answer may end within the same millisecond.
            deaths.append(now())
            os.kill(pid, signal.SIGKILL)
    over.set()
    for client in clients:
        client.join(150)
    rows = collections.defaultdict(collections.Counter)
    with open(args.out / "requests.jsonl", "w") as log:
        for one in done:
            row = rows[one["kind"]]
            row["requests"] += 1
            met = sum(1 for death in deaths if one["first"] is not None and one["first"] < death < one["ended"])
            row["in flight at a death"] += met > 0
            row["continued"] += met > 0 and not one["error"] and not one["wrong"]
            row["error"] += bool(one["error"])
            row["wrong"] += bool(one["wrong"])
            log.write(json.dumps(one | {"deaths": met, "text": one["text"][-400:]}) + "\n")
    total = sum(rows.values(), collections.Counter())
    for kind, row in sorted(rows.items()) + [("all", total)]:
        say(f"{kind:14} " + ", ".join(f"{name} {row[name]}" for name in ("requests", "in flight at a death", "continued", "error", "wrong")))
    warden.close()
    summary = {"deaths": len(deaths), "all": dict(total), "routes": {kind: dict(row) for kind, row in rows.items()}, "exit": warden.process.returncode,
               "errors": sorted({one["error"] for one in done if one["error"]})[:12], "wrong": [one["wrong"] for one in done if one["wrong"]][:12]}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True, type=pathlib.Path)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--flags", default="-c 8192 -np 4 -ngl 99")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", default="5,9", help="seconds between two kills, least and most")
    args = update.ARGS = parser.parse_args()
    args.out = args.out.resolve()
    raise SystemExit(main())
