"""Bare lists of experts and the blocks that loop over them: what of a model can be divided so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..module import put_before
from .looping import LoopingBlock
from .standing import LoopedDict, LoopedList, refuse_alone


def check_lists(model: nn.Module, lists: Mapping[str, nn.Module]) -> None:
    """Refuse lists of experts whose blocks cannot be run as they are, before anything is cut.

    Args:
        model: The whole.
        lists: Those that blocks loop over, by name.

    Raises:
        InvalidArgumentError: What holds a list has no forward, or one that was replaced, or several
            lists.
    """
    looped: dict[nn.Module, str] = {}
    for name, experts in lists.items():
        blocks = [block for block, _ in _holders(model, experts)]
        if not blocks or any(type(block).forward is nn.Module.forward for block in blocks):
            held = f"a {type(blocks[0]).__name__} without one" if blocks else "no module"
            raise InvalidArgumentError(
                f"'{name}' is a list without a forward of its own, held by {held}: the module that "
                "holds a list of experts must be the block whose forward loops over them"
            )
        for block in blocks:
            if "forward" in vars(block):
                raise InvalidArgumentError(
                    f"the forward of the block around '{name}' was replaced on the instance: "
                    "divide experts before that"
                )
            if looped.setdefault(block, name) != name:
                raise InvalidArgumentError(
                    f"'{looped[block]}' and '{name}' are lists of one block: what is asked of one "
                    "hangs on the other's results, but experts of a block are asked once; put the "
                    "parts of an expert into a module, and these into one list"
                )


def check_shared(model: nn.Module, lists: Mapping[str, nn.Module]) -> None:
    """Refuse experts of a list that share a parameter with each other or with anything else.

    Args:
        model: The whole.
        lists: Lists with a module an expert, by name.

    Raises:
        InvalidArgumentError: Two of them do.
    """
    owners: dict[int, str] = {}
    for name, experts in lists.items():
        for number, expert in experts.named_children():
            own = f"{name}.{number}".lstrip(".")
            for parameter in expert.parameters():
                other = owners.setdefault(id(parameter), own)
                if other != own:
                    raise _shares(own, f"'{other}'")
    within = {module for experts in lists.values() for module in experts.modules()}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if module not in within and id(parameter) in owners:
                raise _shares(owners[id(parameter)], f"the rest of the model ('{name}.{own}')")


def loop_over(model: nn.Module, experts: nn.Module) -> None:
    """Let the blocks around a list, which has this rank's experts alone, loop over all of them."""
    for block, name in [*_holders(model, experts)]:
        vars(block)["_looped"] = name
        put_before(LoopingBlock, block)
    vars(experts)["_kinds"] = {}
    put_before(LoopedList if isinstance(experts, nn.ModuleList) else LoopedDict, experts)
    for expert in experts.children():
        expert.register_forward_pre_hook(refuse_alone)


def _holders(model: nn.Module, experts: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for block in model.modules():
        for name, each in block._modules.items():
            if each is experts:
                yield block, name


def _shares(expert: str, other: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the expert '{expert}' shares a parameter with {other}: they may come to lie on other "
        "ranks, and each would train its own; untie it"
    )
