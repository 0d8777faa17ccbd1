"""Run programs, each like `python snippet.py` in its folder, with torch imported once.

It runs separately (`python snippets.py FOLDER …`) in the environment of a wheel. Each program runs
in a fork of this process. Its output goes to `stdout` and `stderr` in its folder; if one fails, no
further program starts, and this process exits with 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as _  # noqa: F401 - else each program would import it, in 2 s of CPU time

PROGRAM = "snippet.py"


def main(folders: list[str]) -> None:
    """Fork for each folder; return in the fork after its program, in the parent at the end."""
    for folder in folders:
        pid = os.fork()
        if pid == 0:
            run(Path(folder))
            return
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)


def run(folder: Path) -> None:
    """Run the folder's program as a new interpreter would."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv, sys.path[0] = [PROGRAM], str(folder)
    program = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    program.__file__ = str(folder / PROGRAM)
    exec(compile((folder / PROGRAM).read_text(), program.__file__, "exec"), vars(program))


if __name__ == "__main__":
    main(sys.argv[1:])
