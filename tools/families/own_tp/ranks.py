"""Training one step of a family, in one process or on ranks by transformers' own plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from exactly import Exact
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.distributed import DistributedConfig

from scaletorch import bisect
from scaletorch.dist.testing import relative_error

from ...gaps import gap
from ...groups import own_groups
from ..names import config_of, model_class
from ..reference import batch, build

DTYPES = {"float64": torch.float64, "float32": torch.float32}
PLAIN = "plain.pt"  # what one process found without `record`
ROUNDED = 1e-6  # transformers reads some weights in float32, whatever it is asked for


def save(name: str, folder: Path) -> bool:
    """Write a family's tiny model; return whether it has a plan of its own."""
    _quiet()
    model: Any = build(name)
    model.save_pretrained(folder)
    return bool(model.tp_plan)


def load(name: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Read the model, divided by its own plan where there are several ranks."""
    _quiet()
    options: dict[str, Any] = {}
    if (ranks := dist.get_world_size()) > 1:
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=ranks)
    model: Any = model_class(name).from_pretrained(
        folder, config=config_of(name), dtype=dtype, **options
    )
    model = model.to(dtype)  # also what transformers keeps in float32
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    read: nn.Module = model.train()
    return read


def loss_of(model: nn.Module) -> Tensor:
    """Return the mean loss of the tokens that count."""
    whole = batch(0)
    logits = model(input_ids=whole["input_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())


@own_groups()
def recorded(name: str, folder: Path, run: str) -> None:
    """Train a step in each dtype, recorded in FOLDER/RUN.DTYPE."""
    for word, dtype in DTYPES.items():
        model = load(name, folder, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bisect.record(folder / f"{run}.{word}", model=model) as tape:
            loss = loss_of(model)
            loss.backward()
            tape.put("loss", loss)
            optimizer.step()


def whole_tensors(name: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the weights, the loss and the gradients of a step that nobody records, all whole."""
    model = load(name, folder, torch.float64)
    weights = {n: _whole(p.detach()) for n, p in model.named_parameters()}
    with Exact():
        loss = loss_of(model)
        loss.backward()
    named = model.named_parameters()
    gradients = {n: _whole(p.grad) for n, p in named if p.grad is not None}
    cut = [p.numel() for p in model.parameters() if _is_cut(p)]
    share = torch.tensor(sum(cut) / sum(p.numel() for p in model.parameters()))
    found = {"weights": weights, "loss": {"loss": loss.detach()}, "gradients": gradients}
    return {**found, "cut": {"cut": share}}


def keep_plain(name: str, folder: Path) -> bool:
    """Keep what one process finds; return whether it reads the weights that were written."""
    found = whole_tensors(name, folder)
    torch.save(found, folder / PLAIN)
    written = {n: p.detach() for n, p in build(name).named_parameters()}
    return gap(found["weights"], written)[0] < ROUNDED


@own_groups()
def gaps(name: str, folder: Path) -> dict[str, tuple[float, str]]:
    """Return how far this rank's weights, loss and gradients are from those of one process."""
    found, expected = whole_tensors(name, folder), torch.load(folder / PLAIN)
    errors = {kind: gap(found[kind], expected[kind]) for kind in ("weights", "gradients")}
    errors["loss"] = relative_error(found["loss"]["loss"], expected["loss"]["loss"]), "loss"
    return {**errors, "cut": (found["cut"]["cut"].item(), "")}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(p != Replicate() for p in tensor.placements)


def _quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
