"""Parameters that a rank uses with its share of activations, and whose gradients nobody sums.

In backward a gradient is whole up to the end of a parallel region, this rank's part inside of it,
and whole again before the beginning of one. The graph of the first forward shows which
parameters are reached inside: beside the layers' shards, and what another strategy has divided,
there must be none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ....dist.functional import AllGather, AllReduce, Copy, Gather, Reduce, ReduceScatter, Split
from ...pg_manager import describe_rank
from ...pg_manager.building import divided_modules
from ..layers.base import TensorParallelLayer
from ..regions.overlap import DIM, Enter, Multiply
from ..regions.replicas import SumReplicas
from ..regions.surround import not_pickled
from .shared_tail import SumTail

_ENDS = (Reduce, ReduceScatter, Gather)  # of a region: what went into them was a rank's part
_ENTERS = (Copy, AllGather, AllReduce, Split, Enter, SumTail)
_OWN = (Multiply, SumReplicas)  # inside of a region
_SHOWN = 3


class WholeGradients:
    """A forward hook of a model, which looks at the graph of its first forward with gradients.

    It takes itself off the model then.

    Args:
        group: Ranks of the tensor-parallel axis.
        joined: Names of the layers whose outputs are joined, unless a loss of shares takes them.
    """

    def __init__(self, group: ProcessGroup | None, joined: Collection[str]) -> None:
        self._group, self._joined = group, joined

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeGradients:
        """Return the hook of a copy: groups are not copied."""
        return WholeGradients(self._group, self._joined)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a module's hooks are, before the layers that it contains."""
        raise not_pickled("model")

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Look at the graph of what a model returned.

        Raises:
            InvalidArgumentError: A gradient would be a part of the whole; on every rank.
        """
        if torch.compiler.is_compiling() or _computes_with_others(model):
            return
        made = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if made:
            _require_whole(model, made, self._group, self._joined)
            for key in [key for key, hook in model._forward_hooks.items() if hook is self]:
                del model._forward_hooks[key]


def _computes_with_others(model: nn.Module) -> bool:
    """Return whether forwards use other tensors than the model's parameters, as under FSDP2.

    Its parameters are shards as DTensors, and the graph has the whole ones that were gathered for
    a while: which of them are whose cannot be told here.
    """
    return any(type(each).__name__ == "DTensor" for each in model.parameters())


def _require_whole(
    model: nn.Module, outputs: list[Tensor], group: ProcessGroup | None, joined: Collection[str]
) -> None:
    named = {n: m for n, m in model.named_modules() if isinstance(m, TensorParallelLayer)}
    own = {*named.values(), *divided_modules(model)}  # whoever divides sums gradients, too
    shards = {id(p) for module in own for p in module.parameters(recurse=False)}
    heads = [m for n, m in named.items() if n in joined and not getattr(m, "gather_output", True)]
    widths = {head.cut.sizes[head.tp_rank] for head in heads}
    roots = [(x.grad_fn, x.ndim > 0 and x.shape[-1] in widths) for x in outputs]
    found = {id(leaf): leaf for leaf in _reached_inside(roots, group) if id(leaf) not in shards}
    if found:
        raise InvalidArgumentError(_message(model, found))


def _reached_inside(
    roots: Collection[tuple[Any, bool]], group: ProcessGroup | None
) -> Iterator[Tensor]:
    """Yield the leaves that gradients reach within regions."""
    seen: set[tuple[Any, bool]] = set()
    todo = [(node, inside) for node, inside in roots if node is not None]
    while todo:
        node, inside = todo.pop()
        if (node, inside) in seen:
            continue
        seen.add((node, inside))
        if inside and hasattr(node, "variable"):
            yield node.variable
        after = _inside_after(node, inside, group)
        if after is not None:
            todo += [(following, after) for following, _ in node.next_functions if following]


def _inside_after(node: Any, inside: bool, group: ProcessGroup | None) -> bool | None:
    """Return whether the gradient that a node gives is a rank's part, or None if not known."""
    kind = getattr(type(node), "_forward_cls", None)
    if kind is None or issubclass(kind, _OWN):
        return inside
    if not issubclass(kind, (*_ENDS, *_ENTERS)):
        return None  # somebody's own function, which may communicate
    # Functions of a dim keep `args` (dim, group, sizes), the others their group alone.
    dim, where = (*getattr(node, "args", (None, None)), None)[:2]
    if (getattr(node, "group", None) if where is None else where) is not group:
        return inside
    joins_tokens = issubclass(kind, Gather) and dim == DIM
    return issubclass(kind, _ENDS) and not joins_tokens


def _message(model: nn.Module, found: Mapping[int, Tensor]) -> str:
    names = [name for name, parameter in model.named_parameters() if id(parameter) in found]
    others = len(found) - len(names)
    shown = names[:_SHOWN] + ["…"] * (len(names) > _SHOWN) + ["a tensor given to it"] * bool(others)
    return (
        f"{describe_rank()}: {type(model).__name__} uses {', '.join(shown)} between column- and "
        "row-parallel layers, with this rank's share of the activations, so each rank would have "
        "a part of the gradient and nobody their sum. Put the parameter into a module of its own "
        "and give that the style 'replicate_sum_grad', or use it before the column-parallel or "
        "behind the row-parallel layer"
    )
