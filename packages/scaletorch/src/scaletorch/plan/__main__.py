"""`python -m scaletorch.plan --model FOLDER --length 4096 --rows 256 --ranks 64`: choose a layout.

`python -m scaletorch.plan calibrate` measures the speed of this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..dist.errors import ScaletorchError
from .arguments import DEFAULT, cluster_of, description_of, options_of, parsed
from .clusters import write_cluster
from .search import Plan, plan
from .tables import explained, fits, named, page, table


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if a layout fits, 1 if none does, 2 for an error."""
    command, arguments = parsed(sys.argv[1:] if given is None else list(given))
    try:
        return _calibrate(arguments) if command == "calibrate" else _plan(arguments)
    except (ScaletorchError, OSError) as error:
        print(f"python -m {__package__}: error: {error}", file=sys.stderr)
        return 2


def _plan(arguments: Any) -> int:
    cluster = cluster_of(arguments)
    description = description_of(arguments, cluster.device.kernels)
    found = plan(description, arguments.rows, cluster, options=options_of(arguments))
    assumed = not (arguments.device or arguments.cluster)
    notes = [f"No --device and no --cluster: figures are those of {DEFAULT}."] * assumed
    print(table(found, arguments.top, notes))
    if arguments.top == 1:
        print(*(f"\n{explained(found, best)}" for best in found.top(1)))
    if arguments.json:
        arguments.json.write_text(json.dumps(_content(found, notes), indent=1) + "\n")
    if arguments.html:
        arguments.html.write_text(page(found, arguments.top, notes), encoding="utf-8")
    return 0 if found.fitting else 1


def _calibrate(arguments: Any) -> int:
    import torch

    from .calibration import calibrate

    dtype = getattr(torch, arguments.dtype)
    cluster = calibrate(arguments.ranks, dtype=dtype, backend=arguments.backend)
    write_cluster(cluster, arguments.out)
    print(f"{arguments.out}: {cluster.ranks} x {cluster.device.name}: {cluster.device.source}")
    return 0


def _content(found: Plan, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "model": found.description.name, "length": found.description.length, "rows": found.rows,
        "cluster": asdict(found.cluster),
        "estimates": [
            {**asdict(each), "peak": each.peak, "fits": fits(found, each)}
            for each in found.estimates or found.over
        ],
        "refused": [(named(each), each.why) for each in found.refused], "notes": notes,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
