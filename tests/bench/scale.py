"""How llama-warden, nginx and haproxy grow with cores, models and connections. docs/performance.md has a table of it.

    scale.py --warden LLAMA_WARDEN --mock MOCK_LLAMA [--cores 2,16] [--models 1,10,100] [--connections 1,64,1000,10000]
             [--seconds 3] [--rounds 1] [--nginx nginx] [--haproxy haproxy] [--wrk wrk] [--set KEY=VALUE ...]

The proxy gets the first N cores of this machine; wrk and the upstreams (mock-llama, a process for each model) get the others.
So 16 cores need a machine of 32, and 10,000 connections need 20,200 open files (`ulimit -Hn`). Each client sends a request as
soon as it has the answer to the last one. Requests name the models in turn. Only llama-warden reads these names; the others
spread their requests over the same upstreams. Prints a table: requests a second, p99 in ms, and PSS in MiB under this load,
without the upstreams. A peer that is not installed is left out.
"""
import argparse
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time

OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
# More connections than are measured; each needs two files of a proxy.
FAR = min(30_000, OPEN_FILES // 2 - 100)
LUA = """
local bodies, at = {}, 0
function init(args)
  for number = 1, tonumber(args[1]) do
    local body = string.format('{"model":"m%d","messages":[{"role":"user","content":"Say why a proxy should not cost more than it must."}]}', number)
    bodies[number] = wrk.format("POST", "/v1/chat/completions", {["Content-Type"] = "application/json"}, body)
  end
end
function request()
  at = at % #bodies + 1
  return bodies[at]
end
"""


def free_ports(count):
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def until(what, is_so, process, log):
    end = time.monotonic() + 60
    while not is_so():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{what}: not so after 60 s, or the program has ended. It said:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


def status_of(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            body = b'{"model":"m1","messages":[]}'
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode() + body)
            return int(client.recv(64).split(b" ")[1])
    except (OSError, IndexError, ValueError):
        return 0


class Stage:
    """Programs with a folder of their own, ended with it."""

    def __init__(self, args, cores, models):
        self.args, self.models, self.started = args, models, []
        all_cores = sorted(os.sched_getaffinity(0))
        self.proxy_cores, self.load_cores = all_cores[:cores], all_cores[cores:]
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="scale-", dir="/dev/shm"))
        self.mock_threads = max(1, len(self.load_cores) // 2 // models)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder)

    def start(self, words, cores, **env):
        self.last_log = self.folder / f"{len(self.started)}.log"
        log = self.last_log.open("w")
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *map(str, words)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **env}, cwd=self.folder)
        self.started.append(process)
        return process

    def mocks(self):
        ports = free_ports(self.models)
        for port in ports:
            self.start([self.args.mock, "--host", "127.0.0.1", "--port", port], self.load_cores, MOCK_LLAMA_THREADS=str(self.mock_threads))
        return ports

    def nginx(self, port):
        servers = " ".join(f"server 127.0.0.1:{mock};" for mock in self.mocks())
        config = self.folder / "nginx.conf"
        config.write_text(f"""
worker_processes {len(self.proxy_cores)}; daemon off; user root; pid {self.folder}/pid; error_log {self.folder}/error.log; worker_rlimit_nofile {OPEN_FILES};
events {{ worker_connections {FAR}; }}
http {{
  access_log {self.folder}/access.log;
  client_body_temp_path {self.folder}/b; proxy_temp_path {self.folder}/p; fastcgi_temp_path {self.folder}/f; uwsgi_temp_path {self.folder}/u; scgi_temp_path {self.folder}/s;
  keepalive_requests 1000000000; tcp_nodelay on;
  upstream mocks {{ {servers} keepalive {FAR}; keepalive_requests 1000000000; }}
  server {{ listen {port} reuseport backlog=16384; location / {{
    proxy_pass http://mocks; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_request_buffering off; }} }}
}}
""")
        return self.start([self.args.nginx, "-p", self.folder, "-c", config], self.proxy_cores)

    def haproxy(self, port):
        servers = "\n".join(f"  server m{mock} 127.0.0.1:{mock} pool-max-conn {FAR}" for mock in self.mocks())
        config = self.folder / "haproxy.cfg"
        config.write_text(f"""
global
  maxconn {FAR}
  nbthread {len(self.proxy_cores)}
  log stdout format raw local0
defaults
  mode http
  log global
  option httplog
  option http-keep-alive
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port} backlog 16384
  default_backend mocks
backend mocks
{servers}
""")
        return self.start([self.args.haproxy, "-db", "-f", config], self.proxy_cores)

    def warden(self, port):
        model = self.folder / "model.gguf"
        model.write_bytes(b"GGUF")
        config = self.folder / "warden.toml"
        config.write_text(f"""
server.port = {port}
server.threads = {len(self.proxy_cores)}
server.connections = {FAR}
server.connections_per_peer = {FAR}
log.access = "{self.folder}/access.log"
admin.socket = "{self.folder}/admin.sock"
""" + "".join(f"""
[models.m{number}]
binary = "{os.path.abspath(self.args.mock)}"
model = "{model}"
args = ["-np", "{FAR}", "--metrics"]
max_in_flight = {FAR}
preload = true
env = {{ MOCK_LLAMA_CPU = "{self.load_cores[0]}-{self.load_cores[-1]}", MOCK_LLAMA_THREADS = "{self.mock_threads}" }}
""" for number in range(1, self.models + 1)))
        (self.folder / "run").mkdir(mode=0o700)
        homes = {f"XDG_{name}_HOME": str(self.folder / name) for name in ("CONFIG", "DATA", "STATE", "CACHE")}
        self.env = {**os.environ, **homes, "XDG_RUNTIME_DIR": str(self.folder / "run"), "HOME": str(self.folder)}
        sets = [word for key in self.args.set for word in ("--set", key)]
        process = self.start(
            [self.args.warden, "serve", "--config", config, *sets, "--set", f"internal.upstream.idle_connections={FAR}", "--set", f"internal.upstream.idle_connections_unknown={FAR}"],
            self.proxy_cores, **self.env)
        until("all models of llama-warden are ready", lambda: self.ready_models() == self.models, process, self.last_log)
        # It asks an unknown binary how it behaves, once, for some seconds.
        until("llama-warden has measured the mock", lambda: "measured: " in self.last_log.read_text(), process, self.last_log)
        return process

    def ready_models(self):
        words = [self.args.warden, "status", "--json", "--config", str(self.folder / "warden.toml")]
        answer = subprocess.run(words, env=self.env, capture_output=True, text=True)
        try:
            models = json.loads(answer.stdout)["fleet"]["models"]
        except (ValueError, KeyError):
            return 0
        return sum(model["state"] == "loaded" for model in models)


