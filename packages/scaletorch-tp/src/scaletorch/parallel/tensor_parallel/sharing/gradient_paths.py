"""Follow autograd graphs to find the leaves with partial gradients on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Flag, auto
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import CheckpointFunction

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ....dist.functional import AllGather, AllReduce, Copy, Gather, Reduce, ReduceScatter, Split
from ...pg_manager import describe_rank
from ...pg_manager.building import divided_modules
from ...placement import Invariant, ModelView, Partial, Placement, Replicate, Varying
from ..layers.base import TensorParallelLayer
from ..layers.own_parameters import PLACED
from ..regions.surround import own_class


class Reach(Flag):
    """The kinds of gradients that reach a parameter: full or partial ones."""

    NOT = 0
    WHOLE = auto()  # the same on every rank
    PARTIAL = auto()  # a term of a sum over the ranks
    BOTH = WHOLE | PARTIAL


# The collective that a function's backward applies to a gradient, its `way` -> the result's kind.
_WAYS: Mapping[type, Reach] = {
    **dict.fromkeys((Reduce, AllReduce, Gather), Reach.WHOLE),
    **dict.fromkeys((Copy, Split, AllGather, ReduceScatter), Reach.PARTIAL),
}


class Leaves:
    """The trainable leaves of a model's graphs, each by its `id`."""

    def __init__(self, model: nn.Module) -> None:
        self.whole: dict[int, Tensor] = {}  # replicated on every rank
        self.names: dict[int, str] = {}  # of all, including shards
        self.shards: set[int] = set()  # sharded by layers or other strategies
        divided, gathered, view = divided_modules(model), _gathered(model), ModelView(model)
        settled: dict[nn.Module, Collection[str]]
        settled = {m: m.settled for m in view.names if isinstance(m, TensorParallelLayer)}
        for parameter, owners in view.owners.items():
            leaf = gathered.get(parameter, parameter)
            first, own_name = owners[0]
            self.names[id(leaf)] = f"{view.names[first]}.{own_name}".lstrip(".")
            if any(module in divided or name in settled.get(module, ()) for module, name in owners):
                self.shards.add(id(leaf))
            elif leaf.requires_grad:
                self.whole[id(leaf)] = leaf


