"""Models of two stacks, an encoder and a decoder that attends to what it returns."""

from __future__ import annotations

from torch import nn

from .balance import distribute_layers
from .modules import around, block_lists, children, takes, within

Unit = tuple[str, ...]


def find_stacks(model: nn.Module) -> list[Unit]:
    """Return the layers of both stacks in order, with what is called before and after them.

    The first layer of a stack has its embeddings, and the last one its norm. None if the model does
    not say that it has an encoder and a decoder (`get_encoder`, `get_decoder`, as those of
    transformers do), if the decoder takes no `encoder_hidden_states`, or if either has several
    lists of layers.
    """
    paths = [_told(model, tell) for tell in ("get_encoder", "get_decoder")]
    if not all(paths) or any(within(*pair) for pair in (paths, paths[::-1])):
        return []
    if not takes(model.get_submodule(paths[1]), "encoder_hidden_states"):
        return []
    (holder, _, encoder), (other, _, decoder) = (path.rpartition(".") for path in paths)
    lists = [[name for name in block_lists(model) if within(name, path)] for path in paths]
    if holder != other or any(len(each) != 1 for each in lists):
        return []
    pairs = zip(paths, lists, strict=True)
    units = [unit for path, (name,) in pairs for unit in _units(model, path, name)]
    before, after = around(model, holder, [encoder, decoder])
    return [(*before, *units[0]), *units[1:-1], (*units[-1], *after)]


def spread(units: list[Unit], num_stages: int) -> list[Unit]:
    """Return the modules of each stage.

    Raises:
        InvalidArgumentError: There are fewer units than stages.
    """
    ranges = distribute_layers(len(units), num_stages)
    return [tuple(name for index in own for name in units[index]) for own in ranges]


def _told(model: nn.Module, tell: str) -> str:
    """Return the name of the module that a method of the model returns, or nothing."""
    method = getattr(model, tell, None)
    found = method() if callable(method) else None
    return next((name for name, module in model.named_modules() if module is found), "")


def _units(model: nn.Module, path: str, layers: str) -> list[Unit]:
    parent, _, own = layers.rpartition(".")
    before, after = around(model, parent, [own], top=path)
    names: list[Unit] = [(name,) for name in children(model.get_submodule(layers), f"{layers}.")]
    names[0] = (*before, *names[0])
    names[-1] = (*names[-1], *after)
    return names
