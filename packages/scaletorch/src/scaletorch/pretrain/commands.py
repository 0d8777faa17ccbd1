"""What is done with a trained model: `sample`, `eval` and `export`, each a small command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .evaluate import evaluate
from .exports import export
from .generate import generate
from .saved import load_trained

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
