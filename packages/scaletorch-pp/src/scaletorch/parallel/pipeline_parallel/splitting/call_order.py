"""The order in which a module's forward calls its children, read from its source.

Most modules are registered in the order of their calls, but some are not: a final norm before the
layers, a norm of embeddings after them. The inferred order decides only the stage of these
modules. If it is wrong, the first forward raises.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

_DEEPEST = 3  # nested calls of methods that are followed


def calls_around(module: nn.Module, child: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the children that a module's forward calls before a given child, and those after it.

    Children that are called both before and after are in both sets. Children that are not called by
    name are in neither.
    """
    uses = _Uses(module)
    uses.read(type(module).forward)
    calls = [index for index, use in enumerate(uses.found) if use == (child, True)]
    loops = [index for index, use in enumerate(uses.found) if use == (child, False)]
    places = calls or loops  # a call is better evidence than a loop
    if not places:  # such as `one, two = self.layers`, which does not show the calls
        return frozenset(), frozenset()
    before = {name for name, called in uses.found[: places[-1]] if called}
    after = {name for name, called in uses.found[places[-1] + 1 :] if called}
    return frozenset(before - {child}), frozenset(after - {child})


class _Uses(ast.NodeVisitor):
    """The places where a method calls children of its module, or loops over one, in order."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._depth = 0
        self.found: list[tuple[str, bool]] = []  # the child's name, and whether it is called

    def read(self, method: Callable[..., Any]) -> None:
        """Read a method; if its source is not available, find nothing."""
        code = getattr(inspect.unwrap(method), "__code__", None)
        tree = None if code is None else _tree(code)
        if tree is not None:
            self._depth += 1
            self.visit(tree)
            self._depth -= 1

    def visit_For(self, node: ast.For) -> None:
        for inner in ast.walk(node.iter):
            name = _own_name(inner)
            if name is not None and name in self._module._modules:
                self.found.append((name, False))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        name = _own_name(called)  # of a module, or of a list with an item that is called
        if name is None:
            self.visit(node.func)
        elif name in self._module._modules:
            self.found.append((name, True))
        elif not hasattr(nn.Module, name) and self._depth < _DEEPEST:
            method = getattr(type(self._module), name, None)
            if inspect.isfunction(method):
                self.read(method)


@functools.lru_cache(maxsize=64)
def _tree(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function's source, or None if it is not available."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:  # inspect.getsource would be slow: it looks at every imported module's file first
        return ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))) if lines else None
    except (SyntaxError, ValueError):
        return None


def _own_name(node: ast.AST) -> str | None:
    """Return `name` if the node is `self.name`, or None."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if own and node.value.id == "self" else None  # type: ignore[attr-defined]
