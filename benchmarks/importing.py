"""What ``import scaletorch.dist`` takes beyond ``import torch``: less than 50 ms is promised."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile

CHILDREN = 21
MEASURE = f"""
import os, time, torch
for _ in range({CHILDREN}):
    child = os.fork()  # so that torch itself is imported once
    if child == 0:
        start = time.process_time()
        import scaletorch.dist
        os.write(1, f"{{time.process_time() - start}}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


def times() -> list[float]:
    """Return milliseconds of processor time, of imports of modules that are compiled."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-X", f"pycache_prefix={folder}", "-c", MEASURE]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
    return [1000 * float(line) for line in done.stdout.split()]


if __name__ == "__main__":
    low, middle, high = statistics.quantiles(times()[1:], n=4)  # the first one compiles
    print(f"import scaletorch.dist: {middle:.1f} ms ({low:.1f} to {high:.1f}) beyond torch")
