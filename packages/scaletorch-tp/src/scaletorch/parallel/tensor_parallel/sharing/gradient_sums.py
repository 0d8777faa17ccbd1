"""Sum partial gradients over the tensor-parallel ranks, as found in the autograd graph.

Inside a parallel region, or on a sequence shard, the gradient of a replicated parameter is partial;
outside it is full. A parameter with only partial gradients in the graph of a forward is summed over
the ranks, one with only full gradients is not, and one with both is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ....dist import all_reduce
from ....dist.building import sum_dtype, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import runs_as_stages, uncompiled
from ...placement import ModelView
from ..regions.surround import not_pickled
from .gradient_paths import Leaves, Reach, Walk, trainable


class GradientSums:
    """Forward hook that finds the partial gradients of replicated parameters and sums them.

    It inspects graphs until it knows all kinds, and again if other parameters become trainable.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group  # ranks of the tensor-parallel axis
        self.deferred = False  # whether the caller sums, once for several backward passes
        self._reached: MutableMapping[Tensor, Reach] = WeakTensorKeyDictionary()
        self._hooked: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
        self._looked: dict[int, ref[Tensor]] = {}  # trainable leaves of inspected models
        self._unseen = False  # whether some of them got no gradient
        self._opaque: set[str] = set()  # functions that may use parameters unseen
        self._seen_once = False
        self.reruns = False  # whether reentrant checkpoints were followed
        self._later: list[tuple[nn.Module, list[Node]]] = []  # outputs to inspect if needed

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSums:
        """Return a fresh hook for the copied model, with the same group."""
        return GradientSums(self.group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling, with the error of the layers, which would be pickled after the hooks."""
        raise not_pickled("model")

    @uncompiled
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Inspect the graph of a model's output, unless the model runs in stages."""
        if not runs_as_stages(model):
            self.look(model, output)

    def look(self, model: nn.Module, output: Any) -> None:
        """Inspect the graph of a model's or stage's output, unless all parameters are known."""
        later = self.deferred and self._seen_once
        if not torch.is_grad_enabled() or (later and not self._unseen):
            return
        tensors = [*tensors_in(output)] or [*tensors_in(getattr(output, "__dict__", {}))]
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if not tensors:
            self._opaque.add(f"the output, a {type(output).__name__}")
        if not nodes:
            return
        if later and not self.reruns:  # a checkpoint must be found before its backward
            self._later.append((model, nodes))  # inspected if an unknown parameter gets a gradient
        elif self._unseen or not all(
            # Not a new leaf with the id of a freed one.
            self._looked.get(id(leaf), lambda: None)() is leaf
            for leaf in trainable(model)
        ):
            self._looked.update((id(leaf), ref(leaf)) for leaf in trainable(model))
            self._follow(model, nodes)

    def look_again(self) -> None:
        """Inspect the next forwards again, even if all kinds are known."""
        self._looked, self._seen_once = {}, False

    def remove(self) -> None:
        """Remove the hooks of the parameters; another `GradientSums` takes over."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _follow(self, model: nn.Module, nodes: Iterable[Node]) -> None:
        walk = Walk(model, self)
        walk.follow([(node, walk.reach_of(node)) for node in nodes])
        unseen = [leaf for leaf in walk.leaves.whole.values() if self.reach(leaf) is Reach.NOT]
        for leaf in unseen:
            self._hook(leaf)
        self._unseen = bool(unseen)

    def _hook(self, leaf: Tensor) -> None:
        if leaf not in self._hooked:
            self._hooked[leaf] = leaf.register_hook(partial(self._arrived, TensorWeakRef(leaf)))

    def reach(self, parameter: Tensor) -> Reach:
        """Return the kinds of gradients of a parameter seen so far."""
        return self._reached.get(parameter, Reach.NOT)

    def note(self, parameter: Tensor, reach: Reach) -> None:
        """Record the kind of a parameter's gradient, found on this or another rank."""
        self._reached[parameter] = reach = self.reach(parameter) | reach
        if reach is Reach.PARTIAL:
            self._hook(parameter)
        elif reach is Reach.WHOLE and parameter in self._hooked:
            self._hooked.pop(parameter).remove()

    def note_opaque(self, function: type) -> None:
        """Record a third-party function, which may use parameters that are not its inputs."""
        self._opaque.add(f"{function.__module__}.{function.__qualname__}")

    def refuse_hidden(self, parameter: str) -> None:
        """Refuse a gradient that no inspected graph contains, if a function may hide parameters."""
        if self._opaque:
            raise InvalidArgumentError(
                f"{describe_rank()}: the autograd graph does not show where the gradient of a "
                f"parameter ({parameter}) comes from (perhaps {', '.join(sorted(self._opaque))}) "
                "and whether it is partial; pass the parameter to that function as an input"
            )

    @contextmanager
    def summed_later(self) -> Iterator[None]:
        """Leave gradient sums of backward passes in this context to the caller."""
        self.deferred = True
        try:
            yield
            self._seen_once = True
        finally:
            self.deferred = False
            self._later.clear()

    def _arrived(self, parameter: TensorWeakRef, gradient: Tensor) -> Tensor | None:
        """Return the gradient summed over ranks if it is partial and not deferred, else None."""
        leaf = parameter()
        if leaf is not None and self.reach(leaf) is Reach.NOT:
            later, self._later = self._later, []
            for model, nodes in later:
                self._follow(model, nodes)
            if later and self.reruns:
                self._opaque.add("a reentrant checkpoint, whose backward had begun")
        if leaf is None or self.deferred:
            return None
        if self.reach(leaf) is Reach.NOT:
            self.refuse_hidden(f"shape {tuple(gradient.shape)}")
        if self.reach(leaf) is not Reach.PARTIAL:
            return None
        dtype = sum_dtype(gradient.dtype)  # backends may round 16-bit sums at every rank
        total = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
        all_reduce(total, group=self.group)
        return total.to(gradient.dtype)


def infer_sums(view: ModelView, group: ProcessGroup | None) -> None:
    """Set up the sums of partial gradients of a model's replicated parameters."""
    for module in view.names:  # replace hooks of submodules sharded before
        for key, hook in [*module._forward_hooks.items()]:
            if isinstance(hook, GradientSums):
                hook.remove()
                del module._forward_hooks[key]
    view.model.register_forward_hook(GradientSums(group))


def find_sums(model: nn.Module) -> GradientSums | None:
    """Return the `GradientSums` of a model, or of the model that it wraps; None without any."""
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, GradientSums)), None)


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> trainable parameter that is replicated on every rank."""
    whole = Leaves(model).whole
    return {name: leaf for name, leaf in model.named_parameters() if id(leaf) in whole}
