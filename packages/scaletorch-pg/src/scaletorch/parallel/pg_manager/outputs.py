"""Functions that see each output of a model, or of each of its stages in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Watcher = Callable[[nn.Module, Any], None]  # called with the model and the output that goes on

_WATCHERS, _STAGED = "_output_watchers", "_runs_as_stages"


def watch_outputs(model: nn.Module, watcher: Watcher) -> None:
    """Let a function see the output of each of a model's stages, once it runs as stages."""
    vars(model).setdefault(_WATCHERS, []).append(watcher)


def forget_watchers(model: nn.Module, kind: type) -> None:
    """Drop the watchers that are methods of objects of a class."""
    known = vars(model).get(_WATCHERS, [])
    known[:] = [each for each in known if not isinstance(getattr(each, "__self__", None), kind)]


def mark_staged(model: nn.Module) -> None:
    """Note that a model runs as stages, so that its own output is not what goes on."""
    vars(model)[_STAGED] = True


def runs_as_stages(model: nn.Module) -> bool:
    """Return whether a model runs as stages, each of which shows its output."""
    return bool(vars(model).get(_STAGED, False))


def show_output(model: nn.Module, output: Any) -> None:
    """Show the output of a stage to all that watch.

    Args:
        model: The model that runs as stages.
        output: What it passes on, or what the model returns.
    """
    for watcher in vars(model).get(_WATCHERS, ()):
        watcher(model, output)
