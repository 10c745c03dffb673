"""An HTTP server that is no llama-server.

    server.py ADDRESS [--threads] [--leak KIB] [--until FILE] [--fork] [--elsewhere] [--exit CODE]

ADDRESS is a port of 127.0.0.1, or the path of a Unix socket. Without --threads, one thread serves one
connection at a time. --until answers 503 to each GET until the file exists, and
creates FILE.asked.
"""

import json
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler

address, flags = sys.argv[1], sys.argv[2:]


def value(flag):
    return flags[flags.index(flag) + 1] if flag in flags else None


kept = []
served = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def address_string(self):
        return "client"

    def answer(self, status, body, kind="application/json"):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if value("--until") and not os.path.exists(value("--until")):
            self.answer(503, {"error": "loading"})
            open(value("--until") + ".asked", "a").close()
        elif self.path.startswith("/voices"):
            self.answer(200, {"voices": ["a"], "path": self.path})
        else:
            self.answer(404, {"error": "no such path"})

    def do_POST(self):
        global served
        served += 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if value("--leak"):
            kept.append(os.urandom(1024) * int(value("--leak")))
        if self.path == "/sleep":
            time.sleep(float(json.loads(body)["seconds"]))
        if self.path == "/v1/chat/completions":
            usage = {"prompt_tokens": 5, "completion_tokens": 7}
            choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
            self.answer(200, {"object": "chat.completion", "model": "x", "choices": [choice], "usage": usage})
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for number in range(3):
                self.wfile.write(f"data: {number}\n\n".encode())
                self.wfile.flush()
            self.close_connection = True
        elif self.path == "/v1/audio/speech":
            self.answer(200, b"RIFF" + bytes(range(256)) * 64, "audio/wav")
        else:
            told = {"path": self.path, "bytes": len(body), "pid": os.getpid(), "served": served}
            self.answer(200, {**told, "form": body.decode("latin-1")[:400]})

    do_PUT = do_POST


class Tcp(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 64


class Unix(socketserver.UnixStreamServer):
    request_queue_size = 64

    def get_request(self):
        connection, _ = super().get_request()
        return connection, ("client", 0)


print("the stand-in starts", flush=True)
if value("--exit"):
    print("no such voice: bella", flush=True)
    sys.exit(int(value("--exit")))
if "--fork" in flags:
    if os.fork():
        os._exit(0)
    os.setsid()
port = 0 if "--elsewhere" in flags else address
base, where = (Unix, address) if address.startswith("/") else (Tcp, ("127.0.0.1", int(port)))
if "--threads" in flags:
    base = type("Threaded", (socketserver.ThreadingMixIn, base), {"daemon_threads": True})
base(where, Handler).serve_forever()
