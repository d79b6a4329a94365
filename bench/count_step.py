"""The process in which callgrind counts training steps; train.py runs it.

Usage: python bench/count_step.py LIBRARY...

Each step is dumped under the name of its variant; that of the uninstrumented program in full size is called "full".
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import tempfile

import torch
import variants

LAYERS, WIDTH, SEQUENCE, MICROBATCHES = 8, 256, 16, 4
REPEATS = 5

REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def client_requests() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/requests.so"
        compiler = ["cc", "-x", "c", "-O2", "-shared", "-fPIC", "-", "-o", library]
        subprocess.run(compiler, input=REQUESTS, text=True, check=True)
        return ctypes.CDLL(library)


def main() -> None:
    torch.set_num_threads(1)
    requests = client_requests()
    # The sites execute the same instructions whatever the width; a narrow model leaves little else to vary.
    training = variants.Training(LAYERS, 16, SEQUENCE, MICROBATCHES)
    steps = {"uninstrumented": training.step(variants.load("gpt_bare", None))}
    libraries = variants.libraries()
    for name in sys.argv[1:]:
        steps[name] = training.step(variants.load(f"gpt_{name}", libraries[name]))
    for step in [*steps.values()] * 3:
        step()
    full = variants.Training(LAYERS, WIDTH, SEQUENCE, MICROBATCHES)
    gc.collect()
    gc.disable()
    for name, step in [*[*steps.items()] * REPEATS, ("full", full.step(variants.load("gpt_full", None)))]:
        requests.begin()
        step()
        requests.end(name.encode())


if __name__ == "__main__":
    main()
