"""The problem for all layouts: a model, batches, optimizers, and one process's run of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..compose.entries import RowDims
from ..compose.one_process import call_plain, entries_for, plain_loss
from ..compose.own_loss import LossFunction
from ..dist.building import Locator
from ..models import Llama, LlamaConfig, Mixture, MixtureConfig
from ..parallel.pipeline_parallel import Split
from . import dropout
from .device import in_dtype, moved, placed
from .expert_choices import Choice, decided, doubtful, in_order, watched
from .precision import model_precision

LEARNING_RATE = 0.1
ADAM_EPS = 1e-2  # large: a small one turns rounding of tiny gradients into whole steps
MAX_NORM = 1.0
STEPS = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """The optimizers of consecutive steps."""

    # returns the optimizers for given parameters
    make: Callable[[Iterable[Any]], Sequence[Optimizer]]
    clips: bool  # whether gradients are clipped to `MAX_NORM` before the optimizer step


@dataclass(frozen=True, slots=True)
class Chosen:
    """Makes an optimizer for all parameters; if it takes only matrices, AdamW gets the rest."""

    # its class, a function of parameters, or the locator of either
    kind: Locator | Callable[..., Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments

    def __call__(self, parameters: Iterable[Any]) -> list[Optimizer]:
        """Return the optimizers for parameters."""
        every = list(parameters)
        kind = self.kind.find() if isinstance(self.kind, Locator) else self.kind
        try:
            return [kind(every, **self.options)]
        except ValueError:
            matrices = [each for each in every if each.ndim == 2]
            rest = [each for each in every if each.ndim != 2]
            if not matrices or not rest:
                raise
            return [kind(matrices, **self.options), torch.optim.AdamW(rest, **_ADAMW)]


# Unclipped SGD first: Adam and clipping hide scale errors. Each makes two steps: only the second
# depends on the moments of the first.
_ADAMW: Mapping[str, Any] = {"lr": LEARNING_RATE / 10, "eps": ADAM_EPS}
PHASES = (
    *2 * [Phase(Chosen(torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}), clips=False)],
    *2 * [Phase(Chosen(torch.optim.AdamW, _ADAMW), clips=True)],
)  # of each step


def phases_of(chosen: Chosen) -> tuple[Phase, ...]:
    """Return the phase of each step of a proof with an optimizer chosen by the user."""
    return (Phase(chosen, clips=False),) * STEPS


def phase_at(step: int, phases: Sequence[Phase]) -> tuple[Phase, bool]:
    """Return the phase of a step, 0-based, and whether the step is its first."""
    return phases[step], step == 0 or phases[step] is not phases[step - 1]


Batch = Mapping[str, Any]
ModelFn = Callable[[], nn.Module]
Put = Callable[[str, Tensor], None]  # is called with 'loss' and 'norm'
Watch = Callable[[nn.Module, int, Batch], AbstractContextManager[Put]]  # surrounds a step
BatchFn = Callable[[int], Any]

TORCH_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and its training, in a form that can be sent to ranks."""

    model_fn: Locator  # makes the plain model
    # tensor and expert parallel plan; None recognises the model's family
    plan: Mapping[str, Any] | None = None
    split: Split | None = None  # pipeline split; None infers it
    phases: Sequence[Phase] = PHASES  # the optimizers of each step
    device: str = "cpu"  # the kind of device that computes, such as 'cuda'
    row_dims: RowDims | None = None  # as for `shard_global_batch`
    sequence_dims: RowDims | None = None  # as for `shard_global_batch`
    loss_fn: Locator | None = None  # as for `train_step`; None is the cross entropy of tokens

    @property
    def loss(self) -> LossFunction | None:
        """The loss function itself, or None."""
        return None if self.loss_fn is None else self.loss_fn.find()

    def model(self, dtype: str, device: torch.device | None = None) -> nn.Module:
        """Return the plain model in a dtype, on `device` or the subject's kind of device."""
        return placed(self.model_fn.find()(), device or self.device, TORCH_DTYPES[dtype])


class Step(NamedTuple):
    """The state of one process after a step's backward, and after its optimizer."""

    # the global "loss", the "norm" of the whole gradient, "gradients" by plain names (shared
    # parameters under each of their names), and the new "weights", by `state_dict`
    saved: dict[str, Any]
    choices: list[Choice]  # the scores of each `topk` call of the model, and which of them it chose


def default_model() -> nn.Module:
    """Return a small Llama that splits up to 8 ways on each axis; grouped queries, tied head."""
    return sharpened(Llama(LlamaConfig(*_SMALL, tie_embeddings=True)))


