"""Plain models that know nothing of parallelism."""

from .llama import Llama, LlamaConfig
from .mixture import Mixture, MixtureConfig

__all__ = ["Llama", "LlamaConfig", "Mixture", "MixtureConfig"]
