"""The file by which a running llama-server is asked to give memory back, as docs/patches.md describes it."""
import struct
import threading
import time

BLOCK, BLOCKS = 64, 16
PARTS = {"host": 0, "cuda": 1}
GRAPHS, POOLS, CUBLAS, HEAP = 1, 2, 4, 8
RESULTS = ["none", "done", "partly", "refused", "failed", "too_soon", "other_allocator"]


def check_of(block):
    """FNV-1a."""
    value = 0xCBF29CE484222325
    for byte in block:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return struct.pack("=Q", value)


class Channel:
    def __init__(self, path):
        self.path, self.seq = path, 0
        with open(path, "wb") as file:
            file.write(struct.pack("=8sII48x", b"LWRECL1\0", 1, BLOCKS) + bytes(BLOCK * (1 + 2 * BLOCKS)))

    def answer(self, part):
        """(number of the request, result, bytes, milliseconds) of the first process that has this part; None: nobody yet."""
        with open(self.path, "rb") as file:
            file.seek(BLOCK * (2 + BLOCKS * PARTS[part]))
            block = file.read(BLOCK)
        seq, *given, ms, result, _, pid, _ = struct.unpack("=Q4QIHHII", block[:56])
        return (seq, RESULTS[result], given, ms) if pid and block[56:] == check_of(block[:56]) else None

    def ask(self, what, deadline_ms, part):
        """The answer of this part; the result `silence` if there is none some seconds after the deadline."""
        self.seq += 1
        request = struct.pack("=QII40x", self.seq, what, deadline_ms)
        with open(self.path, "r+b") as file:
            file.seek(BLOCK)
            file.write(request + check_of(request))
        until = time.monotonic() + deadline_ms / 1000 + 3
        while time.monotonic() < until:
            answer = self.answer(part)
            if answer and answer[0] == self.seq and answer[1] != "none":
                return answer
            time.sleep(0.01)
        return (self.seq, "silence", [0] * 4, 0)


class Asking(threading.Thread):
    """Asks again and again until it is told to stop, from when somebody is there to answer."""

    def __init__(self, channel):
        super().__init__(daemon=True)
        self.channel, self.over, self.results = channel, threading.Event(), {}

    def run(self):
        while not self.over.wait(0.05):
            if self.channel.answer("cuda"):
                _, result, _, _ = self.channel.ask(GRAPHS | POOLS | CUBLAS | HEAP, 2000, "cuda")
                self.results[result] = self.results.get(result, 0) + 1

    def stop(self):
        self.over.set()
        self.join()
        return self.results
