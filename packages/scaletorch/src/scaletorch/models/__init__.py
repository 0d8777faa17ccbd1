"""Plain models that know nothing of parallelism."""

from .llama import Llama, LlamaConfig

__all__ = ["Llama", "LlamaConfig"]
