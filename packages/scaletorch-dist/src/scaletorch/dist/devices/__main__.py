"""Print the table of backends for this machine: `python -m scaletorch.dist.devices`."""

from __future__ import annotations

import argparse

from .chosen import current_device
from .probe import backend_problem, default_backend
from .table import FEATURES, REDUCED, DeviceEntry, device_entries

COLUMNS = ("backend", "device", "brought by", "lacks (done another way)", "reduces", "tags", "here")
_NOTHING = "nothing"


def backend_rows(*, probe: bool = True) -> list[tuple[str, ...]]:
    """Return the table's cells, one row per backend.

    Args:
        probe: Check what this machine has, which imports vendors' plugins and mpi4py. Otherwise
            the last cell of each row is empty.
    """
    return [_row(entry, probe) for entry in device_entries()]


def _row(entry: DeviceEntry, probe: bool) -> tuple[str, ...]:
    lacks = ", ".join(name for name in FEATURES if name in entry.lacks) or _NOTHING
    missing = [str(dtype).removeprefix("torch.") for dtype in REDUCED - entry.reduces]
    reduces = f"all but {', '.join(sorted(missing))}" if missing else "all"
    tags = "yes" if entry.tags else "no"
    brought_by = f"`{entry.plugin}`" if entry.plugin else entry.source
    here = ""
    if probe:
        problem = backend_problem(entry.backend)
        here = "yes" if problem is None else f"no: {problem.partition('; it comes from')[0]}"
    return f"`{entry.backend}`", f"`{entry.device}`", brought_by, lacks, reduces, tags, here


def backend_table() -> str:
    """Return the table for this machine as Markdown, followed by the fallbacks for each gap."""
    lines = [_line(COLUMNS), _line(("---",) * len(COLUMNS)), *map(_line, backend_rows())]
    ways: dict[str, list[str]] = {}
    for feature, way in FEATURES.items():
        if any(feature in entry.lacks for entry in device_entries()):
            ways.setdefault(way, []).append(feature)
    lines += ["", "What a backend lacks is done another way:", ""]
    lines += [f"- {', '.join(features)}: by {way}" for way, features in ways.items()]
    every = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCED))
    lines += [f"- dtypes, of {every}: by all_gather, then reduced here"]
    lines += ["", f"Default here: `{default_backend()}`, computing on `{current_device()}`."]
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=main.__doc__)
    parser.parse_args()
    print(backend_table())


if __name__ == "__main__":
    main()
