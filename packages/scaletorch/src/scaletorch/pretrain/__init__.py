"""Pre-training of a Llama-style model on real text, with any parallel layout."""

from .config import PretrainConfig
from .run import Result, pretrain
from .train import train

__all__ = ["PretrainConfig", "Result", "pretrain", "train"]
