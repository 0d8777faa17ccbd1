"""The process of one group: it loads everything, waits for its turn and runs the checks."""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import sys
from pathlib import Path

import torch

from scaletorch.dist.testing import preload

from .checks import Checks
from .groups import GROUPS


def main() -> None:
    """Run a group: `worker NAME FILE {"device": …}`; a line of stdin with its seconds starts it."""
    name, out, given = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    group = next(each for each in GROUPS if each.name == name)
    file, _, function = group.function.partition(".")
    module = f"{__package__}.{file}"
    check = getattr(importlib.import_module(module), function)
    preload(module)  # ranks are forked from a process with these modules
    torch.set_num_threads(1)
    seconds = float(sys.stdin.readline())
    check(Checks(Path(out), seconds=seconds, **json.loads(given)), *group.arguments)


if __name__ == "__main__":
    main()
