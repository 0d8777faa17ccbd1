"""Says of each moment of a step which block runs, forward or backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...dist.building import tensors_in
from .observed import BACKWARD, FORWARD, Observed


@contextmanager
def watch(
    model: nn.Module, seen: Observed, chosen: Mapping[int, str], like: list[Any]
) -> Iterator[None]:
    """Watch a step of `model`.

    Args:
        model: Whose layers are hooked for as long.
        seen: Hears of it.
        chosen: By kind, the layer that runs.
        like: Gets what the latest layer returned.
    """
    layers = {kind: model.get_submodule(name) for kind, name in chosen.items()}
    order = [*chosen]

    def before(kind: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = next(tensors_in((args, kwargs)), None)
        if hidden is not None:
            seen.come_in(kind, hidden)
            if kind == order[0]:
                _when_gradient(hidden, partial(seen.enter, 0, BACKWARD))
        seen.enter(kind, FORWARD)

    def after(kind: int, _: nn.Module, args: Any, output: Any) -> None:
        like[0] = output
        hidden = next(tensors_in(output), None)
        if hidden is not None:
            seen.go_out(kind, hidden)
            _when_gradient(hidden, partial(seen.enter, kind, BACKWARD))
        if kind == order[-1]:
            seen.enter(seen.last, FORWARD)

    def ran(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.ran(args[0], output)

    with ExitStack() as stack:
        for kind, layer in layers.items():
            one = layer.register_forward_pre_hook(partial(before, kind), with_kwargs=True)
            two = layer.register_forward_hook(partial(after, kind))
            stack.callback(one.remove)
            stack.callback(two.remove)
        for linear in put_off(model):
            stack.callback(linear.register_forward_hook(ran).remove)
        stack.callback(model.register_forward_pre_hook(lambda *_: seen.begin(model)).remove)
        stack.enter_context(seen.keeping())
        yield
    seen.finish()


def put_off(model: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weights' gradients the second half of a backward makes.

    Those of `nn.Linear`'s own forward, which gradient buckets take over in the same way.
    """
    return [
        each
        for each in model.modules()
        if isinstance(each, nn.Linear)
        and type(each).forward is nn.Linear.forward
        and isinstance(vars(each).get("forward", partial(each.forward)), partial)
        and each.weight.requires_grad
    ]


def _when_gradient(tensor: Tensor, do: Any) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda _: do())
