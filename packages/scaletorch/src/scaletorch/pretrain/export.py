"""Export a trained model: load a run's checkpoint in one process, write it for transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointError, DamagedCheckpointError, export_safetensors, load
from ..checkpoint.format.folders import candidates
from ..checkpoint.format.values import decode
from ..checkpoint.loading import read_document
from ..dist.errors import InvalidArgumentError
from ..models import Llama, MixtureConfig
from .config import plain_model, read_sizes
from .data import vocabulary_size


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model.

    Attributes:
        model: On the CPU, in the dtype of its weights.
        seq_len: Tokens in a training sequence.
        tokenizer: Its tokenizer.json; None if tokens are bytes.
    """

    model: Llama
    seq_len: int
    tokenizer: Path | None


def load_trained(folder: Path, tokenizer: Path | None = None) -> Trained:
    """Load the newest undamaged checkpoint of a run, saved on any layout, into this process.

    Args:
        folder: A run's `out`, its checkpoints folder, or one checkpoint.
        tokenizer: Replaces the tokenizer file that the run was given.

    Raises:
        InvalidArgumentError: There is none, or the tokenizer is another.
        CheckpointError: It is damaged or of another program, or the folder holds other files.
    """
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    damage: list[str] = []
    for path in candidates(root.absolute()):
        try:
            return _load(path, tokenizer)
        except DamagedCheckpointError as error:
            damage.append(str(error))
    if damage:
        raise DamagedCheckpointError("\n".join(damage))
    raise InvalidArgumentError(f"{folder} has no checkpoint: train with --out and --save-every")


def _load(path: Path, tokenizer: Path | None) -> Trained:
    extra = decode(read_document(path)["extra"])
    try:
        settings = extra["settings"]
        sizes = read_sizes(extra["model"])
        file = tokenizer or (Path(extra["tokenizer"]) if extra["tokenizer"] else None)
        seq_len = int(settings["seq_len"])
        dtype = torch.float64 if settings["dtype"] == "float64" else torch.float32
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} was not saved by this command, or by an earlier version of it: {error!r}"
        ) from error
    if (size := vocabulary_size(file)) != sizes.vocab_size:
        raise InvalidArgumentError(
            f"the tokenizer {file} has {size} tokens, and the model {sizes.vocab_size}"
        )
    model = plain_model(sizes).to(dtype)
    if load(path, model) is None:
        raise InvalidArgumentError(f"{path} is no checkpoint")
    return Trained(model.eval(), seq_len, file)


def export(trained: Trained, folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Args:
        trained: The model.
        folder: The destination; created if missing.

    Raises:
        CheckpointError: `folder` has weights already, or cannot be written.
    """
    export_safetensors(_named_as_theirs(trained), folder)
    _write(folder / "config.json", describe(trained))
    if trained.tokenizer is None:
        _write(folder / "tokenizer.json", byte_tokenizer())
    else:
        shutil.copyfile(trained.tokenizer, folder / "tokenizer.json")
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": trained.seq_len},
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _named_as_theirs(trained: Trained) -> nn.Module:
    """Return a module with the names of `LlamaForCausalLM`, or of `MixtralForCausalLM`."""
    model, theirs, inner = trained.model, nn.Module(), nn.Module()
    inner.embed_tokens, inner.layers, inner.norm = model.embed_tokens, model.layers, model.norm
    theirs.model, theirs.lm_head = inner, model.lm_head
    return theirs


def describe(trained: Trained) -> dict[str, Any]:
    """Return the config.json of `LlamaForCausalLM`, or of `MixtralForCausalLM`."""
    sizes = trained.model.config
    experts: dict[str, Any] = {}
    if isinstance(sizes, MixtureConfig):
        experts = {"num_local_experts": sizes.num_experts, "num_experts_per_tok": sizes.top_k}
    return {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        **experts,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": trained.seq_len,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": sizes.tie_embeddings,
        "dtype": str(trained.model.norm.weight.dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def byte_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json whose tokens are a text's bytes: a byte-level BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}  # fmt: skip
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": byte_letters(), "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": model,
    }  # fmt: skip


def byte_letters() -> dict[str, int]:
    """Return the letter that stands for each byte -> the byte.

    Printable bytes stand for themselves and the others for letters from 256 on, as GPT-2 has it:
    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(256) if byte not in shown)
    letters = {byte: 256 + number for number, byte in enumerate(hidden)}
    return {chr(letters.get(byte, byte)): byte for byte in range(256)}


@dataclass(frozen=True, slots=True)
class Export:
    """Write a trained model for transformers: safetensors, config.json and tokenizer."""

    checkpoint: Path
    """The --out folder of a training run, its checkpoints folder, or one checkpoint."""
    to: Path
    """The destination; a folder without weights in it."""
    tokenizer: Path | None = None
    """Replaces the file that the model was trained with, if that has moved."""

    def run(self) -> str:
        """Write the folder, and return how to load it."""
        export(load_trained(self.checkpoint, self.tokenizer), self.to)
        return f"exported to {self.to}: AutoModelForCausalLM.from_pretrained({str(self.to)!r})"
