"""Save device memory for activations: recompute them in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager.building import Attributes, uncompiled
from ..parallel.pipeline_parallel import Split, layers_of

_Inner = Callable[..., Any]
# Selective recomputation keeps the results of these operations. Batched products are left out: they
# are those of attention written out, whose [L, L] scores take the most memory.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::convolution")
_ATTENTION = "aten::_scaled_dot_product_"
# Forwards of layers that changed plain attributes of their modules. The compiler cannot trace a
# second run that starts from the old attributes, so these layers run uncompiled.
_CHANGING: set[_Inner] = set()


def recompute_layers(
    model: nn.Module, split: Split | None = None, *, recompute: bool | str = True
) -> None:
    """Let every layer of `model` keep less on the device between forward and backward, in place.

    True: a layer drops its activations and runs again in backward, including its communication.
    Random draws are the same in both runs. Plain attributes of its modules, such as a call counter,
    start from the same values in both runs, and the second run leaves them unchanged.

    "selective": the results of matrix products, convolutions and attention kernels are kept.
    Everything else runs again: norms, activation functions, attention written out, communication,
    and attention over several cp ranks. Values are the same bits.

    Args:
        model: A module that holds its layers in a list; already tensor and context parallel.
        split: Names the list; None infers it.
        recompute: True or "selective"; False changes nothing.

    Raises:
        InvalidArgumentError: The list of layers cannot be found, or `recompute` is invalid.
    """
    require_way(recompute)
    if not recompute:
        return
    for layer in dict.fromkeys(map(model.get_submodule, layers_of(model, split))):
        # Bound to the layer, so that a deep copy of the model calls its own layer.
        run = _recomputed if recompute is True else _selected
        layer.forward = MethodType(_around(layer.forward, run), layer)


def require_way(recompute: object) -> None:
    """Require a valid value of `recompute`."""
    if not isinstance(recompute, bool) and recompute != "selective":
        raise InvalidArgumentError(
            f'recompute must be True, False or "selective", got {recompute!r}'
        )


def _around(forward: _Inner, run: Callable[..., Any]) -> _Inner:
    if isinstance(forward, MethodType):
        inner = forward.__func__
    else:  # set on the instance as a plain function

        def inner(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    def surrounded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        return run(inner, self, *args, **kwargs)

    return surrounded


def _recomputed(inner: _Inner, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _run_twice(inner, layer, args, kwargs)
    if inner in _CHANGING:
        return _run_uncompiled(inner, layer, args, kwargs)
    return checkpoint(inner, layer, *args, use_reentrant=False, **kwargs)


def _run_twice(
    inner: _Inner, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return checkpoint(_repeatable(inner, layer), layer, *args, use_reentrant=False, **kwargs)


_run_uncompiled = uncompiled(_run_twice)


def _repeatable(inner: _Inner, layer: nn.Module) -> _Inner:
    """Return a layer's forward that starts from the same plain attributes when it runs again."""
    first: list[Attributes] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        now = Attributes(layer.modules())
        if not first:
            first.append(now)
            output = inner(*args, **kwargs)
            if now.changed():
                _CHANGING.add(inner)
            return output
        first[0].put_back()
        try:
            return inner(*args, **kwargs)
        finally:  # torch stops the second run early, by an exception
            now.put_back()

    return run


def _selected(inner: _Inner, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # A compiler chooses itself what it keeps; a model's own checkpoint runs everything again.
    if torch.compiler.is_compiling() or _in_checkpoint():
        return inner(layer, *args, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    run = _repeatable(inner, layer)
    return checkpoint(run, layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = is_selected(operation)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def is_selected(operation: Any) -> bool:
    """Return whether selective recomputation keeps an operation's results."""
    name = operation._schema.name
    # Attention over cp ranks runs a kernel per rank in an autograd function (with grad off);
    # keeping all of their results would take too much memory.
    return name in _PRODUCTS or (name.startswith(_ATTENTION) and torch.is_grad_enabled())


def _in_checkpoint() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__
