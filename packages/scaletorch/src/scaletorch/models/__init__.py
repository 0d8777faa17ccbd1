"""Plain models without any parallelism of their own."""

from .llama import Llama, LlamaConfig
from .mixture import Mixture, MixtureConfig

__all__ = ["Llama", "LlamaConfig", "Mixture", "MixtureConfig"]
