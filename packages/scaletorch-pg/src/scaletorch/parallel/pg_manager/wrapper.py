"""A module around a module that does not show in any name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleWrapper(nn.Module):
    """Base of strategies' wrappers: holds `module` and shows its names without a prefix.

    `named_modules`, `named_parameters`, `named_buffers`, `state_dict` and
    `load_state_dict` are those of `module`, also when wrappers nest or sit inside another
    module, and attributes that the wrapper lacks are looked up in `module`. `forward` calls
    `module`. Hooks on forward and backward that are registered with a wrapper are `module`'s, and
    no global hook sees a wrapper.

    Args:
        module: The module to hold.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` alone: hooks see the wrapped module."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register it with the wrapped module."""
        return self.module.register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register it with the wrapped module."""
        return self.module.register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register it with the wrapped module."""
        return self.module.register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register it with the wrapped module."""
        return self.module.register_full_backward_hook(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module's forward, in place; what wrappers do stays outside."""
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the wrapped module when the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not built yet, as when unpickling
                raise
        return getattr(self.module, name)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
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
        # Only reached when a parent module loads: it hands plain names, while torch goes on to
        # the child under its registered name. The dict is the parent's private copy.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
