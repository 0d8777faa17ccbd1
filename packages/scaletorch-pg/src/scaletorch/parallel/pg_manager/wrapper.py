"""A module wrapper that adds no prefix to names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleWrapper(nn.Module):
    """Base class of the strategies' wrappers: holds `module` and adds no prefix to its names.

    `named_modules`, `named_parameters`, `named_buffers`, `state_dict` and `load_state_dict` act on
    `module`, also if wrappers nest or sit inside another module. Attributes that the wrapper lacks
    are looked up in `module`, and `forward` calls `module`. Forward and backward hooks registered
    on a wrapper go to `module`, and global hooks do not see wrappers.

    Args:
        module: The module to wrap.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` without hooks: they run on the wrapped module."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_full_backward_hook(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module's forward in place; the wrappers' own code stays eager."""
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped module's attribute if the wrapper has none of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not initialised yet, as during unpickling
                raise
        return getattr(self.module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapped module's names and modules; the wrapper itself is not listed."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the wrapped module's state."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Runs only if a parent loads, which passes its private copy of names without the prefix;
        # torch loads the child under its registered name.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
