"""One rank never joins; the others say what they were told: absent.py FOLDER ABSENT_RANK."""

import os
import pathlib
import sys
import time

import scaletorch.dist as dist

rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
folder = pathlib.Path(sys.argv[1])
if rank == sys.argv[2]:
    deadline = time.monotonic() + 60  # ending would have the launcher end the others
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    sys.exit()
try:
    dist.init_dist(backend="gloo", timeout=5)
except dist.StateError as error:
    (folder / rank).write_text(str(error))
