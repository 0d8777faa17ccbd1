"""What is done with a trained model: `sample`, `eval` and `export`, each a small command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint import export_safetensors
from ..models import MixtureConfig
from .saved import Trained, evaluate, generate, load_trained


def export(trained: Trained, folder: Path) -> None:
    """Write what `AutoModelForCausalLM` and `AutoTokenizer` read.

    Args:
        trained: The model.
        folder: Where to; made if need be.

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


PROGRAM = "python -m scaletorch.pretrain"


def load_tyro() -> Any:
    """Return the library that reads command lines."""
    try:
        import tyro
    except ImportError as error:
        raise SystemExit(
            f"the command needs {error.name}: pip install 'scaletorch[pretrain]'"
        ) from error
    return tyro


@dataclass(frozen=True, slots=True)
class Sample:
    """Let a trained model go on from a text."""

    checkpoint: Path
    """The --out folder of a training run, its checkpoints folder, or one checkpoint."""
    prompt: str = "def "
    """What to go on from."""
    tokens: int = 200
    """How many tokens to draw."""
    temperature: float = 0.8
    """Above 1 wilder, below 1 safer; 0 takes the likeliest token each time."""
    seed: int = 0
    """The same seed draws the same text."""
    tokenizer: Path | None = None
    """In place of the file that the model was trained with, if that has moved."""

    def run(self) -> str:
        """Return the text."""
        trained = load_trained(self.checkpoint, self.tokenizer)
        return generate(
            trained, self.prompt, tokens=self.tokens, temperature=self.temperature, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class Eval:
    """Measure a trained model's loss on text, in one process."""

    checkpoint: Path
    """The --out folder of a training run, its checkpoints folder, or one checkpoint."""
    data: tuple[Path, ...] = ()
    """Files and folders of text; the Python standard library's sources when empty."""
    sequences: int = 64
    """How many sequences, spread evenly over the text."""
    tokenizer: Path | None = None
    """In place of the file that the model was trained with, if that has moved."""

    def run(self) -> str:
        """Return the loss, in words."""
        trained = load_trained(self.checkpoint, self.tokenizer)
        return str(evaluate(trained, self.data, sequences=self.sequences))


@dataclass(frozen=True, slots=True)
class Export:
    """Write a trained model for transformers: safetensors, config.json and tokenizer."""

    checkpoint: Path
    """The --out folder of a training run, its checkpoints folder, or one checkpoint."""
    to: Path
    """Where to; a folder without weights in it."""
    tokenizer: Path | None = None
    """In place of the file that the model was trained with, if that has moved."""

    def run(self) -> str:
        """Write the folder, and tell how it is read."""
        export(load_trained(self.checkpoint, self.tokenizer), self.to)
        return f"exported to {self.to}: AutoModelForCausalLM.from_pretrained({str(self.to)!r})"


COMMANDS: Mapping[str, type[Sample | Eval | Export]] = {
    "sample": Sample, "eval": Eval, "export": Export,
}  # fmt: skip


def run_command(name: str, arguments: list[str]) -> str:
    """Read a command's arguments, run it, and return what it has to say."""
    tyro = load_tyro()
    options: Sample | Eval | Export = tyro.cli(
        COMMANDS[name],
        prog=f"{PROGRAM} {name}",
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs,),
    )
    return options.run()