def family(pid, not_named):
    """The process and its descendants, without the upstreams."""
    found = [pid]
    for process in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = re.match(r"\d+ \((.*)\) \S+ (\d+)", process.read_text()).groups()
        except (OSError, AttributeError):
            continue
        if int(rest) == pid and name != not_named:
            found.append(int(process.parent.name))
    return found


def pss_mib(pids):
    total = 0
    for pid in pids:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(re.search(r"^Pss:\s+(\d+)", text, re.M).group(1))
    return total / 1024


def milliseconds(text):
    found = re.match(r"([\d.]+)(us|ms|s|m)", text)
    if not found:  # wrk says "-nan" if nothing was answered in time
        return float("nan")
    number, unit = found.groups()
    return float(number) * {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000}[unit]


def measure(args, stage, process, port, connections, mock_name):
    script = stage.folder / "requests.lua"
    script.write_text(LUA)
    threads = max(1, min(connections, len(stage.load_cores) // 2))
    words = ["taskset", "-c", ",".join(map(str, stage.load_cores)), args.wrk, "-t", threads, "-c", connections, "-d", f"{args.seconds}s",
             "--timeout", "30s", "--latency", "-s", script, f"http://127.0.0.1:{port}/", "--", stage.models]
    load = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(args.seconds * 0.7)
    memory = pss_mib(family(process.pid, mock_name))
    text, _ = load.communicate()
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    if not rate:
        raise SystemExit(f"wrk said:\n{text}")
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    errors = re.search(r"Socket errors: (.*)", text)
    return {
        "rate": float(rate.group(1)),
        "p99": milliseconds(re.search(r"99%\s+(\S+)", text).group(1)),
        "pss": memory,
        "wrong": int(wrong.group(1)) if wrong else 0,
        "errors": errors.group(1) if errors else "",
    }


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warden", required=True)
    parser.add_argument("--mock", required=True)
    parser.add_argument("--cores", type=numbers, default=[2, 16])
    parser.add_argument("--models", type=numbers, default=[1, 10, 100])
    parser.add_argument("--connections", type=numbers, default=[1, 64, 1000, 10_000])
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[])
    for peer in ("nginx", "haproxy", "wrk"):
        parser.add_argument(f"--{peer}", default=peer)
    args = parser.parse_args()
    args.warden, args.mock = os.path.abspath(args.warden), os.path.abspath(args.mock)
    args.seconds = int(args.seconds) if args.seconds == int(args.seconds) else args.seconds
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    peers = [peer for peer in ("nginx", "haproxy") if shutil.which(getattr(args, peer))] + ["warden"]
    mock_name = os.path.basename(args.mock)[:15]
    print("| cores | models | connections | " + " | ".join(f"{peer}: requests/s, p99 ms, PSS MiB" for peer in peers) + " |")
    print("|---|---|---|" + "---|" * len(peers))
    for cores in args.cores:
        for models in args.models:
            cells = {}
            for _ in range(args.rounds):
                for peer in peers:
                    [port] = free_ports(1)
                    with Stage(args, cores, models) as stage:
                        process = getattr(stage, peer)(port)
                        until(f"{peer} answers", lambda: status_of(port) == 200, process, stage.last_log)
                        for connections in args.connections:
                            cells.setdefault((peer, connections), []).append(measure(args, stage, process, port, connections, mock_name))
            for connections in args.connections:
                row = [cores, models, connections]
                for peer in peers:
                    runs = cells[peer, connections]
                    middle = {key: statistics.median(run[key] for run in runs) for key in ("rate", "p99", "pss", "wrong")}
                    cell = f"{middle['rate']:,.0f}, {middle['p99']:.2f}, {middle['pss']:.0f}"
                    trouble = [f"{middle['wrong']:.0f} not 200"] * (middle["wrong"] > 0) + [run["errors"] for run in runs if run["errors"]]
                    row.append(cell + "".join(f" ({what})" for what in trouble))
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


main()
