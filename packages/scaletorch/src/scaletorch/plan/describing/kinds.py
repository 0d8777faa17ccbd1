"""The blocks of a model and their kinds; one layer of each kind runs, the others are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ...parallel.pipeline_parallel import Split
from ...parallel.pipeline_parallel.building import PassThrough, sections_of
from ..description import Block


class _Skipped(PassThrough):
    """A stand-in for a layer: returns its input, with the latest layer's other outputs."""

    def __init__(self, replaced: nn.Module, latest: list[Any]) -> None:
        super().__init__(replaced, "a layer like another")
        self._latest = latest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else next(iter(kwargs.values()), None)
        latest = self._latest[0]
        return (value, *latest[1:]) if isinstance(latest, tuple) else value

    forward = __call__


def kinds_of(layers: Sequence[nn.Module]) -> list[int]:
    """Return the kind of each layer; a kind has the same classes, shapes and settings."""
    forms = [dict(_form(layer)) for layer in layers]
    # Ignore attributes that hold the layer's index.
    places = {
        key for key in set().union(*forms)
        if len(forms) > 1 and all(form.get(key) == index for index, form in enumerate(forms))
    }  # fmt: skip
    known: dict[tuple[Any, ...], int] = {}
    seen = [tuple(item for item in form.items() if item[0] not in places) for form in forms]
    return [known.setdefault(form, len(known)) for form in seen]


def _form(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, module in layer.named_modules():
        yield (name, ""), type(module)
        for own, value in vars(module).items():
            if isinstance(value, str | bool | float | int) and not own.startswith("_"):
                yield (name, own), value
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (name, own), (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def blocks_of(model: nn.Module, split: Split | None) -> tuple[tuple[Block, ...], dict[int, str]]:
    """Return the blocks, first and last the modules around layers, and each kind's first layer."""
    first, *layers, last = sections_of(model, split)
    if any(len(layer) > 1 for layer in layers):
        raise InvalidArgumentError(
            f"a plan needs layers that are one module each, and a layer of {type(model).__name__} "
            f"is {' and '.join(layers[0])}: put them into one module, or try layouts with "
            "`python -m scaletorch.verify`"
        )
    names = [name for (name,) in layers]
    kinds = kinds_of([model.get_submodule(name) for name in names])
    behind = max(kinds, default=-1) + 2
    line = [Block("+".join(first), 0, "first")]
    line += [Block(name, kind + 1, "layer") for name, kind in zip(names, kinds, strict=True)]
    chosen: dict[int, str] = {}
    for name, kind in zip(names, kinds, strict=True):
        chosen.setdefault(kind + 1, name)
    return (*line, Block("+".join(last), behind, "last")), chosen


def thin_out(model: nn.Module, blocks: Sequence[Block], chosen: Mapping[int, str]) -> list[Any]:
    """Replace, in place, all layers but the chosen ones; return the list for the latest output."""
    latest: list[Any] = [None]
    for block in blocks:
        if block.place == "layer" and chosen[block.kind] != block.name:
            parent, _, own = block.name.rpartition(".")
            skipped = _Skipped(model.get_submodule(block.name), latest)
            setattr(model.get_submodule(parent), own, skipped)
    return latest


def fill(model: nn.Module, make: Any) -> None:
    """Allocate every parameter of the meta device, in place; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fresh = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fresh
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor) and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


def block_of(name: str, blocks: Sequence[Block]) -> Block | None:
    """Return the block that contains a parameter or a module."""
    for block in blocks:
        if any(name == own or name.startswith(f"{own}.") for own in block.name.split("+")):
            return block
    return None


def inner(name: str, block: Block) -> str:
    """Return the name of a parameter inside its block: the same in all layers of a kind."""
    return name.removeprefix(f"{block.name}.") if block.place == "layer" else name
