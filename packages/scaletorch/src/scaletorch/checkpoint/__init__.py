"""Checkpoints that load on any layout: model, optimizer, scheduler, data position, generators."""

from .exporting import export_adapter, export_safetensors
from .format.folders import latest
from .importing import import_safetensors
from .importing_dcp import import_dcp
from .loading import Loaded, load
from .saving import Saving, save
from .together import CheckpointError, DamagedCheckpointError

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "Loaded",
    "Saving",
    "export_adapter",
    "export_safetensors",
    "import_dcp",
    "import_safetensors",
    "latest",
    "load",
    "save",
]
