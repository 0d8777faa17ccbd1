"""Recognise what is not ours in a folder without a checkpoint, which must not pass for empty."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from ..errors import CheckpointError
from .lock import LOCK

_WEIGHTS = "scaletorch.checkpoint.import_safetensors(model, folder)"
_DCP = "scaletorch.checkpoint.import_dcp(model, folder, optimizer)"
_BEFORE = "into the plain model, on every rank, before parallelize"
# Pattern of a name in the folder, or below -> what has written it, and what loads it.
_KNOWN = {
    ".metadata": ("a checkpoint of torch.distributed.checkpoint", _DCP),
    "*.distcp": ("a checkpoint of torch.distributed.checkpoint", _DCP),
    "adapter_model.*": ("an adapter of peft", f"PeftModel.from_pretrained {_BEFORE}"),
    "model*.safetensors*": ("weights of save_pretrained of transformers", _WEIGHTS),
    "pytorch_model*.bin*": ("weights of save_pretrained of transformers", "from_pretrained"),
    "checkpoint-[0-9]*": ("a folder of transformers' Trainer", "from_pretrained of one in it"),
    "global_step*": ("a checkpoint of DeepSpeed", f"its zero_to_fp32.py, {_BEFORE}"),
    "latest_checkpointed_iteration.txt": ("a checkpoint of Megatron", f"its tools, {_BEFORE}"),
    "*.ckpt": ("a checkpoint of PyTorch Lightning", f"torch.load {_BEFORE}"),
    "*.pt": ("what torch.save writes", f"torch.load {_BEFORE}"),
    "*.pth": ("what torch.save writes", f"torch.load {_BEFORE}"),
    "*": ("a file that is no log", f"{_WEIGHTS} or import_dcp, if it has weights"),
}
_OURS = (LOCK, "step-*.unfinished", "step-*.removed", "step-*.damaged")
_LOGS = (
    "*.log", "*.txt", "*.json", "*.jsonl", "*.yaml", "*.yml", "*.toml", "*.csv", "*.md", "*.py",
    "*.sh", "*.out", "*.err", "*.png", "events.out.tfevents.*", ".git*",
)  # fmt: skip


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder with a checkpoint of another library, or with files that may be one.

    What killed saves left, text, logs and pictures are none, in folders of any depth.

    Raises:
        CheckpointError: It has, with the file, what it is and how that is loaded.
    """
    paths = sorted(folder.rglob("*")) if folder.is_dir() else []
    paths = [path for path in paths if not _matches(path.relative_to(folder).parts[0], _OURS)]
    for pattern, (kind, way) in _KNOWN.items():
        for path in paths:
            harmless = path.is_dir() or _matches(path.name, _LOGS)
            if fnmatch(path.name, pattern) and not (pattern == "*" and harmless):
                raise CheckpointError(
                    f"{folder} has no checkpoint that scaletorch.checkpoint.save wrote, but {kind} "
                    f"({path.relative_to(folder)}), which load does not read. It is loaded by "
                    f"{way}; a run that begins anew takes another folder"
                )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
