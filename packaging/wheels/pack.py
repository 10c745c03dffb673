#!/usr/bin/env python3
"""Writes a wheel of llama-warden, or of a llama-server that `llama-warden build --json` has made, and prints its path.

The same files give the same bytes: all times are SOURCE_DATE_EPOCH. Nothing in the wheel names the machine that made it.
"""
import argparse
import base64
import datetime
import hashlib
import json
import os
import pathlib
import tarfile
import time
import zipfile

EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "315532800"))


def metadata(name, version, summary, licence, licences, extra, text):
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", f"Summary: {summary}"]
    lines += [f"License-Expression: {licence}"] + [f"License-File: {path}" for path in sorted(licences)]
    lines += extra + ["Description-Content-Type: text/markdown", "", text]
    return "\n".join(lines).encode()


def write_wheel(args, name, files, licences, meta):
    """`files`: paths in the wheel, each with its content and whether it is a program."""
    stem = f"{name.replace('-', '_')}-{args.version}"
    info = f"{stem}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: llama-warden ({args.version})\nRoot-Is-Purelib: false\nTag: py3-none-{args.tag}\n"
    content = {f"{stem}.data/{path}": entry for path, entry in files.items() if not path.startswith("sboms/")}
    content |= {f"{info}/{path}": entry for path, entry in files.items() if path.startswith("sboms/")}
    content |= {f"{info}/licenses/{path}": (text, False) for path, text in licences.items()}
    content |= {f"{info}/METADATA": (meta, False), f"{info}/WHEEL": (wheel.encode(), False)}
    record = []
    for path, (data, _) in sorted(content.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(data)}")
    record.append(f"{info}/RECORD,,\n")
    target = pathlib.Path(args.out) / f"{stem}-py3-none-{args.tag}.whl"
    unfinished = target.with_suffix(".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=args.level) as archive:
        for path, (data, runs) in sorted(content.items()) + [(f"{info}/RECORD", ("\n".join(record).encode(), False))]:
            # A zip archive has no time before 1980.
            entry = zipfile.ZipInfo(path, time.gmtime(max(EPOCH, 315532800))[:6])
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (0o100755 if runs else 0o100644) << 16
            archive.writestr(entry, data)
    unfinished.rename(target)
    print(target)


def pack_warden(args):
    licences = {"LICENSE": pathlib.Path("LICENSE").read_bytes()}
    server = f"llama-warden-llama-server-cpu=={args.version}"
    extra = ["Requires-Python: >=3.9", "Provides-Extra: cpu", f"Requires-Dist: {server}; extra == 'cpu'"]
    summary = "Keeps llama.cpp's llama-server available: a proxy that replaces it before its memory runs out"
    text = pathlib.Path("README.md").read_text()
    meta = metadata("llama-warden", args.version, summary, "MIT OR Apache-2.0", licences, extra, text)
    files = {
        "scripts/llama-warden": (pathlib.Path(args.program).read_bytes(), True),
        "sboms/llama-warden.cdx.json": (pathlib.Path(args.sbom).read_bytes(), False),
    }
    write_wheel(args, "llama-warden", files, licences, meta)


def without_machine(provenance):
    """Replaces what differs between two builds of the same files: times, and names and paths of the machine."""
    provenance["built_at"] = datetime.datetime.fromtimestamp(EPOCH, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    provenance["host"] = dict.fromkeys(provenance["host"], "") | {"machine": provenance["host"]["machine"]}
    provenance["timings"] = dict.fromkeys(provenance["timings"], 0.0)
    for check in provenance["verified"]["checks"]:
        check["seconds"] = 0.0

    def shorten(value, key=""):
        if isinstance(value, dict):
            return {key: shorten(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [shorten(inner) for inner in value]
        is_path = key in ("path", "given", "home", "launcher") and isinstance(value, str) and value.startswith("/")
        return os.path.basename(value) if is_path else value

    return shorten(provenance)


def licences_of(archive):
    """The texts of the licences of llama.cpp and of what it links, by path."""
    found = {}
    with tarfile.open(archive) as source:
        for member in source:
            _, is_there, path = member.name.partition("/vendor/llama.cpp/")
            name = path.rsplit("/", 1)[-1].upper()
            is_linked = path == "LICENSE" or path.startswith(("licenses/", "vendor/"))
            if is_there and is_linked and member.isfile() and name.startswith("LICENSE"):
                found[path] = source.extractfile(member).read()
    if "LICENSE" not in found:
        raise SystemExit(f"{archive} has no licence of llama.cpp")
    return found


def pack_server(args):
    built = json.loads(pathlib.Path(args.build).read_text())
    folder, provenance = pathlib.Path(built["binary"]).parent, built["provenance"]
    licences = licences_of(provenance["plan"]["source"]["given"])
    place = f"data/lib/llama-warden/builds/{built['id']}"
    names = ["llama-server", *provenance.get("libraries", {})]
    files = {f"{place}/{name}": ((folder / name).read_bytes(), True) for name in names}
    provenance = without_machine(provenance)
    files[f"{place}/provenance.json"] = (json.dumps(provenance, indent=2).encode() + b"\n", False)
    name = f"llama-warden-llama-server-{args.backend}"
    summary = f"A llama-server of llama.cpp with llama-warden's patches ({args.backend.upper()}), for llama-warden"
    text = (
        f"{summary}.\n\nInstall it with llama-warden, which finds it: `pip install 'llama-warden[{args.backend}]'`. "
        f"It is of the source `{provenance['plan']['source']['given']}`, with the fixes {', '.join(provenance['fixes'])}. "
        f"`llama-warden builds show {built['id']}` prints all that is known about it.\n"
    )
    meta = metadata(name, args.version, summary, "MIT AND BSD-2-Clause", licences, ["Requires-Python: >=3.9"], text)
    write_wheel(args, name, files, licences, meta)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True)
    parser.add_argument("--tag", required=True, help="platform tag of the wheel")
    parser.add_argument("--level", type=int, default=9, help="of compression")
    parser.add_argument("--out", required=True, help="folder for the wheel")
    kinds = parser.add_subparsers(required=True)
    warden = kinds.add_parser("warden")
    warden.add_argument("--program", required=True)
    warden.add_argument("--sbom", required=True)
    warden.set_defaults(pack=pack_warden)
    server = kinds.add_parser("server")
    server.add_argument("--build", required=True, help="what `llama-warden build --json` printed")
    server.add_argument("--backend", required=True)
    server.set_defaults(pack=pack_server)
    args = parser.parse_args()
    args.pack(args)


main()
