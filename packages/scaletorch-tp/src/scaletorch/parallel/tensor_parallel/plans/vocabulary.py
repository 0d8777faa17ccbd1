"""Find the vocabulary embedding and the heads that can be sharded with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..layers.embedding import VocabParallelEmbedding
from .plan import Style
from .trial import call, features, is_linear


class _Reads(TorchFunctionMode):
    """Counts the function calls that take each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # not a read of an attribute such as dtype
            given = (*args, *(kwargs or {}).values())
            self.counts.update(id(x) for x in given if isinstance(x, nn.Parameter))
        return func(*args, **(kwargs or {}))


def vocabulary_styles(model: nn.Module, inside: set[nn.Module], example: Any) -> dict[str, Style]:
    """Return the styles of embeddings outside of layers and of heads with as many outputs.

    Both stay replicated if other code reads their parameters, as in `F.linear(x, table.weight)`.
    """
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    fits = VocabParallelEmbedding.misfit
    tables = {name: module for name, module in outside.items() if fits(module) is None}
    heads = {n: m for n, m in outside.items() if isinstance(m, nn.Linear) and is_linear(n, m)}
    calls: Counter[int] = Counter()

    def count(module: nn.Module, *_: Any) -> None:
        calls.update(id(parameter) for parameter in module.parameters())

    with ExitStack() as hooks:
        for module in {*tables.values(), *heads.values()}:
            hooks.callback(module.register_forward_hook(count).remove)
        reads = hooks.enter_context(_Reads())
        call(model, example)
    for name, table in tables.items():
        rows = len(table.get_parameter("weight"))
        heads_of = {n: head for n, head in heads.items() if features(head)[1] == rows}
        twins = {n: t for n, t in tables.items() if len(t.get_parameter("weight")) == rows}
        for chosen in (twins, {name: table}):  # a teacher has a table and a head of its own
            divided = {*chosen.values(), *heads_of.values()}
            read = {id(p) for module in divided for p in module.parameters()}
            owners = {m for m in model.modules() for p in m._parameters.values() if id(p) in read}
            whole = owners <= divided and all(calls[k] == reads.counts[k] > 0 for k in read)
            if heads_of and whole:
                return {
                    **dict.fromkeys(chosen, "vocab"),
                    **dict.fromkeys(heads_of, "column_gather"),
                }
    return {}
