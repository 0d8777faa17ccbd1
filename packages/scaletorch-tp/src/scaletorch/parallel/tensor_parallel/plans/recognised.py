"""A model of which is known what to shard, without a plan given: is it quite what it seems?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from .heads import head_length
from .lengths import Length
from .plan import Divide, Match


class Recognised(NamedTuple):
    """What is known of a model.

    Attributes:
        name: What messages call that knowledge.
        matches: What is sharded.
        complete: Names of modules in which every parameter must be among the matches.
        heads: Name of an attention module -> its projections, cut at head borders. What sums
            gradients in it must be of the size of one head.
    """

    name: str
    matches: list[Match]
    complete: tuple[str, ...]
    heads: Mapping[str, tuple[str, ...]]


def check_recognised(model: nn.Module, known: Recognised) -> list[Length]:
    """Check that a model is what it seems; return how many heads each projection has.

    Raises:
        InvalidArgumentError: It has parameters that are not known, or does not say where its
            heads end, or a norm is over several heads.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_complete(modules, known)
    heads = list(_head_counts(modules, known.heads))
    _check_head_size(modules, known)
    return heads


def _check_complete(modules: Mapping[str, nn.Module], known: Recognised) -> None:
    """Refuse a model that has parameters where its family has none."""
    planned = {m.module for m in known.matches if not isinstance(m.style, Divide)}
    for name in known.complete:
        for inner, module in modules[name].named_modules(prefix=name):
            if module not in planned and module._parameters:
                raise InvalidArgumentError(
                    f"the names are those of {known.name}, but '{inner}' has "
                    f"parameters {sorted(module._parameters)} that its plan does not know; "
                    "pass a plan of your own"
                )


def _head_counts(
    modules: Mapping[str, nn.Module], heads: Mapping[str, tuple[str, ...]]
) -> Iterator[Length]:
    """Yield how many heads each projection has, so that none is cut in two."""
    for name, projections in heads.items():
        found = {p: modules[f"{name}.{p}"] for p in projections if f"{name}.{p}" in modules}
        sizes = {p: _out_features(module) for p, module in found.items()}
        head_dim = head_length(modules[name], next(iter(sizes.values()), 0))
        for projection, size in sizes.items():
            if head_dim < 1 or size % head_dim:
                raise InvalidArgumentError(
                    f"'{name}' does not say how the {size} output features of its "
                    f"{projection} are divided into heads: expected a head_dim, or a number "
                    "of heads, on the module or its config; pass a plan of your own"
                )
            yield f"heads of {name}.{projection}", size // head_dim


def _check_head_size(modules: Mapping[str, nn.Module], known: Recognised) -> None:
    """Refuse a norm over all heads: its statistics would be of this rank's heads only."""
    for match in (m for m in known.matches if m.style == "replicate_sum_grad"):
        attention = match.name.rpartition(".")[0]
        if attention not in known.heads:
            continue
        query = modules.get(f"{attention}.{known.heads[attention][0]}")
        head_dim = head_length(modules[attention], 0 if query is None else _out_features(query))
        for name, parameter in match.module.named_parameters():
            if parameter.numel() != head_dim:
                raise InvalidArgumentError(
                    f"'{match.name}.{name}' has {parameter.numel()} elements, but a head has "
                    f"{head_dim}: a norm over several heads does not divide over ranks; only one "
                    "over each head can be tensor parallel"
                )


def _out_features(module: nn.Module) -> int:
    return int(getattr(module, "out_features", 0) or getattr(module, "nf", 0))
