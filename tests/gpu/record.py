"""Records what a server's memory does under a workload, in the format that `llama-warden policy replay` reads.

    record.py WORKLOAD --server BIN --models DIR --out FILE [--env NAME=VALUE]... [--requests 150] [--size WxH|vary] ...

Workloads: `images` (one picture a request), `text` (no picture), `mixed` (three slots, three requests in ten with a
picture), `conversations` (three slots, each talk grows), `distinct` (new prompts, for a prompt cache that fills).
One JSON object a line: seconds, edge, requests in flight, work so far, memory. A sample is taken whenever the last
request in flight has ended, and by a timer.
"""
import argparse
import json
import pathlib
import random
import signal
import threading
import time

from evidence import MARKER, Run, picture, tokens


class Recorder:
    """Counts work and writes samples; all of it under one lock."""

    def __init__(self, server, vram, out, tick):
        self.server, self.vram, self.out, self.tick = server, vram, open(out, "w"), tick
        self.lock, self.begun, self.in_flight = threading.RLock(), time.monotonic(), 0
        self.work = {"requests": 0, "prompt_tokens": 0, "output_tokens": 0, "images": 0}
        self.over = threading.Event()
        self.timer = threading.Thread(target=self.ticks)
        self.timer.start()

    def sample(self, edge):
        with self.lock:
            status = dict(line.split(":", 1) for line in
                          pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text().splitlines())
            kib = lambda name: int(status[name].split()[0])
            self.out.write(json.dumps({
                "t": round(time.monotonic() - self.begun, 3), "edge": edge, "in_flight": self.in_flight, **self.work,
                "rss_anon_kib": kib("RssAnon"), "rss_kib": kib("VmRSS"), "swap_kib": kib("VmSwap"),
                "vram_mib": round(self.vram.of(self.server))}) + "\n")
            self.out.flush()

    def ticks(self):
        while not self.over.wait(self.tick):
            self.sample("tick")

    def ask(self, body, images=0):
        with self.lock:
            self.in_flight += 1
        answer = self.server.complete(body)
        timings = answer["timings"]
        with self.lock:
            self.in_flight -= 1
            self.work["requests"] += 1
            self.work["prompt_tokens"] += timings["prompt_n"]
            self.work["output_tokens"] += timings["predicted_n"]
            self.work["images"] += images
            if self.in_flight == 0:
                self.sample("idle")
        return answer

    def close(self):
        self.over.set()
        self.timer.join()
        self.out.close()


def request(prompt, output, cache=False):
    return {"prompt": prompt, "n_predict": output, "temperature": 0, "ignore_eos": True, "cache_prompt": cache}


def with_picture(seed, size, output):
    rng = random.Random(seed)
    width, height = (rng.randrange(200, 1200), rng.randrange(200, 900)) if size == "vary" else map(int, size.split("x"))
    return request({"prompt_string": f"look {MARKER} tell", "multimodal_data": [picture(seed, width, height)]}, output)


def on_slots(count, work):
    """`work(slot)` yields jobs; every slot does its own one after the other, with pauses as people make them."""
    def go(slot):
        pauses = random.Random(slot)
        for job in work(slot):
            job()
            time.sleep(pauses.random() * 0.2)

    # Who interrupts us waits for none of them.
    threads = [threading.Thread(target=go, args=(slot,), daemon=True) for slot in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def run(args, recorder):
    share = -(-args.requests // 3)
    if args.workload == "images":
        for index in range(args.requests):
            recorder.ask(with_picture(index, args.size, args.output), 1)
    elif args.workload == "text":
        for index in range(args.requests):
            length = random.Random(index).choice([60, 200, 700, 1500])
            recorder.ask(request(tokens(index, length), args.output))
    elif args.workload == "distinct":
        for index in range(args.requests):
            length = random.Random(index).choice([200, 700, 1500])
            recorder.ask(request(tokens(index, length), args.output, cache=True))
    elif args.workload == "mixed":
        def jobs(slot):
            rng = random.Random(slot)
            for index in range(share):
                seed, output = slot * 1000 + index, rng.choice([13, 32, 64, 120])
                if rng.random() < 0.3:
                    yield lambda: recorder.ask(with_picture(seed, args.size, output), 1)
                else:
                    length = rng.choice([30, 60, 200, 400])
                    yield lambda: recorder.ask(request(tokens(seed, length), output, args.reuse))
        on_slots(3, jobs)
    elif args.workload == "conversations":
        def jobs(slot):
            talk = []
            for index in range(share):
                if len(talk) > 2500:
                    talk = []
                talk = talk + tokens(slot * 1000 + index, 60)
                yield lambda talk=tuple(talk): recorder.ask(request(list(talk), args.output, cache=True))
        on_slots(3, jobs)


def interrupted(*_):
    raise KeyboardInterrupt


def main():
    # Both end it with what was recorded, also where a shell's background has set SIGINT aside.
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=["images", "text", "mixed", "conversations", "distinct"])
    parser.add_argument("--server", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--model", choices=["gemma4", "llama"], default="gemma4")
    parser.add_argument("--out", required=True)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--size", default="640x480")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--tick", type=float, default=0.8)
    parser.add_argument("--cache-ram", default="0")
    parser.add_argument("--layers", default="99")
    parser.add_argument("--gpu", default="", help="which GPU it may use; without it the first one is read")
    parser.add_argument("--flag", action="append", default=[], help="a further argument of the server")
    parser.add_argument("--reuse", action="store_true", help="texts of `mixed` go into the prompt cache")
    args = parser.parse_args()
    args.report = False
    slots = "3" if args.workload in ("mixed", "conversations") else "1"
    arguments = ["-m", str(pathlib.Path(args.models) / f"{args.model}.gguf"), "-c", str(8192 * int(slots)), "-np", slots,
                 "-fa", "on", "--cache-ram", args.cache_ram, "--ctx-checkpoints", "0", "--chat-template", "chatml"]
    if args.model == "gemma4":
        arguments += ["--mmproj", str(pathlib.Path(args.models) / "mmproj.gguf")]
    place = Run(args)
    with place.server(args.server, arguments, layers=args.layers) as server:
        recorder = Recorder(server, place.vram, args.out, args.tick)
        recorder.sample("tick")
        try:
            run(args, recorder)
        except KeyboardInterrupt:
            pass
        finally:
            recorder.close()


if __name__ == "__main__":
    main()
