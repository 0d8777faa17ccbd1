"""Models that compute parts of themselves in float32 do so in float64, so that they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_WIDE = {torch.float32: torch.float64}


class Exact(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the wide dtype in the place of the narrow one."""
        named = dict(kwargs or {})
        if func is torch.Tensor.float:
            return func(*args, **named) if args[0].is_complex() else args[0].double()
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(_WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        if func is torch.full and isinstance(args[-1], float):
            named.setdefault("dtype", torch.float64)  # float64's least number does not fit float32
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        return func(*args, **named)


def compute_exactly(model: nn.Module) -> nn.Module:
    """Switch that on in each module's forward, so also where backward runs it again."""
    running = ExitStack()
    depth = [0]

    def begin(*_: Any) -> None:
        depth[0] += 1
        if depth[0] == 1:
            running.enter_context(Exact())

    def end(*_: Any) -> None:
        depth[0] -= 1
        if depth[0] == 0:
            running.close()

    for module in model.modules():
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
    return model
