"""Time of imports: all of `scaletorch.dist` beyond torch, and planning's arithmetic without it.

The promise is less than 50 ms beyond `import torch`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile

CHILDREN = 21
# Measured import → module that is imported before.
IMPORTS = {
    "from scaletorch.dist import *": "torch",
    "import scaletorch.plan.__main__": "time",
}
MEASURE = """
import os, sys, time, {before}
sys.dont_write_bytecode = False
for _ in range({children}):
    child = os.fork()
    if child == 0:
        start = time.process_time()
        {measured}
        os.write(1, f"{{time.process_time() - start}}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


def times(measured: str) -> list[float]:
    """Return the CPU milliseconds of imports of compiled modules."""
    code = MEASURE.format(before=IMPORTS[measured], children=CHILDREN, measured=measured)
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-X", f"pycache_prefix={folder}", "-c", code]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
    return [1000 * float(line) for line in done.stdout.split()]


if __name__ == "__main__":
    for each, before in IMPORTS.items():
        low, middle, high = statistics.quantiles(times(each)[1:], n=4)  # the first one compiles
        beyond = " beyond torch" * (before == "torch")
        print(f"{each}: {middle:.1f} ms ({low:.1f} to {high:.1f}){beyond}")
