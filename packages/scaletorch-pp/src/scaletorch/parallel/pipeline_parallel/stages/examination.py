"""The first forward of a kind: what is computed of what, and why the model's code may fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.overrides import TorchFunctionMode

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly
from .passage import Passage
from .stand_ins import OF_FORM_ALONE


@contextmanager
def examining(passage: Passage) -> Iterator[None]:
    """Run the forward in this context uncompiled, and tell why the model's own code may fail.

    Raises:
        InvalidArgumentError: It fails, which may be because this stage lacks modules.
    """
    with eagerly(), Following(passage):
        try:
            yield
        except (ScaletorchError, DistError):
            raise
        except Exception as error:
            if passage.inside:  # a layer's own failure
                raise
            raise InvalidArgumentError(_failed(error)) from error


@contextmanager
def crossing(model: nn.Module, crossed: Iterable[str]) -> Iterator[None]:
    """Refuse, in the forwards of this context, what modules on several stages cannot do.

    They are not compiled as a whole: the compiler takes no stand-ins. And a full backward hook
    waits for the gradients of its module's output and of its input, of which no stage has both; if
    the input needs no gradient, it runs where the output is.

    Args:
        model: The model.
        crossed: Names of modules whose input and output are on two stages.

    Raises:
        InvalidArgumentError: One is compiled; or it has such a hook, and is given a tensor that
            requires a gradient.
    """
    modules = [(name or "the model", model.get_submodule(name)) for name in crossed]
    for name, module in modules:
        if module._compiled_call_impl is not None:
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} is compiled as a whole, and is on several stages of "
                "the pipeline, so that what goes from one to the next is not seen: compile its "
                "layers one by one (layer.compile())"
            )
    handles = [
        module.register_forward_pre_hook(partial(_require_no_gradient, name))
        for name, module in modules
        if module._backward_hooks and module._is_full_backward_hook
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_no_gradient(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    given = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    if given and torch.is_grad_enabled():
        raise InvalidArgumentError(
            f"{describe_rank()}: {name} ({type(module).__name__}) has a full backward hook, and "
            "its input and its output are on two stages of the pipeline, so the hook would never "
            "run: register it on the layers inside, or use no pipeline (pp_size=1)"
        )


def _failed(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return (
        f"{describe_rank()}: the model's own code between its layers fails where modules are "
        f"another stage's, which return tensors of a form and without values: it raised "
        f"{type(error).__name__} ({text}). If it runs in one process, it takes something else of "
        "them than such tensors of the form that they are given, or that layers of this stage "
        "return: compute that inside the layers, make it an entry of the micro-batch, or use no "
        "pipeline (pp_size=1)"
    )


class Following(TorchFunctionMode):
    """While it is on, what is computed from tensors that are noted is noted too.

    Args:
        passage: The forward that runs.
    """

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self._passage = passage

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the call, and note what it makes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, made = getattr(func, "__name__", ""), self._passage.beside.made
        if self._passage.inside or name in OF_FORM_ALONE or not made:
            return result
        if any(tensor in made for tensor in tensors_in((args, kwargs))):
            self._passage.beside.note(result)
            if name == "__setitem__":
                self._passage.beside.note(args[0])
        return result
