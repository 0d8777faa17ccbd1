"""In which order a model's forward calls its layers: seen in a forward without values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .cut import PassThrough
from .passage import Passage
from .twins import cast, twin_of

_LENGTH = 8


def visits_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return these modules' names in the order in which the model's forward calls them.

    A twin of the model runs on a few ids, so that nothing of the model changes; its layers are not
    run. What its forward asks for beside ids, or reads out of what they return, it does not have:
    then no more is known than what was called until there.
    """
    passage, seen = Passage(), list[str]()
    twin = twin_of(model, passage, _is_kept)
    cast(twin, passage, lambda tensor: torch.empty_like(tensor, device="cpu"))
    for name in names:
        path, _, leaf = name.rpartition(".")
        noting = _Noting(model.get_submodule(name), name, passage=passage)
        vars(noting)["_seen"] = seen
        twin.get_submodule(path)._modules[leaf] = noting
    passage.first = torch.ones(1, _LENGTH, dtype=torch.long)
    passage.start(0, None, "", examined=False, followed=True)
    with suppress(Exception), torch.no_grad():
        twin(passage.first)
    return seen


class _Noting(PassThrough):
    """Notes that it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a stand-in of the form of what it is given."""
        vars(self)["_seen"].append(self._name)
        return super().__call__(*args, **kwargs)

    forward = __call__


def _is_kept(value: Any) -> bool:
    """Return whether a twin of a whole model has a value too: no tensor, and nothing that runs."""
    if isinstance(value, dict):
        return all(map(_is_kept, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_kept, value))
    function = inspect.isfunction(value) or isinstance(value, type)
    return function or not (callable(value) or isinstance(value, torch.Tensor))
