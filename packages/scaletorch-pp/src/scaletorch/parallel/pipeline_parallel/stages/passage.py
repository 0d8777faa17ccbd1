"""How far a stage's forward has come, and what it has of other stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly
from .beside import Beside, Following, version_of


class Passage:
    """A forward of a stage: the model's own, of which the stage computes a part.

    That part begins where the last module of the stage before returns, with what the stage before
    has passed on, and ends where the stage's own last module returns. Modules before and after
    return stand-ins.

    Attributes:
        active: Whether one is running; a recomputed one is not.
        source: The stage, and what the stage before has passed on; None on the first stage.
        first: What the model was given as its first argument.
        furthest: The last stage of which it has met a module, in place or not.
        examined: Whether it is the first of its kind.
        gradients: Whether it was begun with gradients.
        followed: Whether there are stand-ins; else tensors of that form, whatever their values.
        delivered: Whether what was passed on has been returned to the model's code.
        latest: What the module of an earlier stage that was called last has returned.
        samples: What a layer has returned, by the list that it is in.
        kinds: What a layer of this stage has returned, by its class.
        inside: How many modules of this stage are running, one in another.
        left: The output of the one that was called last.
        over: Whether the rest is another stage's.
        direct: Whether the model's code has ever taken `forward` of one of this stage's modules.
        beside: What travels beside hidden states.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Begin with nothing known of a model whose stages have these modules."""
        self.beside = Beside(names)
        self.furthest = self.inside = 0
        self.active = self.examined = self.followed = self.delivered = self.over = False
        self.gradients = self.direct = False
        self._visits = 0  # of the last module of the stage before
        self.source: tuple[int, Any] = 0, None
        self._met = ""  # the first module of the last stage that it has met
        self.first: Any = None
        self.latest: Any = None
        self.left: Any = None
        self.samples: dict[str, Any] = {}
        self.kinds: dict[str, Any] = {}
        self._copy: Any = None  # of what was passed on, given to the model's code
        self._written: set[int] = set()  # stages at which code writes to what it is given
        self._skipping: set[int] = set()  # stages before which the last module is left out

    def start(
        self, stage: int, received: Any, siblings: str, *, examined: bool, followed: bool
    ) -> None:
        """Begin a forward.

        Args:
            stage: Its stage.
            received: What the stage before has passed on.
            siblings: The list that the last module of the stage before is in.
            examined: Whether it is the first of its kind.
            followed: Whether there are stand-ins.
        """
        self.active, self.furthest, self.inside, self._visits = True, 0, 0, 0
        self.source, self.gradients = (stage, received), torch.is_grad_enabled()
        self.samples = {} if stage == 0 else {**self.beside.forms, siblings: received}
        self.examined, self.followed = examined, followed
        self.delivered, self.over = stage == 0, False

    def reset(self) -> None:
        """Forget the forward that was running."""
        if self._copy is not None and any(versions(self._copy)):
            self._written.add(self.source[0])
        self.active = self.examined = self.over = False
        self.source = self.source[0], None
        self.first = self.latest = self.left = self._copy = None
        self.samples, self.kinds = {}, {}
        self.beside.reset()

    @property
    def past(self) -> bool:
        """Whether the model's own code runs after all modules of this stage."""
        return self.active and self.over

    @property
    def renews(self) -> bool:
        """Whether modules of earlier stages return each a stand-in of its own.

        By these it shows which one was called last.
        """
        return self.examined or self.source[0] in self._skipping

    def require_seen(self, model: nn.Module) -> None:
        """Check that what the stage passes on will be seen in later forwards too.

        Raises:
            InvalidArgumentError: The model is compiled as a whole, so that it will not.
        """
        self.beside.require_seen(model)
        if self.direct and model._compiled_call_impl is not None:
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's code calls forward of its layers, and is compiled "
                "as a whole, so that what they return is not seen: let it call the layers "
                "themselves, layer(x), or compile them one by one"
            )

    def come_back(self) -> None:
        """Note that a module of this stage is called; maybe once more, after the last of them."""
        if self.over:
            self.over = False
            self.beside.note(self.left)

    def comes(self) -> bool:
        """Return whether this call of the last module of the stage before returns what that gave.

        Layers may run in a loop; it is the last call then.
        """
        self._visits += 1
        return self._visits >= self.beside.visit

    def deliver(self, where: str) -> Any:
        """Return what the stage before has passed on, where its last module would return it.

        Raises:
            InvalidArgumentError: It has been returned already.
        """
        if self.delivered:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward calls it more than once; a "
                "pipeline passes on what the last module of a stage returns, once: put what is run "
                "several times into one layer"
            )
        self.delivered = True
        stage, received = self.source
        # It may be written to: whether it is, the first forward of a kind tells.
        if self.examined or stage in self._written:
            self._copy = map_tensors(Tensor.clone, received)
            self.beside.note(self._copy)
            return self._copy
        return map_tensors(_alias, received)

    def take(self, value: Any) -> Any:
        """Return a value; for that of the module that was called last, what was passed on.

        So it is where the last module of the stage before is left out.
        """
        if self.delivered or value is not self.latest or not self.renews:
            return value
        self._skipping.add(self.source[0])
        return self.deliver("")

    def reach(self, stage: int, where: str) -> None:
        """Note that the forward has come to a module with parameters.

        Args:
            stage: The module's stage.
            where: Its name and place.

        Raises:
            InvalidArgumentError: It was further already: it runs a module of one stage twice.
        """
        if stage < self.furthest:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward comes back to it after "
                f"modules of stage {self.furthest}: {self._met}. A pipeline runs each stage once. "
                "If one of the two is only registered where it is not called, name what comes "
                "before the layers in Split(first=...) and what comes after them in Split(last="
                "...); if layers are run several times, have all of them on one stage, by "
                "Split(points=(...)), or use no pipeline (pp_size=1)"
            )
        if stage > self.furthest:
            self.furthest, self._met = stage, where


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
def hooks_kept(model: nn.Module, crossed: Iterable[str]) -> Iterator[None]:
    """Refuse, in the forwards of this context, backward hooks that would never run.

    A full backward hook waits for the gradients of its module's output and of its input. No stage
    has both, if they are on two. If the input needs no gradient, it runs where the output is.

    Args:
        model: The model.
        crossed: Names of modules whose input and output are on two stages.

    Raises:
        InvalidArgumentError: One has such a hook, and is given a tensor that requires a gradient.
    """
    modules = [(name or "the model", model.get_submodule(name)) for name in crossed]
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


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, also if its calls are surrounded."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def versions(value: Any) -> list[int]:
    """Return numbers that change when tensors are changed in place."""
    return [*map(version_of, tensors_in(value))]


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor itself as another one: reentrant recomputation takes its place."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor
