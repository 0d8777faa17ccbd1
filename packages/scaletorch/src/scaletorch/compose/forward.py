"""State of a parallelized model: how to call it, its grid, and what was seen of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..dist.errors import InvalidArgumentError, StateError
from ..parallel.pg_manager import ProcessGroupManager, get_process_group_manager
from ..parallel.pipeline_parallel import PipelineParallel
from .balance import RouterLoss
from .plain import Plain, base_of

Counting = Callable[[Tensor], Tensor]  # ids [B, L] -> positions [B, L]

_PASSING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(slots=True)
class Terms:
    """All that a training step has to know of a model.

    Attributes:
        name: The class of the plain model.
        arguments: Of its forward, by name; whether each has to be given.
        takes_any: Its forward takes arguments of any name.
        has_batch_norms: Its statistics may have to be of the whole batch.
        cp_layout: The order of positions over cp ranks; None if there is one rank.
        manager: The grid; None if the model was put together by hand.
        shares_sequences: Each tp rank holds a shard of every sequence between layers.
        shares_in_layers: That is so between the layers that its plan names, and nowhere else.
        counts_of_ids: It counts positions itself, of whole ids.
        counting: How it counts those of whole rows of ids, if these are not 0, 1, 2, ... and
            sequences are divided.
        recomputes: Layers run again in backward.
        router_loss: The auxiliary loss that the model's config asks for.
        keeps_cache: Its config asks for a cache of keys and values, and its forward can be told not
            to keep one.
        real_positions: Which positions of this rank are no padding in the step; None is all.
        counts_routing: The tokens of each forward that choose an expert are counted.
        looked: Ranks were found to hold the same batch.
        several: Some rank has several micro-batches in the step.
        counted: How many losses a loss_fn has counted lately for each token of a batch, or row of
            another; None before the first step.
        correction: By what the last step has multiplied its gradients, when all losses of a loss_fn
            had been counted.
        seen: How far first steps have been looked at: 1 with one micro-batch, 2 with several.
        originals: The plain model's parameters, as code may hold them that had them before.
        plain: The plain model, without memory for its weights; None if it is not to be rehearsed.
        rehearses: Whether the next training step is rehearsed; all ranks agree in `ready`, but for
            the first one.
        rehearsed: The code of the loss functions that were.
    """

    name: str
    arguments: Mapping[str, bool]
    takes_any: bool
    has_batch_norms: bool = False
    cp_layout: str | None = None
    manager: ProcessGroupManager | None = None
    shares_sequences: bool = False
    shares_in_layers: bool = False
    counts_of_ids: bool = False
    counting: Counting | None = None
    recomputes: bool = False
    router_loss: RouterLoss | None = None
    keeps_cache: bool = False
    real_positions: Tensor | None = None
    counts_routing: bool = False
    looked: bool = False
    several: bool = False
    counted: float | None = None
    correction: float = 1.0
    seen: int = 0
    originals: Mapping[str, ref[Tensor]] = field(default_factory=dict)
    plain: Plain | None = None
    rehearses: bool = False
    rehearsed: set[object] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> Terms:
        """Return the terms of a copy, on the same grid."""
        return replace(self, rehearsed={*self.rehearsed})

    def takes(self, argument: str) -> bool:
        """Return whether the forward can be given this argument by keyword."""
        return self.takes_any or argument in self.arguments

    def needs(self, argument: str) -> bool:
        """Return whether the forward cannot be called without it."""
        return self.arguments.get(argument, False)


_TERMS = "_scaletorch_terms"
_rehearses: ContextVar[bool] = ContextVar("_rehearses", default=False)


def rehearses() -> bool:
    """Return whether a rehearsal runs, of which nothing counts."""
    return _rehearses.get()


@contextmanager
def rehearsing() -> Iterator[None]:
    """Let a rehearsal run."""
    token = _rehearses.set(True)
    try:
        yield
    finally:
        _rehearses.reset(token)


def read_terms(model: nn.Module) -> Terms:
    """Read how a plain module wants to be called, and what it is made of."""
    model = base_of(model)
    parameters = _signature(model)
    arguments = {
        name: parameter.default is parameter.empty
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    has_batch_norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    terms = Terms(type(model).__name__, arguments, takes_any, has_batch_norms)
    asked = getattr(getattr(model, "config", None), "use_cache", False)
    terms.originals = {name: ref(p) for name, p in model.named_parameters()}
    terms.keeps_cache = bool(asked) and "use_cache" in arguments
    return terms


def keep_terms(model: nn.Module, terms: Terms) -> None:
    """Remember the terms of a parallelized model."""
    vars(model)[_TERMS] = terms  # copied with it


def terms_of(model: nn.Module) -> Terms:
    """Return the terms of a parallelized model; of one that was put together by hand, its own."""
    if _TERMS not in vars(model):
        plain: Any = model
        while isinstance(getattr(plain, "module", None), nn.Module):
            plain = plain.module
        keep_terms(model, read_terms(plain))
    terms: Terms = vars(model)[_TERMS]
    return terms


def pipeline_of(model: Any) -> PipelineParallel:
    """Return the pipeline within wrappers."""
    while not isinstance(model, PipelineParallel):
        model = model.module
    return model


def wait_for_parameters(model: nn.Module) -> None:
    """Wait until all parameters are here that a sharded optimizer fetches behind forwards."""
    parallel: Any = model
    if getattr(model, "optimizer_shards", None) is not None:
        parallel.wait_for_parameters()


def manager_of(model: nn.Module, manager: ProcessGroupManager | None) -> ProcessGroupManager:
    """Return the grid that a call works on: the given one, or the model's, or the current one.

    Args:
        model: What `parallelize` returned, or a model that was put together by hand.
        manager: What the caller passed; None asks the model.

    Raises:
        InvalidArgumentError: Something that is no manager, or no module, or a compiled one.
        StateError: Nobody knows a grid.
    """
    require_manager(manager)
    require_own_names(model)
    if manager is None and isinstance(model, nn.Module):
        manager = terms_of(model).manager or get_process_group_manager()
    elif manager is None:
        raise InvalidArgumentError(
            f"model must be what parallelize returned, got {type(model).__name__}"
        )
    if manager is None:
        raise StateError(
            f"{type(model).__name__} was not parallelized, and there is no process group manager: "
            "pass manager=..., or call setup_process_group_manager(...) first"
        )
    return manager


def require_own_names(model: object) -> None:
    """Refuse what `torch.compile` returns of a model: it has other names, and other hooks.

    Raises:
        InvalidArgumentError: It is that.
    """
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        raise InvalidArgumentError(
            "torch.compile(model) returns a module around the model, in which every parameter has "
            "another name: compile in place, before or after parallelize, each layer "
            "(layer.compile()) or all of it (model.compile())"
        )


def require_manager(manager: object, *, needed: bool = False) -> None:
    """Refuse anything but a manager, or None unless it is needed.

    Raises:
        InvalidArgumentError: It is none.
    """
    if not isinstance(manager, ProcessGroupManager) and (needed or manager is not None):
        raise InvalidArgumentError(
            "manager must be a ProcessGroupManager, as setup_process_group_manager returns it; "
            f"it is a {type(manager).__name__}"
        )


def _signature(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of forward, also if subclasses pass all on to it."""
    own = [vars(model)["forward"]] if "forward" in vars(model) else []
    bases = [base for base in type(model).__mro__ if "forward" in vars(base)]
    forwards = [*own, *(MethodType(vars(base)["forward"], model) for base in bases)]
    parameters: Mapping[str, inspect.Parameter] = {}
    for forward in forwards:
        parameters = inspect.signature(forward).parameters
        if not {parameter.kind for parameter in parameters.values()} >= _PASSING:
            break
    return parameters
