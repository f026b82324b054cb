"""Records what TensorFlow does: `python tests/conformance/record.py` in an environment with tensorflow-cpu.

Writes recorded.json.gz beside this file: TensorFlow's version, and for every case its input and the outcome
of each operation. The same TensorFlow gives the same bytes. With --check nothing is written: it fails when
what TensorFlow does now differs from what is stored.
"""

import argparse
import gzip
import io
import json
import sys
import time
from pathlib import Path

from sequences import all_cases
from tensorflow_process import TensorFlowProcess

RECORDED = Path(__file__).with_name("recorded.json.gz")


def record(python):
    """Runs all cases; {"tensorflow": version, "cases": [case with "construction" and "outcomes"]}."""
    recorded = []
    started = time.monotonic()
    with TensorFlowProcess(python) as tensorflow:
        version = tensorflow.version
        cases = all_cases()
        for number, case in enumerate(cases, 1):
            recorded.append({**case, **tensorflow.run(case)})
            if number % 100 == 0 or number == len(cases):
                print(f"{number} of {len(cases)} cases, {time.monotonic() - started:.0f} s", flush=True)
        print(f"TensorFlow {version}; its process was aborted {tensorflow.aborted} times")
    return {"tensorflow": version, "cases": recorded}


def pack(recorded):
    """The file's bytes; no time stamp and no file name in it."""
    text = json.dumps(recorded, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(text.encode())
    return buffer.getvalue()


def load(path=RECORDED):
    """Returns the data that pack() packed."""
    return json.loads(gzip.decompress(path.read_bytes()))


def differences(old, new):
    """Returns the differences between two recordings, a line for each case."""
    found = []
    before = {case["id"]: case for case in old["cases"]}
    after = {case["id"]: case for case in new["cases"]}
    found += [f"{name}: not stored" for name in after if name not in before]
    found += [f"{name}: no longer a case" for name in before if name not in after]
    for name, case in after.items():
        stored = before.get(name)
        if stored is None:
            continue
        for key in sorted(case.keys() | stored.keys()):
            if case.get(key) == stored.get(key):
                continue
            was, now = stored.get(key), case.get(key)
            if key == "outcomes":
                at = next(i for i in range(len(was) + 1) if was[i : i + 1] != now[i : i + 1])
                was, now = was[at : at + 1], now[at : at + 1]
                ends = [*was, *now]
                if len(ends) == 2 and any("aborted" in end for end in ends) and any("error" in end for end in ends):
                    # Where TensorFlow reads memory that isn't its own, chance decides between a crash and an error.
                    continue
                found.append(f"{name}: outcome {at}: stored {was}, now {now}")
            else:
                found.append(f"{name}: {key}: stored {was}, now {now}")
    return found


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored file instead of writing it")
    parser.add_argument("--python", default=sys.executable, help="the Python that has tensorflow (default: this one)")
    arguments = parser.parse_args()
    recorded = record(arguments.python)
    if not arguments.check:
        RECORDED.write_bytes(pack(recorded))
        print(f"wrote {RECORDED.name}: {len(recorded['cases'])} cases, {RECORDED.stat().st_size / 1e3:.0f} kB")
        return 0
    stored = load()
    if stored["tensorflow"] != recorded["tensorflow"]:
        print(f"stored with TensorFlow {stored['tensorflow']}, this is {recorded['tensorflow']}")
    found = differences(stored, recorded)
    for line in found[:40]:
        print(line[:400])
    print(f"{len(found)} differences in {len(recorded['cases'])} cases")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
