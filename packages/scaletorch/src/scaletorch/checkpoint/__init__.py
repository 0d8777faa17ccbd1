"""Checkpoints that load on any layout: model, optimizer, scheduler, data position, generators."""

from .agreement import CheckpointError, DamagedCheckpointError
from .dcp_import import import_dcp
from .format.folders import latest
from .loading import Loaded, load
from .saving import Saving, save
from .weights import export_adapter, export_safetensors, import_safetensors

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