def default_mixture() -> nn.Module:
    """Return the default model with 8 experts per layer, two for each token."""
    return sharpened(Mixture(MixtureConfig(*_SMALL, tie_embeddings=True, num_experts=8)))


_SMALL = (64, 64, 96, 8, 16, 8)  # vocabulary, features, inside the MLP, layers, heads, key heads


def sharpened(model: nn.Module) -> nn.Module:
    """Scale up the matrices of a model and return it: usual weights leave attention uniform."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    return model


def default_batch(step: int, *, vocab_size: int = 64, rows: int = 16, length: int = 16) -> Batch:
    """Return random tokens with ragged labels: half of the rows have no valid label at all.

    The rows move on each step: ranks that never have a gradient would look idle.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    return labelled(tokens, step, generator)


def labelled(tokens: Tensor, step: int, generator: torch.Generator) -> Batch:
    """Return the batch made of tokens [B, L + 1], with labels as `default_batch` describes."""
    labels = tokens[:, 1:].clone()
    masked = torch.rand(labels.shape, generator=generator) < 0.25
    rows, length = labels.shape
    rows_in_turn = torch.arange(rows).roll(-step * max(rows // 4, 1))
    masked[rows_in_turn[: rows // 2]] = True
    masked[rows_in_turn[rows // 2 : rows * 3 // 4], length // 2 :] = True
    return {"input_ids": tokens[:, :-1], "labels": labels.masked_fill(masked, -100)}


def mean_loss(logits: Any, labels: Tensor) -> Tensor:
    """Return the mean loss of the tokens that have a label (not -100), or zero if none has."""
    flat = getattr(logits, "logits", logits).flatten(0, 1)
    loss = F.cross_entropy(flat, labels.flatten(), ignore_index=-100, reduction="sum")
    return loss / (labels != -100).sum().clamp(min=1)


def begin(
    subject: Subject, batch_fn: BatchFn, dtype: str, steps: int = STEPS
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the plain model, made from a fixed seed, and a dict of its weights and the batches."""
    torch.manual_seed(0)
    model = subject.model(dtype)
    batches = (entries_for(model, batch_fn(step)) for step in range(steps))
    return model, {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "batches": [moved(batch, subject.device) for batch in batches],
        "dropout": bool(dropout.dropouts(model)),
    }


def doubts(steps: Sequence[Step], limits: Sequence[float], dtype: str) -> dict[str, Any]:
    """Return each step's limit on score errors, and the tokens that rounding may reroute."""
    near = [  # `by_scores` allows margins of 2 limits on ranks, and both scores may be off by one
        doubtful(step.choices, 4 * limit) if dtype != "float64" else []
        for step, limit in zip(steps, limits, strict=True)
    ]
    return {"limits": limits, "doubtful": [[tuple(each) for each in found] for found in near]}


def one_process(
    subject: Subject,
    saved: Mapping[str, Any],
    dtype: str,
    choices: Sequence[Choice] = (),
    watch: Watch = lambda _model, _step, _batch: nullcontext(lambda _what, _value: None),
) -> list[Step]:
    """Train the plain model in plain PyTorch, whole batches at once, dropout switched off.

    `saved` is what `begin` returned. `choices` are experts to use, one entry for each `topk` call;
    `watch` makes a context manager around each step.
    """
    torch.manual_seed(0)
    model = subject.model(dtype)
    model.load_state_dict(saved["state"])
    dropout.switch(model, on=False)
    steps = []
    with decided(in_order(choices)) if choices else nullcontext():
        for number, whole in enumerate(saved["batches"]):
            batch = in_dtype(whole, TORCH_DTYPES[dtype])
            phase, first = phase_at(number, subject.phases)
            if first:
                optimizers = phase.make(model.parameters())
            with watch(model, number, batch) as put:
                steps.append(_one_step(model, batch, phase, optimizers, put, subject))
    return steps


def _one_step(
    model: nn.Module,
    batch: Batch,
    phase: Phase,
    optimizers: Sequence[Optimizer],
    put: Put,
    subject: Subject,
) -> Step:
    with model_precision(next(model.parameters()).dtype), watched() as choices:
        output = call_plain(model, batch)
        if (loss_fn := subject.loss) is None:
            loss = mean_loss(output, batch["labels"])
        else:
            loss = plain_loss(loss_fn, output, batch, subject.row_dims, subject.sequence_dims)
    put("loss", loss)
    with model_precision(next(model.parameters()).dtype):
        loss.backward()
    named = list(model.named_parameters(remove_duplicate=False))
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    own = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(own)
    put("norm", norm)
    if phase.clips:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = {"loss": loss.detach(), "norm": norm, "gradients": gradients, "weights": weights}
    return Step(saved, choices)
