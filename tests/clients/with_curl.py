"""curl, and what only curl asks for: old HTTP, bodies in chunks, `Expect`, and bytes as they are."""

import json
import subprocess

from common import BASE, MODEL, QUESTION, SAME, image, results, tell


def curl(path, *flags, body=None):
    """Status, headers but those of the connection, and the body."""
    if body is not None and not isinstance(body, str):
        body = json.dumps(body)
    flags = ["--silent", "--show-error", "--no-buffer", "--max-time", "60", "--dump-header", "/dev/stderr", *flags]
    if body is not None:
        flags += ["--data-binary", "@-", "--header", "Content-Type: application/json"]
    ran = subprocess.run(["curl", *flags, BASE + path], input=body, capture_output=True, text=True, check=True)
    # The last head: those before it are interim answers.
    head = [block for block in ran.stderr.replace("\r", "").split("\n\n") if block][-1].split("\n")
    headers = dict(line.lower().split(": ", 1) if ": " in line else (line.lower().rstrip(":"), "") for line in head[1:])
    return {"status": head[0].split()[1], "headers": headers, "body": parsed(ran.stdout)}


def parsed(text):
    if text.startswith(("data:", "event:", ":")):
        return [line if not line.startswith("data: {") else json.loads(line[6:]) for line in text.split("\n")]
    try:
        return json.loads(text)
    except ValueError:
        return text


ASK = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, **SAME}
STREAM = {**ASK, "stream": True}
CHAT = "/v1/chat/completions"
PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + image(7)}}]
MANY = [{"role": "user", "content": "word " * 40}] * 60

results["GET"] = curl("/props")["status"]
results["HTTP/1.0"] = curl(CHAT, "--http1.0", body=ASK)
results["HTTP/1.0, streamed"] = curl(CHAT, "--http1.0", body=STREAM)
results["HTTP/1.1"] = curl(CHAT, "--http1.1", body=ASK)
results["HTTP/1.1, streamed"] = curl(CHAT, "--http1.1", body=STREAM)
results["HTTP/1.1, an error"] = curl(CHAT, "--http1.1", body={"model": MODEL})
results["a body in chunks"] = curl(CHAT, "--header", "Transfer-Encoding: chunked", body=ASK)
results["Expect"] = curl(CHAT, "--header", "Expect: 100-continue", body=ASK)
results["Expect, a large body in chunks"] = curl(
    CHAT, "--header", "Expect: 100-continue", "--header", "Transfer-Encoding: chunked", body={**ASK, "padding": "x" * 3_000_000})
results["native completion"] = curl("/completion", body={"prompt": "once", "n_predict": 8, **SAME})
results["native completion, streamed"] = curl("/completion", body={"prompt": "once", "n_predict": 8, "stream": True, **SAME})
results["tokenize"] = curl("/tokenize", body={"content": "some words", "with_pieces": True})
results["detokenize"] = curl("/detokenize", body={"tokens": [300, 301, 302]})
results["apply-template"] = curl("/apply-template", body={"messages": QUESTION})
results["input_tokens"] = curl("/v1/chat/completions/input_tokens", body=ASK)
results["infill"] = curl("/infill", body={"input_prefix": "a", "input_suffix": "b", "n_predict": 4, **SAME})
results["slots"] = curl("/slots")["status"]
results["lora-adapters"] = curl("/lora-adapters")
results["an unknown field is kept"] = curl(CHAT, body={**ASK, "no_such_field": {"a": [1, 2.50, "\u00e9"]}})
results["error: bad JSON"] = curl(CHAT, body='{"model": "m", "messages": [')
results["error: bad JSON before the name"] = curl(CHAT, body='{"messages": [}')
results["error: no body"] = curl(CHAT, body="")
results["error: no messages"] = curl(CHAT, body={"model": MODEL})
results["error: messages of the wrong type"] = curl(CHAT, body={**ASK, "messages": 7})
results["error: too long for the context"] = curl(CHAT, body={**ASK, "messages": MANY * 10})
results["error: too long for the context, streamed"] = curl(CHAT, body={**STREAM, "messages": MANY * 10})
results["error: no such route"] = curl("/v1/no/such/route")
results["error: no such route, POST"] = curl("/v1/no/such/route", body=ASK)
results["error: wrong method"] = curl("/completion")
results["error: not enabled"] = curl("/v1/rerank", body={"model": MODEL, "query": "a", "documents": ["b"]})
results["error: bad grammar"] = curl(CHAT, body={**ASK, "grammar": "root ::= ((("})
results["an image, if the server can"] = curl(CHAT, body={**ASK, "messages": [{"role": "user", "content": PICTURE}]})
tell()
