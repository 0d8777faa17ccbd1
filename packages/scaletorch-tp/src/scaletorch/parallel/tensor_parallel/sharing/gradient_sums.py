"""Which gradients of whole parameters are summed over the tensor-parallel ranks.

Nothing declares it: it follows from the autograd graph of a forward. Inside a parallel region, or
on this rank's share of the tokens, a gradient is partial; before the region begins and after it
ends it is whole. A whole parameter that the graph reaches with partial gradients only is summed,
one that it reaches with whole gradients only is not, and one that it reaches both ways is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ....dist import all_reduce
from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ....dist.functional import AllGather, AllReduce, Copy, Gather, Reduce, ReduceScatter, Split
from ...pg_manager import describe_rank
from ...pg_manager.building import divided_modules, runs_as_stages, watch_outputs
from ..cross_entropy import CrossEntropy
from ..layers.base import TensorParallelLayer
from ..regions.overlap import Enter, Multiply
from ..regions.replicas import SumReplicas
from ..regions.sequence_shares import find_shares
from ..regions.surround import not_pickled, own_class
from ..regions.uncompiled import uncompiled
from .shared_tail import SumTail


class Reach(Flag):
    """How gradients reach a parameter."""

    NOT = 0
    WHOLE = auto()  # the same on every rank
    PARTIAL = auto()  # a term of a sum over the ranks
    BOTH = WHOLE | PARTIAL


# What one of the collectives of dist does to a gradient -> what the gradient is behind it.
_WAYS: Mapping[type, Reach] = {
    Reduce: Reach.WHOLE,
    AllReduce: Reach.WHOLE,
    Gather: Reach.WHOLE,
    Copy: Reach.PARTIAL,
    Split: Reach.PARTIAL,
    AllGather: Reach.PARTIAL,
    ReduceScatter: Reach.PARTIAL,
}
_SAME = (Multiply, SumReplicas)  # functions over the group that leave a gradient what it is


@dataclass(frozen=True, slots=True)
class _Step:
    """A node on the way back from an output, and the one before it."""

    node: Node
    reach: Reach
    before: _Step | None


@dataclass(slots=True)
class _Places:
    """Where gradients reach one leaf, for messages: a path for each way."""

    leaf: Tensor
    reach: Reach = Reach.NOT
    steps: dict[Reach, _Step] = field(default_factory=dict)


class GradientSums:
    """Finds which gradients are summed, and sums them where nobody else does.

    It is a forward hook of the model. It looks at the graph of every forward until it has seen
    how gradients reach each trainable parameter, and again when other parameters are trained.

    Args:
        group: Ranks of the tensor-parallel axis.

    Attributes:
        group: The ranks.
        deferred: Whether somebody sums once for many backwards; otherwise each backward sums.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.deferred = False
        self._reached: MutableMapping[Tensor, Reach] = WeakTensorKeyDictionary()
        self._hooked: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
        self._unseen: dict[tuple[int, ...], bool] = {}  # trained parameters -> some were not seen
        self._opaque: set[str] = set()  # functions that may hide parameters
        self._seen_once = False
        self._later: list[tuple[nn.Module, list[Node]]] = []  # outputs that nobody looked at yet

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSums:
        """Return the hook of a copy, which looks at that: groups are not copied."""
        return GradientSums(self.group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a module's hooks are, before the layers that it contains."""
        raise not_pickled("model")

    @uncompiled
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Look at the graph of what a model returned, if it runs as a whole."""
        if not runs_as_stages(model):
            self.look(model, output)

    def look(self, model: nn.Module, output: Any) -> None:
        """Look at the graph of an output, unless all of it is known.

        Args:
            model: The model.
            output: What it, or a stage of it, has made.

        Raises:
            InvalidArgumentError: A gradient would be whole in one place and partial in another,
                or cannot be followed; on every rank.
        """
        later = self.deferred and self._seen_once
        if not torch.is_grad_enabled() or (later and not any(self._unseen.values())):
            return
        made = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        trained = tuple(id(each) for each in _trainable(model)) if made else ()
        if not made or not self._unseen.get(trained, True):
            return
        if later and trained in self._unseen:
            self._later.append((model, made))  # looked at if a parameter comes that has not yet
        else:
            self._unseen[trained] = self._follow(model, made)

    def look_again(self) -> None:
        """Look at the next forwards, whatever was seen before."""
        self._unseen, self._seen_once = {}, False

    def _follow(self, model: nn.Module, made: Iterable[Node]) -> bool:
        """Follow graphs of a model; return whether they reached less than all that it trains."""
        leaves = _Leaves(model)
        walk = _Walk(self, model, leaves)
        walk.follow([(node, walk.reach_of(node)) for node in made])
        unseen = [each for each in leaves.whole.values() if self.reach(each) is Reach.NOT]
        for each in unseen:
            self._hook(each)
        return bool(unseen)

    def _hook(self, leaf: Tensor) -> None:
        if leaf not in self._hooked:
            self._hooked[leaf] = leaf.register_hook(partial(self._arrived, TensorWeakRef(leaf)))

    def reach(self, parameter: Tensor) -> Reach:
        """Return how gradients reach a parameter, as far as it was seen."""
        return self._reached.get(parameter, Reach.NOT)

    def note(self, parameter: Tensor, reach: Reach) -> None:
        """Note how gradients reach a parameter, here or on another rank."""
        self._reached[parameter] = reach = self.reach(parameter) | reach
        if reach is Reach.PARTIAL:
            self._hook(parameter)
        elif reach is Reach.WHOLE and parameter in self._hooked:
            self._hooked.pop(parameter).remove()

    def note_opaque(self, function: type) -> None:
        """Note that a graph has a function which may use parameters that are none of its inputs."""
        self._opaque.add(f"{function.__module__}.{function.__qualname__}")

    def refuse_hidden(self, parameter: str) -> None:
        """Refuse a gradient that no graph has shown; one of a loss that reads parameters is whole.

        Args:
            parameter: What messages call the parameter.

        Raises:
            InvalidArgumentError: A graph had functions that may use a parameter unseen.
        """
        if self._opaque:
            raise InvalidArgumentError(
                f"{describe_rank()}: the gradient of a parameter ({parameter}) came in a way that "
                f"autograd's graph does not show, perhaps by {', '.join(sorted(self._opaque))}, so "
                "whether it is to be summed over the tensor-parallel ranks is not known; pass the "
                "parameter to that function as one of its inputs"
            )

    @contextmanager
    def summed_later(self) -> Iterator[None]:
        """Let no backward in this context sum."""
        self.deferred = True
        try:
            yield
            self._seen_once = True
        finally:
            self.deferred = False
            self._later.clear()

    def _arrived(self, parameter: TensorWeakRef, gradient: Tensor) -> Tensor | None:
        """Sum a gradient of one backward, if it is partial and nobody sums later.

        Raises:
            InvalidArgumentError: Nobody has seen how it came.
        """
        leaf = parameter()
        reach = Reach.NOT if leaf is None else self.reach(leaf)
        if reach is Reach.NOT:
            later, self._later = self._later, []
            for model, made in later:
                self._follow(model, made)
            reach = Reach.NOT if leaf is None else self.reach(leaf)
        if reach is Reach.NOT and leaf is not None and not self.deferred:
            self.refuse_hidden(f"shape {tuple(gradient.shape)}")
        if self.deferred or reach is not Reach.PARTIAL:
            return None
        total = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=self.group)
        return total


def infer_sums(model: nn.Module, group: ProcessGroup | None) -> None:
    """Let gradients of a model's whole parameters be summed where they are partial.

    Args:
        model: The model, with its sharded layers.
        group: Ranks of the tensor-parallel axis.
    """
    if find_sums(model) is None:
        sums = GradientSums(group)
        model.register_forward_hook(sums)
        watch_outputs(model, sums.look)


def find_sums(model: nn.Module) -> GradientSums | None:
    """Return what infers the sums of a model, or of the one that it wraps; None without any."""
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, GradientSums)), None)


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model that every rank has whole, by name."""
    whole = _Leaves(model).whole
    return {name: each for name, each in model.named_parameters() if id(each) in whole}


class _Leaves:
    """The trainable leaves of a model's graphs.

    Attributes:
        whole: Those that every rank has whole, by `id`.
        names: The name of each leaf, shards included.
        shards: `id` of those that layers, or other strategies, have divided.
    """

    def __init__(self, model: nn.Module) -> None:
        self.whole: dict[int, Tensor] = {}
        self.names: dict[int, str] = {}
        self.shards: set[int] = set()
        divided, gathered = {*divided_modules(model)}, _gathered(model)
        for prefix, module in model.named_modules():
            settled = module.settled if isinstance(module, TensorParallelLayer) else ()
            for name, parameter in _own_leaves(module):
                leaf = gathered.get(parameter, parameter)
                self.names.setdefault(id(leaf), f"{prefix}.{name}".lstrip("."))
                if module in divided or name in settled:
                    self.shards.add(id(leaf))
                elif leaf.requires_grad:
                    self.whole[id(leaf)] = leaf
        self.whole = {key: leaf for key, leaf in self.whole.items() if key not in self.shards}


class _Walk:
    """One walk through graphs, from outputs back to the leaves."""

    def __init__(self, sums: GradientSums, model: nn.Module, leaves: _Leaves) -> None:
        self._sums, self._model, self._leaves = sums, model, leaves
        self._seen: set[tuple[Node, Reach]] = set()
        self._found: dict[int, _Places] = {}
        self._outer: dict[int, Node] = {}  # where gradients of a checkpoint's inputs go

    def reach_of(self, output: Node) -> Reach:
        """Return what the gradient of an output is: partial if ranks have other values of it."""
        seen: set[Node] = set()
        todo: list[Node | None] = [output]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and (id(leaf) in self._leaves.shards or self._is_share(leaf)):
                return Reach.PARTIAL
            way, group = _way_of(node)
            if _kind(node) is CrossEntropy:
                continue
            if group is self._sums.group:
                if way in (AllGather, Gather):  # forward cut it
                    return Reach.PARTIAL
                if way in (Copy, AllReduce, Split):  # forward was a sum, or joined
                    continue
            todo += [following for following, _ in node.next_functions]
        return Reach.WHOLE

    def _is_share(self, leaf: Tensor) -> bool:
        """Return whether a leaf is a share of sequences that the model, or a stage, was given."""
        if id(leaf) in self._leaves.names or leaf.ndim < 2 or not leaf.numel():
            return False
        # A model that is called without ids is called with shares.
        sequence = find_shares(self._model)
        return sequence is not None and (sequence.length is None or sequence.is_share(leaf))

    def follow(self, roots: Iterable[tuple[Node, Reach]]) -> None:
        """Follow gradients from nodes back to the leaves, and note how they reach each.

        Raises:
            InvalidArgumentError: See `GradientSums.look`.
        """
        todo = [_Step(node, reach, None) for node, reach in roots]
        while todo:
            step = todo.pop()
            if (step.node, step.reach) in self._seen:
                continue
            self._seen.add((step.node, step.reach))
            for leaf in _leaves_of(step.node):
                outer = self._outer.get(id(leaf))
                if outer is None:
                    self._arrive(leaf, step)
                else:
                    todo.append(_Step(outer, step.reach, step))
            if _kind(step.node) is CheckpointFunction:
                self._follow_later(step.node, step.reach)
                continue
            after = self._after(step)
            todo += [
                _Step(following, after, step)
                for following, _ in step.node.next_functions
                if following is not None
            ]
        self._settle()

    def _arrive(self, leaf: Tensor, step: _Step) -> None:
        places = self._found.setdefault(id(leaf), _Places(leaf))
        places.reach |= step.reach
        places.steps.setdefault(step.reach, step)

    def _after(self, step: _Step) -> Reach:
        """Return what the gradients are that a node gives."""
        node, kind = step.node, _kind(step.node)
        if kind is None:
            return step.reach
        way, group = _way_of(node)
        if way is not None:
            return _WAYS[way] if group is self._sums.group else step.reach
        if issubclass(kind, SumTail):
            return Reach.WHOLE
        if issubclass(kind, CrossEntropy):
            return Reach.PARTIAL
        if not issubclass(kind, _SAME) and _holds(node, self._sums.group):
            raise InvalidArgumentError(
                f"{describe_rank()}: {own_class(self._model).__name__} uses the autograd function "
                f"{kind.__name__}, which holds the process group of tensor parallelism. Whether "
                "the gradients behind it are whole or partial sums cannot be told; communicate by "
                "scaletorch.dist.functional instead, or leave the module out of tensor parallelism"
            )
        if issubclass(kind, torch.autograd.Function) and not _is_known(kind):
            self._sums.note_opaque(kind)
        return step.reach

    def _follow_later(self, node: Any, reach: Reach) -> None:
        """Follow a reentrant checkpoint when it runs again, in backward: its graph is made then."""
        run: Callable[..., Any] = node.run_function

        def run_and_follow(*args: Any) -> Any:
            output = run(*args)
            walk = _Walk(self._sums, self._model, _Leaves(self._model))
            inputs = [x for x in args if isinstance(x, Tensor)]
            edges = [edge for edge, _ in node.next_functions]
            walk._outer = {id(x): e for x, e in zip(inputs, edges, strict=True) if e is not None}
            walk.follow([(x.grad_fn, reach) for x in tensors_in(output) if x.grad_fn])
            return output

        node.run_function = run_and_follow

    def _settle(self) -> None:
        """Note what was found.

        Raises:
            InvalidArgumentError: A leaf is reached both ways, or is partial and no parameter.
        """
        both: list[_Places] = []
        given: list[_Places] = []
        for key, places in self._found.items():
            if key in self._leaves.whole:
                reach = self._sums.reach(places.leaf) | places.reach
                if reach is Reach.BOTH:
                    both.append(places)
                else:
                    self._sums.note(places.leaf, reach)
            elif Reach.PARTIAL in places.reach and self._is_given(places.leaf):
                given.append(places)
        if both or given:
            raise InvalidArgumentError(self._message(both, given))

    def _is_given(self, leaf: Tensor) -> bool:
        """Return whether a leaf is neither the model's nor a share of sequences."""
        own = id(leaf) in self._leaves.names or self._is_share(leaf)
        return not own and leaf.numel() > 0  # else a mere placeholder

    def _message(self, both: Collection[_Places], given: Collection[_Places]) -> str:
        name = f"{describe_rank()}: {own_class(self._model).__name__}"
        if not both:
            place = self._place(next(iter(given)).steps[Reach.PARTIAL])
            return (
                f"{name} uses a tensor given to it, which requires a gradient, in a parallel "
                f"region or on this rank's share of the tokens ({place}), so each rank would have "
                "a term of its gradient; use it outside, or make it a parameter of the model"
            )
        shown = []
        for places in [*both][:3]:
            own = self._leaves.names[id(places.leaf)]
            where = {each: self._place(step) for each, step in places.steps.items()}
            inside = where.get(Reach.PARTIAL, "in another stage or forward")
            outside = where.get(Reach.WHOLE, "in another stage or forward")
            shown.append(f"'{own}' in a parallel region ({inside}) and outside of one ({outside})")
        more = f" and {len(both) - 3} more" if len(both) > 3 else ""
        return (
            f"{name} uses {'; '.join(shown)}{more}. Inside, or on shares of the tokens, each rank "
            "has a term of the gradient, and outside the whole of it: their sum over the ranks "
            "would be wrong either way. Use one parameter inside and another outside, or give the "
            "layers of that region the style 'replicate'"
        )

    def _place(self, step: _Step) -> str:
        """Say where a leaf is used: beside, or on the way to, which other parameter."""
        own, at = next(_leaves_of(step.node), None), step.before
        while at is not None:
            for node in _below(at.node):
                leaf = getattr(node, "variable", None)
                name = self._leaves.names.get(id(leaf))
                if leaf is not None and leaf is not own and name is not None:
                    return f"on the way to '{name}'"
            at = at.before
        return "on the way to the output"


def _kind(node: Node) -> type | None:
    """Return the autograd function of a node that is one's own, in Python; None for torch's."""
    kind: type | None = getattr(type(node), "_forward_cls", None)
    return kind


def _is_known(function: type) -> bool:
    """Return whether all that a function trains is among its inputs: torch's are, and ours."""
    ours = __name__.rpartition(".parallel.")[0]
    return function.__module__.startswith(("torch.", f"{ours}."))


def _way_of(node: Node) -> tuple[type | None, ProcessGroup | None]:
    """Return what a collective does to gradients, as a function of dist, and over which ranks."""
    way = getattr(node, "way", None)
    if isinstance(way, tuple) and way and way[0] in _WAYS:
        return way[0], (way[1] if len(way) == 2 else way[2])
    kind = _kind(node)
    if kind is not None and issubclass(kind, Enter):
        state: Any = node
        return (Reduce if state.sizes is None else ReduceScatter), state.group
    return None, None


def _holds(node: Node, group: ProcessGroup | None) -> bool:
    """Return whether a function keeps a process group, so that it may communicate over it."""
    kept = vars(node).values() if hasattr(node, "__dict__") else ()
    return group is not None and any(
        each is group or (isinstance(each, tuple | list) and any(x is group for x in each))
        for each in kept
    )


def _leaves_of(node: Node) -> Iterator[Tensor]:
    """Yield the leaf of a node, and those whose gradients a function makes by itself, later."""
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        yield leaf
    yield from getattr(node, "trained_later", ())


def _below(node: Node, depth: int = 3) -> Iterator[Node]:
    """Yield the nodes that a node's gradients go to, without following long ways."""
    for following, _ in node.next_functions:
        if following is not None:
            yield following
            if depth > 1 and len(following.next_functions) == 1:
                yield from _below(following, depth - 1)


def _trainable(model: nn.Module) -> Iterator[Tensor]:
    """Yield the trainable leaves of a model, shared ones again and again."""
    modules = [model]
    for module in modules:
        for _, leaf in _own_leaves(module):
            if leaf.requires_grad:
                yield leaf
        modules += [child for child in module._modules.values() if child is not None]


def _own_leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters as graphs have them, by name."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def _gathered(model: nn.Module) -> dict[Tensor, Tensor]:
    """Return what FSDP2 has in a forward for each of its sharded parameters: the whole one."""
    found: dict[Tensor, Tensor] = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        for each in getattr(group, "fsdp_params", ()):
            if hasattr(each, "_unsharded_param"):
                found[each.sharded_param] = each._unsharded_param
    return found
