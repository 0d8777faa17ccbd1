"""Precision during a proof: float64 is not cast to float32, and devices use full precision.

Many norms cast to float32 and back. In a float64 model these casts would round and hide the faults
that float64 is to show: gradients would agree to 1e-7 at best.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

ROOT = __package__.rsplit(".", 1)[0]
COMPUTING = tuple(f"{ROOT}.{room}." for room in ("dist", "parallel", "compose"))
CASTS = ("float", "to", "type", "softmax", "log_softmax", "mean", "sum")  # methods that can cast


@contextmanager
def model_precision(dtype: torch.dtype) -> Iterator[None]:
    """Skip the casts to float32 of a model in float64; models of other dtypes are unchanged.

    Casts in this library's own code stay: it must be right in float64 by itself. Methods of
    `Tensor` are replaced, since a torch function mode is off while a backward recomputes.
    """
    if dtype != torch.float64 or hasattr(Tensor.float, "__wrapped__"):  # or already replaced
        yield
        return
    with replaced(Tensor, **{name: _keeping(getattr(Tensor, name)) for name in CASTS}):
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or a class, also inherited ones."""
    before = {name: vars(owner).get(name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _keeping(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of `Tensor` so that it returns float64 instead of casting it to float32."""
    always = method.__name__ == "float"

    @functools.wraps(method)
    def keeping(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        narrows = always or _names_float32(args) or _names_float32(kwargs.values())
        if not narrows or self.dtype != torch.float64 or _called_by_library():
            return method(self, *args, **kwargs)
        if always:
            return self
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return method(self, *args, **kwargs)

    return keeping


def _names_float32(values: Iterable[Any]) -> bool:
    return any(value is torch.float32 for value in values)


def _called_by_library() -> bool:
    """Return whether this library's code made the call, directly or through torch."""
    frame: FrameType | None = sys._getframe(2)  # past this function and the method
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("torch.") and frame.f_code.co_name != "__torch_function__":
            return bool(name.startswith(COMPUTING))
        frame = frame.f_back
    return False


# Flags of `torch.backends.cuda.matmul`, if the release has them; off in a proof.
REDUCED = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Switch off TF32 and 16-bit reductions on CUDA; torch has no such settings for others."""
    with ExitStack() as undo:
        if device == "cuda":
            _switch_tf32_off(undo)
            matmul = torch.backends.cuda.matmul
            for name in filter(partial(hasattr, matmul), REDUCED):
                _set(undo, matmul, name, False)
        yield


def _switch_tf32_off(undo: ExitStack) -> None:
    cudnn: Any = torch.backends.cudnn
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # once the newer names were set, torch refuses the older ones
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
