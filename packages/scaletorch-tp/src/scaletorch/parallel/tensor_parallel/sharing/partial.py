"""Parameters that a rank uses with its share of activations, and whose gradients nobody sums.

In backward a gradient is whole up to the end of a parallel region, this rank's part inside of it,
and whole again before the beginning of one. With sequence parallelism it is that of a share of the
tokens between regions. The graph of the first forward shows which parameters are reached inside,
or on shares without being summed: beside the layers' shards, and what another strategy has
divided, there must be none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum, auto
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


class _Of(Enum):
    """Of what a gradient is, at a place in the graph."""

    ALL = auto()
    PART = auto()  # of the features, inside of a region
    SHARE = auto()  # of the tokens


class WholeGradients:
    """A forward hook of a model, which looks at the graph of its first forward with gradients.

    It takes itself off the model then.

    Args:
        group: Ranks of the tensor-parallel axis.
        joined: Names of the layers whose outputs are joined, unless a loss of shares takes them.
        replicated: Names of the modules of which the plan says that their gradients are whole.
    """

    def __init__(
        self, group: ProcessGroup | None, joined: Collection[str], replicated: Collection[str]
    ) -> None:
        self._group, self._joined, self._replicated = group, joined, replicated

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeGradients:
        """Return the hook of a copy: groups are not copied."""
        return WholeGradients(self._group, self._joined, self._replicated)

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
            self._require_whole(model, made)
            for key in [key for key, hook in model._forward_hooks.items() if hook is self]:
                del model._forward_hooks[key]

    def _require_whole(self, model: nn.Module, outputs: list[Tensor]) -> None:
        named = {n: m for n, m in model.named_modules() if isinstance(m, TensorParallelLayer)}
        own = {*named.values(), *divided_modules(model)}  # whoever divides sums gradients, too
        shards = {id(p) for module in own for p in module.parameters(recurse=False)}
        told = (m for n, m in model.named_modules() if n in self._replicated)
        shards |= {id(p) for module in told for p in module.parameters()}
        heads = [named[n] for n in self._joined if n in named]
        kept = [head for head in heads if not getattr(head, "gather_output", True)]
        widths = {head.cut.sizes[head.tp_rank] for head in kept}
        roots = [(x.grad_fn, x.ndim > 0 and x.shape[-1] in widths) for x in outputs]
        found: dict[int, Tensor] = {}
        parameters = {id(parameter) for parameter in model.parameters()}
        for leaf, of in _reached(roots, self._group):
            given = of is _Of.SHARE and id(leaf) not in parameters  # as stages of a pipeline are
            if id(leaf) not in shards and not given:
                found[id(leaf)] = leaf
                why = _ON_SHARES if of is _Of.SHARE else _INSIDE
        if found:
            raise InvalidArgumentError(_message(model, found, why))


def _computes_with_others(model: nn.Module) -> bool:
    """Return whether forwards use other tensors than the model's parameters, as under FSDP2.

    Its parameters are shards as DTensors, and the graph has the whole ones that were gathered for
    a while: which of them are whose cannot be told here.
    """
    return any(type(each).__name__ == "DTensor" for each in model.parameters())


def _reached(
    roots: Collection[tuple[Any, bool]], group: ProcessGroup | None
) -> Iterator[tuple[Tensor, _Of]]:
    """Yield the leaves that gradients reach which are not of all, and of what they are."""
    seen: set[tuple[Any, _Of]] = set()
    todo = [(node, _Of.PART if part else _Of.ALL) for node, part in roots if node is not None]
    while todo:
        node, of = todo.pop()
        if (node, of) in seen:
            continue
        seen.add((node, of))
        if of is not _Of.ALL and hasattr(node, "variable"):
            yield node.variable, of
        after = _after(node, of, group)
        if after is not None:
            todo += [(following, after) for following, _ in node.next_functions if following]


def _after(node: Any, of: _Of, group: ProcessGroup | None) -> _Of | None:
    """Return of what the gradient is that a node gives, or None if it is not known."""
    kind = getattr(type(node), "_forward_cls", None)
    if kind is None or issubclass(kind, _OWN):
        return of
    if not issubclass(kind, (*_ENDS, *_ENTERS)):
        return None  # somebody's own function, which may communicate
    # Those of dist keep the way of their gradient: a function, a dim if it has one, and the group.
    _, *dim, where = getattr(node, "way", (None, getattr(node, "group", None)))[:3]
    if where is not group:
        return of
    if issubclass(kind, _ENDS):
        joins_tokens = issubclass(kind, Gather) and dim == [DIM]
        return _Of.SHARE if joins_tokens else _Of.PART
    gathers = issubclass(kind, AllGather) or getattr(node, "sizes", None) is not None
    return _Of.SHARE if gathers else _Of.ALL


_INSIDE = (
    "between column- and row-parallel layers, with this rank's share of the activations, so each "
    "rank would have a part of the gradient and nobody their sum. Put the parameter into a module "
    "of its own and give that the style 'replicate_sum_grad', or use it before the column-parallel "
    "or behind the row-parallel layer"
)
_ON_SHARES = (
    "outside of the modules that have them, on this rank's share of the tokens, so each rank would "
    "have a part of the gradient and nobody their sum. Use them in the forward of their module, or "
    "do without sequence parallelism"
)


def _message(model: nn.Module, found: Mapping[int, Tensor], why: str) -> str:
    names = [name for name, parameter in model.named_parameters() if id(parameter) in found]
    others = len(found) - len(names)
    shown = names[:_SHOWN] + ["…"] * (len(names) > _SHOWN) + ["a tensor given to it"] * bool(others)
    return f"{describe_rank()}: {type(model).__name__} uses {', '.join(shown)} {why}"
