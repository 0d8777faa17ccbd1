"""Gradient hooks, which finish the reduction at the end of backward, and their parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ....dist.building import one_per_process, tensors_in
from ....dist.errors import MismatchError, NonFiniteError, ScaletorchError, StateError
from ...pg_manager import describe_rank
from ..parameters import Named, shorten
from .manager import BucketManager

_OUTSIDE = -1  # torch's number for "no backward is running on this thread"


class GradientSync:
    """Synchronises the gradients of one wrapped module at the end of backward calls.

    The hooks hold it by weak references only, so it dies with its wrapper, and the hooks with it.

    A reentrant checkpoint runs a backward inside the backward. The first hook, on the module's
    output, runs in the outermost backward and queues a callback for its end.

    Args:
        managers: The buckets of each group of ranks. A backward that reaches parameters of one
            finishes all, as it does on other ranks.
        overlap: Whether buckets leave during backward, or all at its end.
    """

    def __init__(self, managers: Iterable[BucketManager], *, overlap: bool) -> None:
        self.enabled = True
        self.completed = 0  # synchronisations so far
        self.held: list[NonFiniteError] | None = None  # collects errors for the caller
        self.managers = tuple(managers)
        self.groups = tuple(manager.reduction.group for manager in self.managers)
        self._overlap = overlap
        self._touched = False
        self._root: int | None = None
        self._tasks: set[int] = set()
        self._shares_group = False
        self._attached: list[BucketManager] = []
        self._alive = _alive()
        self._serial = next(one_per_process("gradient_sync_numbers", itertools.count))

    def attach(self, managers: Iterable[BucketManager]) -> None:
        """Register the hooks of these buckets' parameters; other buckets are never summed."""
        this = weakref.ref(self)
        for manager in (each for each in managers if each not in self._attached):
            at, handles = self.managers.index(manager), []
            for slot in manager.slots:
                before = partial(_call, this, GradientSync.gradient_coming, at, slot.index)
                after = partial(_call, this, GradientSync.gradient_added, at, slot.index)
                handles.append(slot.parameter.register_hook(before))
                handles.append(slot.parameter.register_post_accumulate_grad_hook(after))
            weakref.finalize(self, remove_hooks, handles).atexit = False
            self._attached.append(manager)
            self._alive.add(self)

    @property
    def syncs(self) -> bool:
        """True if a backward that ends now is synchronised."""
        return self.enabled or any(manager.eager for manager in self.managers)

    def begin_forward(self) -> None:
        """Recover from a backward that raised since the last forward."""
        if self._root is None or torch._C._current_graph_task_id() != _OUTSIDE:
            return
        if self._touched:
            self.reset()
        else:
            self._close()

    def watch(self, output: Any) -> None:
        """Hook the tensors of a forward's output."""
        if not self._attached:
            return
        this = weakref.ref(self)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(_call, this, GradientSync._enter))

    def finish_if_due(self) -> None:
        """Synchronise now, even if this rank has no gradient, unless synchronisation is off."""
        if self._attached and self.syncs:
            for manager in self._attached:
                manager.open()
            errors: list[ScaletorchError] = []
            self._finish(errors)
            raise_first(errors)

    def reset(self) -> None:
        """Forget all gradients and all reductions in flight."""
        self._forget_backward()
        for manager in self.managers:
            manager.reset()
            manager.clear()

    def gradient_coming(self, at: int, index: int, _grad: Tensor) -> None:
        """Handle the gradient of a manager's parameter just before autograd adds it."""
        self._enter()
        self.managers[at].slots[index].before_accumulation()

    def gradient_added(self, at: int, index: int, _parameter: Tensor) -> None:
        """Handle the gradient of a manager's parameter just after autograd added it."""
        manager = self.managers[at]
        slot = manager.slots[index]
        slot.require_unchanged()
        if not slot.after_accumulation(manager.place):
            return
        self._touched = True
        if not self.syncs:
            return
        if slot.parameter.grad is not None and slot.parameter.grad.requires_grad:
            raise StateError(
                f"{describe_rank()}: the gradient of {slot.name} has a graph of its own "
                "(create_graph=True), which a sum over ranks would lose: use torch.autograd.grad "
                "instead, or run this backward in no_sync()"
            )
        # The user's hooks that run after this one see the gradient, and may change it.
        watched = len(slot.parameter._post_accumulate_grad_hooks or ()) > 1
        manager.mark_ready(index, self._overlap and not self._shares_group and not watched)

    def _enter(self, _grad: Tensor | None = None) -> None:
        """Queue the end of the running backward, once; also a hook of the outputs."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        # The first call comes from the outermost backward: its hook on the output runs before any
        # other node, and so before a checkpoint that starts a backward of its own.
        if self._root is None:
            self._root = task
            # Another wrapper's calls on the same group could come between ours in another order on
            # another rank: then all calls are made at the end, wrapper by wrapper.
            others = [group for sync in self._alive if sync is not self for group in sync.groups]
            self._shares_group = any(group is ours for group in others for ours in self.groups)
            for manager in self._attached:
                manager.open()
        # Each backward gets a callback, also inner ones: if the root has raised, its own callback
        # never runs, and the callback of the next backward is the first to notice.
        self._tasks.add(task)
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(partial(self._leave, task))

    def _leave(self, task: int) -> None:
        """Finish when the outermost backward ends, all wrappers in one order."""
        if task not in self._tasks:
            return  # forgotten in between, as by reset()
        if task != self._root:
            if torch._C._current_autograd_node() is not None:
                return  # a node is running: this backward was nested, the outer one goes on
            self.reset()
            raise StateError(
                f"{describe_rank()}: an earlier backward raised and left incomplete gradients; "
                "they are None now: start this step again (after an error, call reset())"
            )
        # Callbacks run in the order of the wrappers' first gradients, which may differ between
        # ranks. So the first callback ends all wrappers, in the order of their numbers.
        ending = [sync for sync in self._alive if sync._root == task]
        errors: list[ScaletorchError] = []
        for sync in sorted(ending, key=lambda sync: sync._serial):
            sync._end(errors)  # all, even if one has errors: other ranks end theirs too
        raise_first(errors)

    def _end(self, errors: list[ScaletorchError]) -> None:
        if self._touched and self.syncs:
            self._finish(errors)
        else:
            self._close()

    def _finish(self, errors: list[ScaletorchError]) -> None:
        self._forget_backward()
        # All managers, even after an error: the ranks of their groups may have none, and wait.
        for manager in self._attached:
            for finish in (manager.require_unchanged, manager.finish):
                try:
                    finish()
                except NonFiniteError as error:
                    (errors if self.held is None else self.held).append(error)
                except (MismatchError, StateError) as error:
                    errors.append(error)
        self.completed += 1

    def _close(self) -> None:
        self._forget_backward()
        for manager in self._attached:
            for slot in manager.slots:
                slot.close()

    def _forget_backward(self) -> None:
        self._touched = False
        self._root = None
        self._tasks.clear()


def _alive() -> weakref.WeakSet[GradientSync]:
    """Return the attached objects of this process, including those of other copies of this package.

    So `groups`, `managers[…].slots[…].parameter`, `_root`, `_serial` and `_end` are the interface
    between versions of this package.
    """
    return one_per_process("gradient_syncs", weakref.WeakSet)


def refuse_taken(parameters: Named) -> None:
    """Refuse parameters that another live wrapper has, or whose gradients go to `main_grad`."""
    taken = {
        id(slot.parameter)
        for other in _alive()
        for manager in other.managers
        for slot in manager.slots
    }
    names = [name for name, parameter in parameters if id(parameter) in taken]
    if names:
        raise StateError(
            f"{describe_rank()}: {shorten(names)} would be synchronised twice: a "
            "data-parallel wrapper has them already; use that wrapper, or delete it first"
        )
    names = [name for name, parameter in parameters if hasattr(parameter, "main_grad")]
    if names:
        raise StateError(
            f"{describe_rank()}: the gradient of {names[0]} goes to its main_grad, past this "
            "wrapper, which would synchronise nothing: sum main gradients over the group "
            "yourself, or remove them"
        )


class WrappedParameters:
    """The parameters that a module had when it was wrapped; None for a deep copy."""

    def __init__(self, parameters: Named | None) -> None:
        self._copied = parameters is None
        # The parameters are kept alive, so that the ids stay theirs.
        self._synchronised = {id(p): p for _, p in parameters or () if p.requires_grad}

    def refuse_others(self, module: nn.Module) -> None:
        """Refuse parameters whose gradients would not be summed: late ones, and those of copies."""
        known = self._synchronised
        if all(id(p) in known for p in _trainable(module)):
            return
        if self._copied:
            raise StateError(
                f"{describe_rank()}: this is a deep copy of a wrapped model, for evaluation and "
                "averages, and gradients of it would be summed over no ranks: call "
                "requires_grad_(False) on it or run it in torch.no_grad(); to train another model, "
                "wrap or parallelize a plain one"
            )
        late = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in known]
        if late:
            raise StateError(
                f"{describe_rank()}: {shorten(late)} came after the module was wrapped (or was "
                "frozen then; adapters, a new head and load_state_dict(assign=True) come late), so "
                "its gradient would not be synchronised, nor would an optimizer made before update "
                "it: change the module first (get_peft_model of the plain model), then wrap or "
                "parallelize it; or copy values into the parameters it has"
            )


def _trainable(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield all that require grad, shared ones repeatedly; faster than `parameters`."""
    modules = [module]
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                yield parameter
        modules += [child for child in module._modules.values() if child is not None]


def _call(this: weakref.ref[GradientSync], method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method, unless the synchronisation is gone: hooks do not keep it alive."""
    sync = this()
    return None if sync is None else method(sync, *arguments)


def remove_hooks(handles: Iterable[Any]) -> None:
    """Remove hooks by their handles."""
    for handle in handles:
        handle.remove()


def raise_first(errors: list[ScaletorchError]) -> None:
    """Raise the first error, if there is one."""
    if errors:
        raise errors.pop(0)  # not kept in the list: its traceback holds this frame
