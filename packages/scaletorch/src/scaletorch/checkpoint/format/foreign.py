"""Recognise checkpoints of other libraries, which must not pass for empty folders."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from ..errors import CheckpointError

_IMPORT = (
    "load the weights with scaletorch.checkpoint.import_safetensors(model, folder), or "
    "from_pretrained(folder) before parallelize"
)
_PLAIN = "load it into the plain model, on every rank, before parallelize"
_DCP = (
    "turn it into a plain state dict with "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and load that into the plain "
    "model before parallelize, or with model.load_state_dict after it"
)
# Pattern of a name in the folder -> what has written it, and the way out.
_KNOWN = {
    ".metadata": ("a checkpoint of torch.distributed.checkpoint", _DCP),
    "*.distcp": ("a checkpoint of torch.distributed.checkpoint", _DCP),
    "adapter_model.*": (
        "an adapter as peft writes it",
        "load it with PeftModel.from_pretrained(plain, folder) before parallelize",
    ),
    "model*.safetensors*": ("weights as save_pretrained of transformers writes them", _IMPORT),
    "pytorch_model*.bin*": (
        "weights as save_pretrained of transformers writes them",
        "load them with from_pretrained(folder) before parallelize",
    ),
    "checkpoint-[0-9]*": (
        "a folder of transformers' Trainer",
        "pass the checkpoint in it that has the weights to from_pretrained before parallelize",
    ),
    "global_step*": (
        "a checkpoint of DeepSpeed",
        "turn it into plain weights with its zero_to_fp32.py, and load these before parallelize",
    ),
    "latest_checkpointed_iteration.txt": (
        "a checkpoint of Megatron",
        "turn it into the plain model's weights first",
    ),
    "*.ckpt": ("a checkpoint of PyTorch Lightning", _PLAIN),
    "consolidated*.pt*": ("weights as torch.save writes them", _PLAIN),
    "model*.pt": ("weights as torch.save writes them", _PLAIN),
    "checkpoint*.pt": ("weights as torch.save writes them", _PLAIN),
}


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds a checkpoint of another library.

    Raises:
        CheckpointError: It has, with what it is and how that is loaded.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for pattern, (kind, way) in _KNOWN.items():
        found = next((name for name in names if fnmatch(name, pattern)), None)
        if found is not None:
            raise CheckpointError(
                f"{folder} has no checkpoint that scaletorch.checkpoint.save wrote, but {kind} "
                f"({found}), which load does not read: {way}. A run that begins anew takes "
                "another folder"
            )
