"""The device's numeric settings during a proof: what it computes in fewer digits is off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# Of `torch.backends.cuda.matmul`, as far as a release has them; off in a proof.
REDUCED = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def full_precision(device: str) -> Iterator[dict[str, bool]]:
    """Switch TF32 and reductions in 16 bits off for a while, where a kind of device has them.

    Other devices than CUDA have no such settings that torch knows.

    Args:
        device: Its kind, as in `torch.device`.

    Yields:
        What holds meanwhile, by name; empty for other devices.
    """
    if device != "cuda":
        yield {}
        return
    with ExitStack() as undo:
        _switch_tf32_off(undo)
        matmul = torch.backends.cuda.matmul
        known = [name for name in REDUCED if hasattr(matmul, name)]
        for name in known:
            _set(undo, matmul, name, False)
        yield {
            "matmul.tf32": False,
            "cudnn.tf32": False,
            **{f"matmul.{name}": getattr(matmul, name) for name in known},
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }


def in_words(settings: dict[str, bool]) -> str:
    """Return what a report says of the settings; nothing if it has none."""
    if not settings:
        return ""
    deterministic = "on" if settings["deterministic"] else "off"
    return f"; TF32 and reductions in 16 bits off, deterministic algorithms {deterministic}"


def _switch_tf32_off(undo: ExitStack) -> None:
    cudnn: Any = torch.backends.cudnn
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # set by their newer names, after which torch refuses the older ones
        for each in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            _set(undo, each, "fp32_precision", "ieee")
        return
    if before[0] != "highest":
        undo.callback(torch.set_float32_matmul_precision, before[0])
        torch.set_float32_matmul_precision("highest")
    _set(undo, cudnn, "allow_tf32", False)


def _set(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
