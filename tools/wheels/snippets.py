"""Run programs, each as `python snippet.py` in its folder, with torch imported once.

It runs apart (`python snippets.py FOLDER …`, in the environment of a wheel, where torch and what
was installed is all there is). Each program is a fork of this process, which goes on with the next
one behind it. What one prints lies in `stdout` and `stderr` of its folder; if one fails, no other
begins, and this ends with 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as _  # noqa: F401 - which each would import, in 2 s of a processor

PROGRAM = "snippet.py"


def main(folders: list[str]) -> None:
    """Fork for each folder; return in the fork, when its program has ended, or behind the last."""
    for folder in folders:
        pid = os.fork()
        if pid == 0:
            run(Path(folder))
            return
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)


def run(folder: Path) -> None:
    """Be a new interpreter that runs the folder's program."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv, sys.path[0] = [PROGRAM], str(folder)
    program = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    program.__file__ = str(folder / PROGRAM)
    exec(compile((folder / PROGRAM).read_text(), program.__file__, "exec"), vars(program))


if __name__ == "__main__":
    main(sys.argv[1:])
