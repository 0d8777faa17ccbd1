"""Says in a file where each rank found itself: place.py FOLDER [LAUNCHER]."""

import pathlib
import sys

import torch

import scaletorch.dist as dist

launcher = sys.argv[2] if len(sys.argv) > 2 else None
dist.init_dist(launcher, backend="gloo", timeout=40)
data = torch.ones(1)
dist.all_reduce(data)
place = (*dist.get_dist_info(), dist.get_local_rank(), dist.get_local_size())
line = f"{place} {data.item()} {dist.infer_launcher()}"
pathlib.Path(sys.argv[1], str(place[0])).write_text(line)
dist.cleanup_dist()
