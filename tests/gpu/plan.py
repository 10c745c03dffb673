"""What `llama-warden plan` says that models need, beside what they take. docs/plan.md has the results.

    plan.py --warden LLAMA_WARDEN --server LLAMA_SERVER --models DIR [--gpu] [--only TEXT] [--file GGUF ...]

DIR is a folder for models of sized_model.py, which are written there (some gigabytes). Each shape is started, answers one prompt that is longer than two
micro-batches (without flash attention: as long as may be), and then its memory is read: what is its own on the host (RssAnon), and with --gpu what NVML says that it has on GPU 0.
--file adds models of others, with prompts as long as may be; `--only file` or `--only copies` runs only those or the copies of a quantised cache.
Prints a table, and then one line of JSON. Exit code 0: each error is at most 5 % and 200 MiB. Else 1.
"""
import argparse
import http.client
import json
import pathlib
import subprocess
import sys
import tempfile
import time

MIB = 2**20
# Name, architecture, whether it sees, flags.
SHAPES = [
    ("dense, 8k", "llama", False, "-c 8192 -np 1"),
    ("dense, 32k, 4 slots", "llama", False, "-c 32768 -np 4"),
    ("dense, 32k, shared", "llama", False, "-c 32768"),
    ("dense, 64k, q8_0", "llama", False, "-c 65536 -np 1 -ctk q8_0 -ctv q8_0 -fa on"),
    ("dense, 64k, q4_0", "llama", False, "-c 65536 -np 2 -ctk q4_0 -ctv q4_0 -fa on"),
    ("dense, 4k, no flash", "llama", False, "-c 4096 -np 1 -fa off"),
    ("dense, 16k, ubatch 2048", "llama", False, "-c 16384 -np 1 -b 2048 -ub 2048"),
    ("dense, read", "llama", False, "-c 8192 -np 1 --no-mmap"),
    ("windows, 8k", "gemma4", False, "-c 8192 -np 1"),
    ("windows, 64k, 4 slots", "gemma4", False, "-c 65536 -np 4"),
    ("windows, 32k, whole", "gemma4", False, "-c 32768 -np 1 --swa-full"),
    ("windows, projector", "gemma4", True, "-c 16384 -np 2"),
]
ON_GPU = [
    # A cache of 131,072 tokens with 16 heads of 128, which flash attention on CUDA copies layer by layer: 1 GiB.
    ("copies, 128k, f16", "llama-wide", False, "-c 131072 -np 1 -fa on"),
    ("copies, 128k, q8_0", "llama-wide", False, "-c 131072 -np 1 -fa on -ctk q8_0 -ctv q8_0"),
    ("dense, half", "llama", False, "-c 16384 -np 1 -ngl 9"),
    ("dense, cache on host", "llama", False, "-c 32768 -np 1 -nkvo"),
]


def get(port, path, body=None, timeout=600):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    return answer.status, json.loads(text) if text else {}


def anonymous(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def on_gpu(pid):
    import pynvml
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    own = [process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device) if process.pid == pid]
    # In a container a process has another number; nothing else runs there.
    return own[0] if own else pynvml.nvmlDeviceGetMemoryInfo(device).used - on_gpu.before


def planned(args, path, projector, flags):
    if "--no-mmap" in flags and "--no-mmap" not in subprocess.run([args.server, "--help"], capture_output=True, text=True).stdout:
        flags = flags.replace("--no-mmap", "-lm none")  # its name in newer builds
    words = flags.split() + (["--mmproj", str(projector)] if projector else [])
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f"[models.m]\nbinary = {json.dumps(args.server)}\nmodel = {json.dumps(str(path))}\nargs = {json.dumps(words)}\n")
        file.flush()
        command = [args.warden, "plan", "--json", "--config", file.name] + ([] if args.gpu else ["--gpus", "none"])
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return words, told["models"][0]


def measured(args, path, words, longest, port=8970):
    command = [args.server, "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "--no-warmup"] + words
    if args.gpu and "-ngl" not in words:
        command += ["-ngl", "99"]
    with open(pathlib.Path(tempfile.gettempdir()) / "plan-server.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 300
        while True:
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command} did not start: see {log.name}")
            try:
                if get(port, "/health", timeout=5)[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        tokens = 2 * int(words[words.index("-ub") + 1] if "-ub" in words else 512) + 100
        if longest or "off" in words:  # without flash attention, buffers are as large as a prompt is long
            tokens = int(words[words.index("-c") + 1]) - 100
        status, _ = get(port, "/completion", {"prompt": [5 + n % 90 for n in range(tokens)], "n_predict": 2, "cache_prompt": False})
        assert status == 200, status
        return anonymous(server.pid), on_gpu(server.pid) if args.gpu else 0
    finally:
        server.kill()
        server.wait()


def write_model(preset, path):
    subprocess.run([sys.executable, pathlib.Path(__file__).with_name("sized_model.py"), preset, path], check=True, stdout=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warden", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--models", required=True, type=pathlib.Path)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--file", type=pathlib.Path, action="append", default=[])
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    projector = args.models / "mmproj.gguf"
    shapes = SHAPES + (ON_GPU if args.gpu else [])
    shapes += [(f"file {path.stem}", path, False, "-c 8192 -np 1") for path in args.file]
    shapes = [shape for shape in shapes if args.only in shape[0]]
    for arch in {arch for _, arch, _, _ in shapes if isinstance(arch, str)}:
        path = args.models / f"{arch}.gguf"
        if not path.exists():
            write_model(arch if arch == "llama-wide" else f"{arch}-gpu", path)
            if arch == "gemma4":
                write_model("gemma4-vision-gpu", projector)
    if args.gpu:
        import pynvml
        pynvml.nvmlInit()
        on_gpu.before = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    rows, bad = [], 0
    print("| shape | host: planned, MiB | taken | error |" + (" GPU: planned, MiB | taken | error |" if args.gpu else ""))
    print("|---|---|---|---|" + ("---|---|---|" if args.gpu else ""))
    for name, arch, sees, flags in shapes:
        is_own = isinstance(arch, str)
        path = args.models / f"{arch}.gguf" if is_own else arch.resolve()
        words, plan = planned(args, path, projector if sees else None, flags)
        taken = measured(args, path, words, longest=not is_own)
        sides = [("host", plan["host_bytes"], taken[0])] + ([("gpu", plan["gpu_bytes"], taken[1])] if args.gpu else [])
        cells = []
        for side, want, have in sides:
            within = abs(want - have) <= 0.05 * have + 200 * MIB
            bad += not within
            cells.append(f"{want / MIB:.0f} | {have / MIB:.0f} | {(want - have) / MIB:+.0f} MiB, {(want - have) / max(have, 1) * 100:+.0f} %{'' if within else ' (!)'}")
            rows.append({"name": name, "side": side, "planned": want, "taken": have})
        print(f"| {name} (`{flags}`) | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"rows": rows, "beyond": bad}))
    sys.exit(bool(bad))


main()
