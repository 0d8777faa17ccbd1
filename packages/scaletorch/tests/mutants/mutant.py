"""A mutant: a fault, where it is put, and the layout that must show it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from scaletorch.verify import parse_layout
from scaletorch.verify.cases import Case

from .patch import Mutate, patched


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        name: what it is called.
        fault: one line that says what is wrong in the library then.
        targets: what is replaced; see `patch.patched`.
        mutate: makes the replacement out of each target's original.
        case: where the fault must show.
        model: 'specimen', 'staged' for one with layers for stages, 'shared' for one that can be
            sequence parallel, 'sharded' for one that is written with sharded layers, 'routed' for
            one with experts, 'skewed' for one of which two get no token and 'idle' where one gets
            none, 'balanced' for one that asks for its routers' loss, or 'built-in' for what users
            run by default.
        born: where a person who hunts the fault must be led; see `located.matches`.
    """

    name: str
    fault: str
    targets: tuple[str, ...]
    mutate: Mutate
    case: Case
    born: str
    model: str

    def apply(self) -> ExitStack:
        """Put the fault in; leaving the stack takes it out."""
        stack = ExitStack()
        for target in self.targets:
            stack.enter_context(patched(target, self.mutate))
        return stack


@dataclass(slots=True)
class Catalogue:
    """The faults of one part of the library, written one after another as functions.

    Args:
        part: the package below the library's root that targets are relative to.
    """

    part: str
    mutants: list[Mutant] = field(default_factory=list)

    def fault(
        self, *targets: str, layout: str, born: str, model: str = "", **options: Any
    ) -> Callable[[Mutate], Mutate]:
        """Enter the decorated function: its name and docstring are the mutant's."""
        absolute = tuple(f"{self.part}.{target}" for target in targets)
        case = Case(parse_layout(layout), **options)
        model = model or ("staged" if case.grid.pp > 1 else "specimen")

        def enter(mutate: Mutate) -> Mutate:
            name, text = mutate.__name__.replace("_", "-"), (mutate.__doc__ or "").strip()
            self.mutants.append(Mutant(name, text, absolute, mutate, case, born, model))
            return mutate

        return enter
