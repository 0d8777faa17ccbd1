"""Measure every call between ranks: latency, bandwidth, and the constants of both.

python -m scaletorch.dist.bench --ranks 2
torchrun --nproc-per-node 4 -m scaletorch.dist.bench --grid tp=2,dp=2 --axis tp --json tp.json
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from ..errors import ScaletorchError
from ..launchers.environment import infer_launcher
from ..ranks import launch
from .cases import CASES
from .measure import report, sizes_between


def size(text: str) -> int:
    """Read a number of bytes, such as 8, 64K or 1G."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 8, 64K, 64M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, on ranks of our own or as one of a launcher's."""
    reads = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = reads.add_argument  # torchrun takes an option --max for one of its own
    add("--ranks", type=int, metavar="N", help="start N ranks here; else a launcher has")
    add("--calls", nargs="+", choices=list(CASES), default=list(CASES), metavar="CALL",
        help=f"of {', '.join(CASES)}; all by default")  # fmt: skip
    add("--min-size", type=size, default=8, metavar="SIZE", help="smallest size (8)")
    add("--max-size", type=size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    add("--factor", type=int, default=8, metavar="N", help="between sizes (8)")
    add("--seconds", type=float, default=0.25, metavar="S", help="for each call and size (0.25)")
    add("--backend", help="such as gloo or nccl; this machine's device's by default")
    add("--grid", default="", metavar="AXES", help="such as tp=2,dp=2: groups along --axis")
    add("--axis", default="", help="of the grid")
    add("--json", metavar="FILE", help="write rows and constants")
    given = reads.parse_args(arguments)
    if bool(given.grid) != bool(given.axis):
        reads.error("--grid and --axis go together")
    if given.ranks is None and infer_launcher() == "none":
        reads.error("start it with a launcher (torchrun, srun, mpirun), or give --ranks")
    try:
        sizes_between(given.min_size, given.max_size, given.factor)
        if given.ranks is None:
            report(given)
        else:
            launch(report, given.ranks, given, init=False)
    except ScaletorchError as error:
        reads.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