class Walk:
    """One walk through a model's autograd graphs, from outputs back to the leaves."""

    def __init__(self, model: nn.Module, sums: Any) -> None:
        # `sums` is the `GradientSums` that records the kinds of gradients over all walks.
        self._model, self._sums, self.leaves = model, sums, Leaves(model)
        self._group: ProcessGroup | None = sums.group
        held = (vars(module).get("_sequence") for module in model.modules())
        self._sequences = next(filter(None, held), None)  # of sequence parallelism, if any
        self._seen: set[tuple[Node, Reach]] = set()
        self._found: dict[int, tuple[Tensor, Reach]] = {}
        self._splits = False  # whether a term of a gradient reaches a node that takes the full one
        self._outer: dict[int, Node] = {}  # a checkpoint's input -> its node in the outer graph

    def _check_boundaries(self, node: Any, reach: Reach) -> None:
        """Refuse a placement that a boundary gives to a tensor and the graph contradicts."""
        placed = node.metadata.get(PLACED)
        if not placed:
            return
        shown: Placement = Invariant() if reach is Reach.WHOLE else Replicate()
        if self.reach_of(node, ReduceScatter) is Reach.PARTIAL:
            shown = Varying()
        known: tuple[type, ...] = (Invariant, Replicate, Partial)
        if shown == Varying():  # what is whole in the plan may be this rank's share of the tokens
            known = (Replicate,) if self._sequences else (Invariant, Replicate)
        wrong = [f"{at} is {p}" for at, p in placed if p != shown and isinstance(p, known)]
        if wrong:
            raise InvalidArgumentError(
                f"{describe_rank()}: {', and '.join(wrong)} by its boundary, but its graph shows "
                f"{shown}: give this module, or one that uses the same tensor, another boundary"
            )

    def reach_of(self, output: Node, *whole: type) -> Reach:
        """Return an output's kind of gradient; the search ends at collectives in `whole` too."""
        seen: set[Node] = set()
        todo: list[Node | None] = [output]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and (id(leaf) in self.leaves.shards or self._is_share(leaf)):
                return Reach.PARTIAL
            way, group = _way_of(node)
            if group is self._group:
                if way in (AllGather, Gather):  # forward split it
                    return Reach.PARTIAL
                if way in (Copy, AllReduce, Split, *whole):  # forward summed or gathered
                    continue
            todo += [following for following, _ in node.next_functions]
        return Reach.WHOLE

    def _is_share(self, leaf: Tensor) -> bool:
        """Return whether a leaf is a sequence shard passed to the model or to a stage."""
        if id(leaf) in self.leaves.names or leaf.ndim < 2 or not leaf.numel():
            return False
        # A model that is called without token ids is called with sequence shards.
        sequence = self._sequences
        return sequence is not None and (sequence.length is None or sequence.is_share(leaf))

    def follow(self, roots: Iterable[tuple[Node, Reach]]) -> None:
        """Follow gradients from nodes back to the leaves, and record their kind at each."""
        todo = [*roots]
        while todo:
            node, reach = step = todo.pop()
            if step in self._seen:
                continue
            self._seen.add(step)
            self._check_boundaries(node, reach)
            # Its leaf, and leaves whose gradients its function computes later.
            leaves = getattr(node, "variable", None), *getattr(node, "trained_later", ())
            for leaf in (each for each in leaves if each is not None):
                outer = self._outer.get(id(leaf))
                if outer is not None:
                    todo.append((outer, reach))
                else:
                    before = self._found.get(id(leaf), (leaf, Reach.NOT))[1]
                    self._found[id(leaf)] = leaf, before | reach
            if _kind(node) is CheckpointFunction:
                self._follow_later(node, reach)
                continue
            after = self._after(node, reach)
            todo += [(edge, after) for edge, _ in node.next_functions if edge is not None]
        self._settle()

    def _after(self, node: Node, reach: Reach) -> Reach:
        """Return the kind of the gradients that a node returns, given the kind that it gets."""
        way, group = _way_of(node)
        if way is not None and group is not self._group:
            return reach
        if way is not None:
            self._splits |= reach is Reach.PARTIAL and way in (Copy, Split)
            return _WAYS[way]
        kind = _kind(node)
        if kind is None or _is_ours(kind):
            return reach
        if _holds(node, self._group):
            self._refuse(
                f"the autograd function {kind.__name__}, which holds the process group of tensor "
                "parallelism. Whether the gradients behind it are whole or partial sums cannot be "
                "told; communicate by scaletorch.dist.functional instead, or leave the module out "
                "of tensor parallelism"
            )
        if not kind.__module__.startswith("torch."):
            self._sums.note_opaque(kind)
        return reach

    def _follow_later(self, node: Any, reach: Reach) -> None:
        """Follow a reentrant checkpoint in backward, when its recomputation builds the graph."""
        run: Callable[..., Any] = node.run_function
        self._sums.reruns = True

        def run_and_follow(*args: Any) -> Any:
            output = run(*args)
            walk = Walk(self._model, self._sums)
            inputs = [x for x in args if isinstance(x, Tensor)]
            edges = [edge for edge, _ in node.next_functions]
            walk._outer = {id(x): e for x, e in zip(inputs, edges, strict=True) if e is not None}
            walk.follow([(x.grad_fn, reach) for x in tensors_in(output) if x.grad_fn])
            return output

        node.run_function = run_and_follow

    def _settle(self) -> None:
        """Record the kinds that were found, and refuse uses without a right gradient."""
        both: list[str] = []
        given: list[Tensor] = []
        for key, (leaf, reach) in self._found.items():
            if key in self.leaves.whole:
                if self._sums.reach(leaf) | reach is Reach.BOTH:
                    both.append(self.leaves.names[key])
                else:
                    self._sums.note(leaf, reach)
            elif (
                Reach.PARTIAL in reach
                and leaf.numel()  # an empty one is only a placeholder
                and key not in self.leaves.names
                and not self._is_share(leaf)
            ):
                given.append(leaf)
        if both:
            more = f" and {len(both) - 3} more" if len(both) > 3 else ""
            self._refuse(
                f"{', '.join(map(repr, both[:3]))}{more} in a parallel region and outside of one. "
                "Inside, or on shares of the tokens, each rank has a term of the gradient. Use one "
                "parameter inside and another outside, or give the layers of that region the style "
                "'replicate'; a head that is F.linear(x, embedding.weight) must be an nn.Linear "
                "with that weight, of style 'column_gather'"
            )
        if given:
            self._refuse(
                f"a tensor given to it, which requires a gradient (of shape "
                f"{tuple(given[0].shape)}), in a parallel region or on this rank's share of the "
                "tokens, where its gradient is partial; use it outside, or make it a parameter"
            )
        if self._splits:
            self._refuse(
                "the summed or gathered output of a sharded layer where each rank computes with "
                "its own shards or tokens, so its gradient needs a sum: give the module that "
                "computes so a Boundary whose input is (Invariant(), Replicate()), or pass the "
                "tensor through CopyToModelParallelRegion, or give the layers around the style "
                "'replicate'"
            )

    def _refuse(self, use: str) -> NoReturn:
        kind = own_class(self._model).__name__
        raise InvalidArgumentError(f"{describe_rank()}: {kind} uses {use}")


def _kind(node: Node) -> type | None:
    """Return the Python autograd function of a node, or None for a built-in one."""
    kind: type | None = getattr(type(node), "_forward_cls", None)
    return kind


def _is_ours(function: type) -> bool:
    """Return whether a function is of this library, which keeps the kind of gradients."""
    return function.__module__.startswith(f"{__name__.rpartition('.parallel.')[0]}.")


def _way_of(node: Node) -> tuple[type | None, ProcessGroup | None]:
    """Return the collective of dist that a node applies to gradients, and its group."""
    way = getattr(node, "way", None)
    if isinstance(way, tuple) and way and way[0] in _WAYS:
        return way[0], (way[1] if len(way) == 2 else way[2])
    return None, None


def _holds(node: Node, group: ProcessGroup | None) -> bool:
    """Return whether a node stores the process group, so that it may communicate over it."""
    kept = vars(node).values() if hasattr(node, "__dict__") else ()
    return group is not None and any(
        value is group or (isinstance(value, tuple | list) and any(x is group for x in value))
        for value in kept
    )


def _gathered(model: nn.Module) -> dict[Tensor, Tensor]:
    """Return sharded parameter -> its unsharded tensor in a forward, for FSDP2 modules."""
    found: dict[Tensor, Tensor] = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        for parameter in getattr(group, "fsdp_params", ()):
            if hasattr(parameter, "_unsharded_param"):
                found[parameter.sharded_param] = parameter._unsharded_param
    return found


def trainable(model: nn.Module) -> Iterator[Tensor]:
    """Yield the trainable parameters of a model; tied ones appear more than once."""
    modules = [model]
    for module in modules:
        for leaf in module._parameters.values():
            if leaf is not None and leaf.requires_grad:
                yield leaf
        modules += [child for child in module._modules.values() if child is not None]
