"""The main job: a Llama-style model trained on real text, on any layout."""

from .config import PretrainConfig
from .run import Result, pretrain
from .train import train

__all__ = ["PretrainConfig", "Result", "pretrain", "train"]
