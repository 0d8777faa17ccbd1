"""Reading another process's memory, which Linux allows processes of one user."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from torch import Tensor

LONGEST = 1 << 30  # bytes of one read


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_into(data: Tensor, process: int, address: int) -> None:
    """Fill a contiguous CPU tensor with what lies at another process's address.

    Raises:
        OSError: The memory is not there, the process has ended, or this system does not allow it.
    """
    done, length = 0, data.nbytes
    while done < length:
        size = min(length - done, LONGEST)
        here = _Span(data.data_ptr() + done, size)
        there = _Span(address + done, size)
        count = _call()(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot read process {process}'s memory: {os.strerror(code)}")
        done += count


@functools.cache
def _call() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise OSError("this system's processes cannot read one another's memory") from error
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    return call
