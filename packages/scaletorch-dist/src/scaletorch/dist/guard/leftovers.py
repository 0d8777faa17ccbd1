"""Ledgers that earlier faults have left in the temporary folder: few are kept, none in use goes."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil

from .ledger import read_owner
from .processes import host_number, process_state

PREFIX = "scaletorch-guard-"
KEPT = 4  # folders of ended jobs, the latest


def remove_old(base: str) -> None:
    """Remove this user's oldest ledgers in a folder, if all processes that wrote them are gone.

    Args:
        base: the temporary folder. One that a user names is never tidied.
    """
    ended = [
        path for path in glob.glob(os.path.join(glob.escape(base), f"{PREFIX}*")) if _done(path)
    ]
    with contextlib.suppress(OSError):  # another job tidies at the same time
        for path in sorted(ended, key=os.path.getmtime, reverse=True)[KEPT:]:
            shutil.rmtree(path)


def _done(path: str) -> bool:
    """Tell whether a folder is one of ledgers alone, of processes of this host that are gone."""
    try:
        status = os.lstat(path)
        if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
            return False
        names = os.listdir(path)
        ledgers = [name for name in names if name.endswith(".ledger")]
        if {*names} != {*ledgers, *(f"{name}.channels" for name in ledgers)} or not ledgers:
            return False
        owners = [read_owner(os.path.join(path, name)) for name in ledgers]
    except (OSError, ValueError):
        return False
    return all(host == host_number() and process_state(pid) == "X" for pid, host in owners)
