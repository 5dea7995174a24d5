"""A trial without a training: what it does depends on the seed. Each start leaves a mark."""

import json
import os
import sys
import time
import tomllib
from pathlib import Path

from jaxpar.experiments.children import end_with_parent

OUT_OF_MEMORY, CRASH, HANG, NAN, HANG_ONCE = 1, 2, 3, 4, 5


def main(config_file: str, _warmup: str, result_file: str) -> None:
    end_with_parent()
    config = tomllib.loads(Path(config_file).read_text())
    fsdp, seed = config["mesh"]["fsdp"], config["run"]["seed"]
    with open("started.txt", "a") as marks:
        marks.write(f"{fsdp} {seed}\n")
    if seed == OUT_OF_MEMORY:
        sys.exit("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes")
    if seed == CRASH:
        raise RuntimeError("no luck")
    if seed == HANG or (seed == HANG_ONCE and Path("started.txt").read_text().count(f" {seed}\n") == 1):
        Path("hangs.txt").write_text(str(os.getpid()))
        time.sleep(600)
    step_s = 1 / fsdp
    loss = None if seed == NAN else 2.5
    found = {
        "platform": "cpu",
        "device_kind": "cpu",
        "devices": config["runtime"]["cpu_devices"],
        "steps": 10,
        "step_s": step_s,
        "tokens_per_s": 100 / step_s,
        "mfu": None,
        "loss": loss,
        "losses": [3.0, loss],
        "peak_bytes": 2**30,
        "peak_of": "compiler",
        "compiled_bytes": 2**30,
    }
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
