"""All settings of a pre-training run, their checks, and the model that they describe."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from ..dist import devices
from ..dist.errors import InvalidArgumentError
from ..models import Llama, LlamaConfig, Mixture, MixtureConfig
from ..parallel.pg_manager import Grid
from .data import check_paths

ScheduleName = Literal[
    "1f1b", "afab", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v"
]

_POSITIVE = (
    "tp", "cp", "pp", "dp", "ep", "top_k", "steps", "batch_size", "micro_batches", "seq_len",
)  # fmt: skip
_COUNTS = ("experts", "warmup_steps", "decay_steps", "save_every", "keep", "seed", "check_every")


@dataclass(frozen=True, slots=True)
class PretrainConfig:
    """Settings of a pre-training run; the layout changes neither batches nor losses."""

    tp: int = 1
    """Tensor parallel size."""
    cp: int = 1
    """Context parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    dp: int = 1
    """Data parallel size."""
    ep: int = 1
    """Expert parallel size: over how many of a stage's tp x cp x dp ranks experts are divided."""
    schedule: ScheduleName = "1f1b"
    """Pipeline schedule."""
    zero: Literal[0, 1, 2] = 0
    """What dp x cp ranks share out: 1 the optimizer's state, 2 gradients too."""
    model: LlamaConfig = field(default_factory=LlamaConfig)
    """Sizes of the model; the vocabulary is the tokenizer's when there is one."""
    experts: int = 0
    """Experts of each layer, each an MLP of `model.intermediate_size`; 0 is a model without."""
    top_k: int = 2
    """How many of the experts each token goes to."""
    steps: int = 60
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences in a global batch."""
    micro_batches: int = 2
    """Micro-batches per data parallel rank and step."""
    seq_len: int = 128
    """Tokens in a sequence."""
    lr: float = 1e-3
    """Highest learning rate; it warms up linearly and falls to a tenth along a cosine."""
    warmup_steps: int = 10
    """Steps until the highest learning rate."""
    decay_steps: int = 0
    """Steps until the lowest rate, which then stays; 0 is `steps`."""
    weight_decay: float = 0.1
    """AdamW's, for matrices only."""
    check_every: int = 20
    """Steps between comparisons of what ranks should hold alike; 0 makes none."""
    clip: float = 1.0
    """Highest global gradient norm."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic; bfloat16 computes under autocast and keeps float32 weights."""
    seed: int = 0
    """Of weights and batches."""
    data: tuple[Path, ...] = ()
    """Files and folders of text; the Python standard library's sources when empty."""
    tokenizer: Path | None = None
    """A file of the `tokenizers` library; bytes are the tokens when absent."""
    out: Path | None = None
    """Folder for log and checkpoints; a new temporary one when absent."""
    save_every: int = 0
    """Steps between checkpoints, written while training goes on; 0 saves none."""
    keep: int = 0
    """Last checkpoints to keep; 0 keeps all."""
    resume: Literal["no", "auto"] = "no"
    """auto goes on from the last good checkpoint in `out`, of whatever layout, if there is one."""
    backend: str | None = None
    """Communication backend; the device's own when absent."""
    compare: bool = False
    """Train once more in one process and compare the two loss curves."""

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return Grid(tp=self.tp, cp=self.cp, pp=self.pp, dp=self.dp, ep=self.ep)

    def one_process(self) -> PretrainConfig:
        """Return the settings of the same training in one process, without checkpoints."""
        return replace(
            self, tp=1, cp=1, pp=1, dp=1, ep=1, micro_batches=self.micro_batches * self.dp,
            zero=0, save_every=0, keep=0, resume="no", out=None, compare=False,
        )  # fmt: skip


def sizes_of(config: PretrainConfig) -> LlamaConfig:
    """Return the sizes of a run's model, including its experts."""
    if not config.experts:
        return config.model
    experts = {"num_experts": config.experts, "top_k": config.top_k}
    return MixtureConfig(**{**asdict(config.model), **experts})


def plain_model(sizes: LlamaConfig) -> Llama:
    """Return the plain model with these sizes."""
    return Mixture(sizes) if isinstance(sizes, MixtureConfig) else Llama(sizes)


def check_config(config: PretrainConfig) -> None:
    """Refuse settings that cannot work; the message names one and a valid value."""
    _check_words(config)
    _check_numbers(config)
    _check_folders(config)
    if config.backend is not None:
        for device, name in devices.resolve_backend(config.backend):
            devices.backend_problem(name)
            devices.check_pair(device, name)
    _check_experts(config)
    check_paths(config.data, config.tokenizer)


def _check_words(config: PretrainConfig) -> None:
    hints: dict[str, Any] = get_type_hints(type(config))
    for name in ("schedule", "zero", "dtype", "resume"):
        value, known = getattr(config, name), get_args(hints[name])
        if value not in known:
            shown = ", ".join(map(str, known))
            raise InvalidArgumentError(f"{name} must be one of {shown}; got {value!r}")


def _check_numbers(config: PretrainConfig) -> None:
    _at_least(config, _POSITIVE, 1)
    _at_least(config, _COUNTS, 0)
    for name, least in (("lr", "above 0"), ("clip", "above 0"), ("weight_decay", "at least 0")):
        value = getattr(config, name)
        fine = isinstance(value, int | float) and math.isfinite(value) and value >= 0
        if not fine or (value == 0 and least == "above 0"):
            raise InvalidArgumentError(f"{name} must be a number, {least}, got {value!r}")


def _at_least(config: PretrainConfig, names: tuple[str, ...], least: int) -> None:
    values = {name: getattr(config, name) for name in names}
    if odd := [f"{name}={value!r}" for name, value in values.items() if type(value) is not int]:
        raise InvalidArgumentError(f"settings must be whole numbers: {', '.join(odd)}")
    if low := [f"{name}={value}" for name, value in values.items() if value < least]:
        raise InvalidArgumentError(f"settings must be at least {least}: {', '.join(low)}")


def _check_folders(config: PretrainConfig) -> None:
    if config.out is None and (config.resume == "auto" or config.save_every):
        raise InvalidArgumentError("checkpoints need a folder: pass --out")
    if config.keep and not config.save_every:
        raise InvalidArgumentError(
            f"keep={config.keep} has no checkpoints to keep: pass --save-every"
        )
    if config.out is not None and config.out.exists() and not config.out.is_dir():
        raise InvalidArgumentError(f"out {config.out} is a file; pass a folder")


def _check_experts(config: PretrainConfig) -> None:
    """Check the expert parallel size; reading `grid` checks that ep folds the other axes."""
    experts = getattr(sizes_of(config), "num_experts", 0)
    if config.ep > 1 and not experts:
        raise InvalidArgumentError(
            f"ep {config.ep} divides experts, and the model has none: pass --experts"
        )
    if config.ep > max(experts, 1):
        raise InvalidArgumentError(f"ep {config.ep} must be at most experts = {experts}")
    _ = config.grid
