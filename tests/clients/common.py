"""What the Python clients share: where the server is, an image, and how results are told.

Each script makes the same calls in the same order and prints one JSON object: the case's name, and what the client's
user got. tests/it/clients.rs runs it twice, against llama-server itself and through llama-warden, and compares.
"""

import base64
import json
import struct
import sys
import zlib

BASE = sys.argv[1]
MODEL = "m"
# The same answer each time.
SAME = {"temperature": 0, "seed": 7}
QUESTION = [{"role": "user", "content": "what is it?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Names of cases begin with one of these; none: all cases.
ONLY = tuple(word for word in sys.argv[2:] if not word.startswith("--"))
results = {}


def image(shade):
    """A PNG of 16 by 16 pixels, in base64."""
    row = lambda y: b"\0" + b"".join(bytes((shade, x * 16, y * 16)) for x in range(16))
    rows = b"".join(row(y) for y in range(16))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def plain(value):
    """What a client's user sees of a result, as JSON."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", warnings=False)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def case(name):
    """Runs the function at once and keeps its result, or its error as the client tells it, under `name`."""

    def run(function):
        if ONLY and not name.startswith(ONLY):
            return
        try:
            results[name] = plain(function())
        except Exception as error:  # noqa: BLE001: an error is a result like any other
            results[name] = {
                "raised": type(error).__name__,
                "status": getattr(error, "status_code", None),
                "body": getattr(error, "body", None) or str(error),
            }

    return run


def tell():
    json.dump(results, sys.stdout)
