"""Compares what the sensors read of a llama-server's VRAM with what nvidia-smi reads of the same process.

    vram.py --server BIN --models DIR --reader BIN [--requests 40]

BIN of --reader is the example `gpu` (cargo build --release -p warden-sensors --example gpu). A llama-server answers
requests, so that its use grows; after each one, and with nothing running, both are asked, ours in between two answers
of nvidia-smi. A pair counts where those two agree, so that nothing moved meanwhile. Where NVML lists no process with
bytes (some containers), nvidia-smi does not either: then both must say nothing.

Prints one line of JSON; exits with 1 if any pair differs or too few count, with 2 if nvidia-smi never told any bytes.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from evidence import TEXT, Server, text_request


def smi(pid):
    """MiB by GPU number as nvidia-smi lists the process, [] if it does not, None where it says [N/A]."""
    ask = lambda what: [line.split(", ") for line in subprocess.run(
        ["nvidia-smi", what, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True).stdout.splitlines() if line.strip()]
    numbers = {uuid: int(index) for index, uuid in ask("--query-gpu=index,uuid")}
    found = [[numbers.get(uuid), int(mib) if mib.isdigit() else None]
             for listed, uuid, mib in ask("--query-compute-apps=pid,gpu_uuid,used_memory") if listed == str(pid)]
    return sorted(found, key=str)


class Reader:
    """The sensors, reading when asked."""

    def __init__(self, binary, pid):
        self.pid = str(pid)
        self.process = subprocess.Popen([binary, "--watch", self.pid], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, bufsize=1)
        self.first = json.loads(self.process.stdout.readline())

    def read(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer, answer["groups"][self.pid]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(10)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--reader", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--requests", type=int, default=40)
    args = parser.parse_args()
    log = pathlib.Path(tempfile.mkdtemp(prefix="vram-")) / "log"
    pairs, known, moved, differ, seconds, last = 0, 0, 0, [], [], None
    with Server(args.server, ["-m", f"{args.models}/llama.gguf", *TEXT], {}, log) as server:
        pid = server.process.pid
        with Reader(args.reader, pid) as reader:
            for seed in range(args.requests):
                # Prompts of growing length: pools and graphs grow with them.
                server.complete(text_request(seed, 64 + 100 * seed % 6000, 16))
                begun = time.monotonic()
                before = smi(pid)
                whole, ours = reader.read()
                after = smi(pid)
                seconds.append(time.monotonic() - begun)
                if before != after:
                    moved += 1
                    continue
                pairs += 1
                # nvidia-smi rounds to whole MiB; 0 and [N/A] are what the sensors call unknown.
                theirs = {gpu: mib for gpu, mib in before if mib}
                mine = {one["gpu"]: one["bytes"] / 2**20 for one in ours["vram"] if one["source"] == "process"}
                last = {"nvidia_smi": before, "sensors": ours}
                known += bool(theirs)
                if theirs.keys() != mine.keys() or any(abs(theirs[gpu] - mine[gpu]) > 1 for gpu in mine):
                    differ.append(last)
            devices, readings = whole["devices"], whole["readings"]
    print(json.dumps({"what": "vram", "pairs": pairs, "pairs_with_bytes": known, "moved_meanwhile": moved, "differ": differ[:5],
                      "longest_pair_s": round(max(seconds), 3), "last": last, "devices": devices,
                      "readings": readings}))
    sys.exit(1 if differ or pairs < args.requests // 2 else 0 if known else 2)


if __name__ == "__main__":
    main()
