#!/usr/bin/env python3
"""A list of what is linked into llama-warden, as CycloneDX JSON, from `cargo metadata`.

What is in it: each crate that the program depends on when it is built for this machine, with the versions and checksums of Cargo.lock.
The same sources give the same text: its time is SOURCE_DATE_EPOCH, its serial number follows from what is in it.
"""
import argparse
import datetime
import hashlib
import json
import os
import subprocess
import tomllib
import uuid

PROGRAM = "llama-warden"


def metadata():
    host = next(
        line.split()[1]
        for line in subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout.splitlines()
        if line.startswith("host:")
    )
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", host]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def linked(all_of_it):
    """The nodes that are reached from the program by dependencies that are not those of tests, with what each depends on."""
    nodes = {node["id"]: node for node in all_of_it["resolve"]["nodes"]}
    packages = {package["id"]: package for package in all_of_it["packages"]}
    start = next(id for id, package in packages.items() if package["name"] == PROGRAM)
    found, waiting = {}, [start]
    while waiting:
        id = waiting.pop()
        if id in found:
            continue
        wanted = [
            dep["pkg"]
            for dep in nodes[id]["deps"]
            # Build scripts and what they need decide what is compiled: they count.
            if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])
        ]
        found[id] = sorted(set(wanted))
        waiting.extend(wanted)
    return start, found, packages


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, sums):
    entry = {
        "type": "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "purl": reference(package),
    }
    if package.get("license"):
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    digest = sums.get((package["name"], package["version"]))
    if digest:
        entry["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return entry


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True, help="of the package")
    version = parser.parse_args().version
    with open("Cargo.lock", "rb") as file:
        lock = tomllib.load(file)
    sums = {(one["name"], one["version"]): one.get("checksum") for one in lock["package"]}
    start, found, packages = linked(metadata())
    components = sorted((component(packages[id], sums) for id in found if id != start), key=lambda one: one["bom-ref"])
    program = component(packages[start], sums) | {"type": "application", "version": version}
    dependencies = sorted(
        ({"ref": reference(packages[id]), "dependsOn": [reference(packages[dep]) for dep in deps]} for id, deps in found.items()),
        key=lambda one: one["ref"],
    )
    text = json.dumps([components, program, dependencies], sort_keys=True)
    serial = uuid.UUID(hashlib.sha256(text.encode()).hexdigest()[:32], version=5)
    when = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.timezone.utc)
    print(
        json.dumps(
            {
                "bomFormat": "CycloneDX",
                "specVersion": "1.5",
                "serialNumber": f"urn:uuid:{serial}",
                "version": 1,
                "metadata": {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": program},
                "components": components,
                "dependencies": dependencies,
            },
            indent=1,
        )
    )


main()
