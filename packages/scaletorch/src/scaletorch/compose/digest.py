"""Short forms of tensors' bits, for comparing them over ranks."""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's shape, dtype and bits; one on the meta device has no bits yet."""
    head = f"{tuple(tensor.shape)} {tensor.dtype}"
    if tensor.is_meta:
        return head
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = dense.detach().cpu().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    found = hashlib.blake2b(head.encode(), digest_size=8)
    if flat.numel():
        length = flat.numel() * flat.element_size()
        found.update(memoryview((ctypes.c_char * length).from_address(flat.data_ptr())))
    return found.hexdigest()
