"""The cut itself: modules of other stages are replaced, in place, by ones that pass through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..splitting.modules import has_parameters
from ..splitting.split import Placement
from .stand_ins import plain, stand_in


class Passage:
    """How far a forward that is running has come.

    Attributes:
        active: Whether one is; a recomputed one is not.
        furthest: The last stage of which it has met a module, in place or not.
        origin: The hidden states from the stage before.
        received: What the model is given in their place: stand-ins, or themselves.
        examined: Whether it is the first of its kind.
        ids: The ids that the model was given, if they are not what was received.
        entered: Whether a module of this stage has been called.
        inside: How many modules of this stage are running, one in another.
        left: The output of the one that was called last.
        over: Whether the rest is another stage's.
    """

    def __init__(self) -> None:
        self.furthest = self.inside = 0
        self.entered = self.over = self.active = self.examined = False
        self.origin: Any = None
        self.received: Any = None
        self.left: Any = None
        self.ids: Any = None

    def start(self, received: Any, ids: Any, *, examined: bool, followed: bool) -> None:
        """Begin a forward.

        Args:
            received: The hidden states from the stage before; None on the first stage.
            ids: The ids that the model is given in their place.
            examined: Whether it is the first of its kind.
            followed: Whether stand-ins are followed through the model's own code.
        """
        self.active, self.furthest = True, 0
        self.origin = self.left = received
        self.received = stand_in(received, self) if followed else received
        self.ids, self.examined = ids, examined
        self.entered, self.inside, self.over = received is None, 0, not followed

    def reset(self) -> None:
        """Forget the forward that was running."""
        self.active = self.examined = False
        self.origin = self.received = self.left = self.ids = None

    @property
    def follows(self) -> bool:
        """Whether the model's own code runs, and modules of this stage are still to come."""
        return self.active and not self.over and not torch.compiler.is_compiling()

    def opened(self, value: Any) -> Any:
        """Return hidden states for what stands for them."""
        return self.origin if value is self.received else plain(value)

    def reach(self, stage: int, where: str) -> None:
        """Note that the forward has come to a module with parameters.

        Raises:
            InvalidArgumentError: It was further already: it runs a module of one stage twice.
        """
        if self.active and stage < self.furthest:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward comes back to it after "
                f"modules of stage {self.furthest}; a pipeline runs each stage once, so put what "
                "is run several times into one layer"
            )
        self.furthest = stage


class PassThrough(nn.Module):
    """Stands for a module of another stage: returns its first argument.

    If that is None, as ids are beside embeddings that are given, it returns the hidden states
    that are among the others; for the ids that the model was given, those that were received. An
    embedding that is given other ids, not hidden states, returns zero: what a model adds to hidden
    states, such as embedded positions, was added on the first stage. Plain attributes of the module
    (numbers, strings) are kept, since forwards read them.

    Args:
        replaced: The module that it stands for; not kept.
        where: Its name and place, for messages.
        stage: Its stage.
        passage: The forward that runs it.
    """

    def __init__(
        self, replaced: nn.Module, where: str, stage: int = 0, passage: Passage | None = None
    ) -> None:
        super().__init__()
        self._stage = stage
        self._passage = passage or Passage()
        self._counts = has_parameters(replaced)
        self.train(replaced.training)
        for name, value in vars(replaced).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | str):
                setattr(self, name, value)
        self._where = where
        self._embeds = hasattr(replaced, "num_embeddings")
        self._drops = isinstance(replaced, _DropoutNd)
        self._changes = not isinstance(replaced, nn.Identity)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first positional argument, or else the first keyword argument.

        There are as many of these as other stages have layers, so they do without the hooks of an
        `nn.Module`.
        """
        passage = self._passage
        if self._counts:
            passage.reach(self._stage, self._where)
        value = args[0] if args else next(iter(kwargs.values()))
        if value is None and any(entry is passage.received for entry in kwargs.values()):
            value = passage.received
        if passage.ids is not None and passage.received is not None and value is passage.ids:
            value = passage.received  # which was made of them
        if self._embeds and isinstance(value, Tensor) and not value.is_floating_point():
            value = torch.zeros((), device=value.device)
        if not passage.follows or not self._changes or (self._drops and self._drops_nothing()):
            return value
        return stand_in(value, passage)

    forward = __call__

    def _drops_nothing(self) -> bool:
        return not self.training or not self.p

    def __getattr__(self, name: str) -> Any:
        """Say where the module is if an attribute of it is missing here."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            where = self.__dict__.get("_where", "a module of another stage")
            message = f"{where}, and its attribute {name!r} is not available here"
            raise AttributeError(message) from error

    def extra_repr(self) -> str:
        """Name the module that it stands for."""
        return self._where


class Chunks:
    """The stages of one rank in one model: one of them at a time is there, or all.

    Attributes:
        selected: The chunk that is meant, the first if all are there.
    """

    def __init__(self, stages: tuple[int, ...], switches: list[_Switch]) -> None:
        self.selected = 0
        self._stages = stages
        self._switches = switches if len(stages) > 1 else []
        self._all = True

    def select(self, chunk: int) -> None:
        """Leave one stage's modules in the model."""
        if self._all:
            self._take_up()
        self.selected, stage, self._all = chunk, self._stages[chunk], False
        for siblings, name, home, module, passing in self._switches:
            siblings[name] = module if home == stage else passing

    def restore(self) -> None:
        """Put back the modules of all the rank's stages."""
        self.selected = 0
        if not self._all:
            for siblings, name, _, module, _ in self._switches:
                siblings[name] = module
        self._all = True

    def _take_up(self) -> None:
        """Take note of modules that were put in place of others since, such as adapters."""
        for index, (siblings, name, home, _, passing) in enumerate(self._switches):
            self._switches[index] = siblings, name, home, siblings[name], passing


# Where a module is registered, under which name, its stage, itself and its `PassThrough`.
_Switch = tuple[dict[str, nn.Module | None], str, int, nn.Module | None, PassThrough]


def cut(
    model: nn.Module,
    placement: Placement,
    stages: tuple[int, ...],
    passage: Passage | None = None,
) -> Chunks:
    """Leave only one rank's modules in `model`; nothing keeps the others alive.

    Args:
        model: The whole model; changed in place, names stay.
        placement: Which module belongs to which stage.
        stages: The rank's stages, chunk by chunk.
        passage: The forward that runs, to which these tell its position.
    """
    switches: list[_Switch] = []
    for name, home in placement.homes():
        module, (path, _, leaf) = model.get_submodule(name), name.rpartition(".")
        siblings = model.get_submodule(path)._modules
        where = f"{name} is on stage {home} of the pipeline"
        passing = PassThrough(module, where, home, passage)
        if home in stages:
            switches.append((siblings, leaf, home, module, passing))
        else:
            siblings[leaf] = passing
    return Chunks(stages, switches)
