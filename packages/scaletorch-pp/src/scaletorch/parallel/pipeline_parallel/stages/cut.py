"""The cut: modules of other stages are replaced, in place, by pass-through placeholders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.dropout import _DropoutNd

from ....dist import group_ranks
from ....dist.building import agree, map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import ModuleWrapper
from ...pg_manager.building import first_unused_number
from ..runtime.forms import PLAIN
from ..schedules.builders import AnySchedule, stages_of
from ..splitting.modules import has_parameters, is_plain_layer, parameter_facts, siblings_of
from ..splitting.split import Placement, Split, place
from .passage import Passage, Passages
from .stand_ins import (
    StandIn,
    cast,
    has_stand_ins,
    is_data,
    kind_of,
    runs_plain_forward,
    standing_like,
    twin_of,
)


class PassThrough(nn.Module):
    """A placeholder for a module of another stage.

    The last module of the previous stage returns the hidden states received from that stage. Any
    other returns stand-ins, with the form of the first source that applies: the output of a module
    of the same list, the rows of an embedding, the output of an `nn.Linear`, the output of its own
    forward (for ids, for no tensors, and of torch's own layers), the hidden states, or the first
    argument. Outside a pipeline's forward it returns the first argument.

    Plain attributes of the module and its class (numbers, strings, None) are kept, since forwards
    read them. While a forward runs, the module's twin provides its tensors, submodules and methods.

    Args:
        replaced: The module to replace; no reference to it is kept.
        where: Its name and stage, for messages.
        stage: Its stage.
        passages: The forwards of the rank's stages.
        siblings: The name of the list that holds it; its own name if no list does.
        ends: Whether it is the last module of its stage.
        shared: `id`s of objects that modules on all stages hold; the twin keeps them.
    """

    _twin: nn.Module

    def __init__(
        self,
        replaced: nn.Module,
        where: str,
        stage: int = 0,
        passages: Passages | None = None,
        siblings: str = "",
        *,
        ends: bool = False,
        shared: Container[int] = (),
    ) -> None:
        super().__init__()
        self._stage, self._siblings, self._ends = stage, siblings, ends
        self._passages = passages or Passages()
        self._counts = has_parameters(replaced)
        self._kind = kind_of(replaced)
        # SyncBatchNorm communicates, so its forward is not run to find the output's form.
        self._plain = is_plain_layer(replaced) and not isinstance(replaced, nn.SyncBatchNorm)
        self._where, self._name = where, where.partition(" ")[0]
        embeds = hasattr(replaced, "num_embeddings")
        self._row: int = getattr(replaced, "embedding_dim", 0) if embeds else 0
        self._width = replaced.out_features if isinstance(replaced, nn.Linear) else None
        self._idles = isinstance(replaced, nn.Identity | _DropoutNd)
        self._runs_plain_forward = runs_plain_forward(replaced)
        self.training = replaced.training
        vars(self)["_twin"] = twin_of(
            replaced, self._passages, lambda value: id(value) in shared or is_data(value)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden states or a stand-in for the module's output.

        Each layer of another stage has a placeholder, so calls skip `nn.Module`'s hooks for speed.
        """
        passage = self._passages.running
        value = args[0] if args else next(iter(kwargs.values()), None)
        if passage is None:
            return self._arrived(value)
        if self._counts and self._stage != passage.furthest:
            passage.reach(self._stage, self._where)
        distance = self._stage - passage.stage
        if distance > 0:
            passage.offer(self._name, args, kwargs)
        elif distance == -1 and self._ends:
            return passage.deliver(self._where)
        if self._idles and not (self.training and getattr(self, "p", False)):
            return value
        sample = passage.samples.get(self._siblings)
        if sample is None and distance > 0:  # one class, one form of output
            sample = passage.kinds.get(self._kind)
        if isinstance(value, StandIn) and isinstance(sample, Tensor):
            same = value.shape == sample.shape and value.dtype == sample.dtype
            if same and (value.requires_grad or not (self._counts and torch.is_grad_enabled())):
                return value
        return self._stand_in(passage, sample, value, args, kwargs)

    forward = __call__

    def _arrived(self, value: Any) -> Any:
        """Return the received hidden states again if a backward recomputes a layer's forward."""
        source = value.source if isinstance(value, StandIn) else None
        return source[1] if self._ends and source and source[0] == self._stage + 1 else value

    def _stand_in(
        self,
        passage: Passage,
        sample: Any,
        value: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        known = passage.left if passage.over else passage.source[1]
        given = [*tensors_in(value)]
        tensors = [*given, *tensors_in(known)]
        if not tensors:
            return value
        base = next((tensor for tensor in tensors if tensor.requires_grad), tensors[0])
        stand_in = partial(standing_like, forward=self._passages, base=base, trained=self._counts)
        if sample is not None:
            return stand_in(sample)
        if self._row and isinstance(value, Tensor) and not isinstance(value, StandIn):
            return stand_in(self._rows(value, passage.first, next(tensors_in(known), value)))
        if self._width is not None and isinstance(value, Tensor):
            shape = (*value.shape[:-1], self._width)
            return stand_in(torch.empty(shape, dtype=value.dtype, device="meta"))
        takes_ids = not any(tensor.is_floating_point() for tensor in given)
        if (takes_ids or self._plain) and self._runs_plain_forward:
            with suppress(Exception):  # it may read missing values, or wait for other ranks
                output = self._ready().forward(*args, **kwargs)
                return stand_in(map_tensors(Tensor.detach, output))
        if value is passage.first or not given:
            # Layers may return more than they take, but mostly return a dict as they took it.
            return stand_in(known if isinstance(known, dict) else next(tensors_in(known), base))
        # The output of a module with parameters requires grad even if its inputs do not.
        trains = self._counts and base.requires_grad
        same = not trains or any(tensor.requires_grad for tensor in given)
        return value if has_stand_ins(value) and same else stand_in(value)

    def _rows(self, ids: Tensor, first: Any, like: Tensor) -> Tensor:
        """Return the form of embedded ids, of a shard's length if hidden states hold a shard."""
        shape = tuple(ids.shape)
        if isinstance(first, Tensor) and not _has_dims_of(like, first):
            shape = tuple(like.shape[: ids.ndim]) if ids is first else (1,) * ids.ndim
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return torch.empty((*shape, self._row), dtype=dtype, device="meta")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PassThrough:
        """Cast the tensors of the module's twin too."""
        cast(self._twin, self._passages, fn)
        return self

    def _ready(self) -> nn.Module:
        """Return the module's twin, moved to the device of the running forward."""
        passages, own = self._passages, next(tensors_in(self._twin._parameters), None)
        first = None if passages.running is None else passages.running.first
        given = next(tensors_in((passages.source, first)), None)
        if given is not None and own is not None and own.device != given.device:
            cast(self._twin, passages, lambda tensor: torch.empty_like(tensor, device=given.device))
        return self._twin

    def train(self, mode: bool = True) -> PassThrough:
        """Set the mode of the module's twin too."""
        for module in self._twin.modules():
            module.training = mode
        return super().train(mode)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set plain attributes (except `training`) on the module's twin."""
        if "_twin" in vars(self) and isinstance(value, PLAIN) and name != "training":
            vars(self._twin)[name] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module's twin; the error names the module's stage."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            # In a forward the twin answers for everything; outside, for plain public values alone.
            twin, passages = vars(self).get("_twin"), vars(self).get("_passages")
            if passages is not None and passages.running and not name.startswith("__"):
                known = getattr(self._ready(), name, self)
                if known is not self:
                    return known
            else:
                known = vars(twin).get(name, inspect.getattr_static(type(twin), name, self))
                if not name.startswith("_") and isinstance(known, PLAIN):
                    return known
            where = vars(self).get("_where", "a module of another stage")
            message = f"{where}, and its attribute {name!r} is not available here"
            raise AttributeError(message) from error

    def extra_repr(self) -> str:
        """Return the name and stage of the module that it replaces."""
        return self._where


@contextmanager
def forms_cast(passing: Iterable[PassThrough], fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Cast the stand-in tensors of twins within this context; `_apply` casts them for good."""
    passing = list(passing)
    modules = [module for placeholder in passing for module in vars(placeholder)["_twin"].modules()]
    tensors = [own for module in modules for own in (module._parameters, module._buffers)]
    earlier = [dict(own) for own in tensors]
    try:
        for placeholder in passing:
            placeholder._apply(fn)
        yield
    finally:
        for own, old in zip(tensors, earlier, strict=True):
            own.update(old)


def _has_dims_of(hidden: Tensor, ids: Tensor) -> bool:
    """Return whether hidden states have at least a position for each id, in any run of dims."""
    count, starts = ids.numel(), range(hidden.ndim - ids.ndim + 1)
    enough = hidden.ndim == ids.ndim + 1 and hidden.shape[:-1].numel() >= count
    return enough or any(hidden.shape[i : i + ids.ndim].numel() == count for i in starts)


class Chunks:
    """The stages of one rank in one model; the modules of one stage, or of all, are in place."""

    def __init__(self, stages: tuple[int, ...], switches: list[_Switch]) -> None:
        self.selected = 0  # index of the selected chunk; 0 if all are in place
        self._stages = stages
        self._switches = switches if len(stages) > 1 else []
        self._all = True

    def select(self, chunk: int) -> None:
        """Keep one stage's modules in place, and placeholders for the rank's other stages."""
        if self._all:  # modules may have replaced others since, such as adapters
            self._switches = [(s, n, home, s[n], p) for s, n, home, _, p in self._switches]
        self.selected, self._all = chunk, False
        for siblings, name, home, module, passing in self._switches:
            siblings[name] = module if home == self._stages[chunk] else passing

    def restore(self) -> None:
        """Put back the modules of all the rank's stages."""
        for siblings, name, _, module, _ in () if self._all else self._switches:
            siblings[name] = module
        self.selected, self._all = 0, True

    def passing(self) -> Iterator[PassThrough]:
        """Yield the placeholders of this rank's modules, used while another of its stages runs."""
        return (passing for *_, passing in self._switches)


# The dict that registers a module, its key in it, its stage, the module and its `PassThrough`.
_Switch = tuple[dict[str, nn.Module | None], str, int, nn.Module | None, PassThrough]


def cut(
    model: nn.Module,
    placement: Placement,
    stages: tuple[int, ...],
    passages: Passages | None = None,
) -> Chunks:
    """Replace all modules in `model`, in place, but those of the rank's `stages`."""
    switches: list[_Switch] = []
    lists = {name: siblings_of(model, name) for name, _ in placement.homes()}
    around = (m for name, m in model.named_modules() if len(placement.stages_of(name)) > 1)
    shared = frozenset(id(value) for module in around for value in vars(module).values())
    for name, home in placement.homes():
        module, (path, _, leaf) = model.get_submodule(name), name.rpartition(".")
        siblings = model.get_submodule(path)._modules
        where = f"{name} is on stage {home} of the pipeline"
        ends = name == placement.stages[home][-1]
        passing = PassThrough(module, where, home, passages, lists[name], ends=ends, shared=shared)
        if home in stages:
            switches.append((siblings, leaf, home, module, passing))
        else:
            siblings[leaf] = passing
    return Chunks(stages, switches)


def agreed_placement(
    model: nn.Module, config: Split | None, schedule: AnySchedule, group: ProcessGroup | None
) -> tuple[Placement, tuple[tuple[int, ...], ...], bool, int]:
    """Place the model's modules on stages; if the ranks disagree, raise on every rank.

    Returns:
        The placement, each rank's stages, whether the schedule splits backwards, and the first
        number that is free for names of new groups.
    """
    facts: list[str] = []
    failed: Exception | None = None
    try:
        if not isinstance(model, nn.Module) or isinstance(model, ModuleWrapper):
            message = f"PipelineParallel wraps a plain nn.Module, got {type(model).__name__}"
            raise InvalidArgumentError(message)
        facts = parameter_facts(model)
        stages, splits = stages_of(schedule, len(group_ranks(group)))
        placement = place(model, config, sum(map(len, stages)))
        facts += [f"{placement.split}", f"modules of each stage: {placement.stages}"]
        facts.append(f"stages of each rank: {stages}")
    except Exception as error:  # a user's schedule function may raise anything
        failed = error
    subject, number = "the model that PipelineParallel splits", first_unused_number()
    number = max(agree(subject, facts, group, error=failed, note=number))
    return placement, stages, splits, number
