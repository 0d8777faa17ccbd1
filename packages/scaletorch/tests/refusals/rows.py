"""What is tried: the rows of "What is refused", each by models, and where these are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scaletorch.dist import get_rank

from . import models
from .models import decoder

ROWS, LENGTH = 8, 16
Batch = dict[str, Any]
Features = frozenset[str]


def batch(step: int) -> Batch:
    """Return tokens and labels, of which some count nothing."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(models.VOCAB, (ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 3:] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def always(_: Features) -> bool:
    return True


def never(_: Features) -> bool:
    return False


def on(*names: str) -> Callable[[Features], bool]:
    """Refused where any of these is."""
    return lambda features: bool(features & {*names})


def nothing(_model: nn.Module, _batches: list[Batch]) -> AbstractContextManager[Any]:
    return nullcontext()


def left_alone(_model: nn.Module) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Case:
    """One model of a row."""

    make: Callable[[int], nn.Module]  # of the number of layers
    refused: Callable[[Features], bool] = never  # by a layout's features
    words: str = "never"  # a pattern of what is said then
    batch: Callable[[int], Batch] = batch  # of a step
    options: Callable[[], Mapping[str, Any]] = dict  # of `parallelize`, called on each rank
    cut: Callable[[], Mapping[str, Any]] = dict  # further ones of `shard_global_batch`
    # What rank 1 does in the second step, to its model and micro-batches.
    later: Callable[[nn.Module, list[Batch]], AbstractContextManager[Any]] = nothing
    # What the loop does to a model before each step of the optimizer, and behind it.
    gradients: Callable[[nn.Module], Any] = left_alone
    weights: Callable[[nn.Module], Any] = left_alone


def vectors(step: int) -> Batch:
    """Return vectors [B, L, H] in place of tokens."""
    found = batch(step)
    ids = found.pop("input_ids")
    return {"vectors": models.drawn(step, (*ids.shape, models.HIDDEN)), **found}


def plan_of_vectors() -> Mapping[str, Any]:
    return {"plan": {**models.PLAN, "embed_tokens": "replicate"}}


def dims_of_vectors() -> Mapping[str, Any]:
    return {"sequence_dims": {"vectors": 1}}


def with_positions(step: int) -> Batch:
    return {**batch(step), "position_ids": torch.arange(2, LENGTH + 2).expand(ROWS, LENGTH)}


def with_weights(step: int) -> Batch:
    return {**batch(step), "weights": torch.ones(ROWS, LENGTH)}


def other_labels(step: int) -> Batch:
    found = batch(step)
    if get_rank() == 1:
        found["labels"] = found["labels"].roll(1, 0)
    return found


def recomputed_on_one() -> Mapping[str, Any]:
    return {"bucket_size": 100, "recompute": "selective" if get_rank() == 1 else False}


def contiguous() -> Mapping[str, Any]:
    return {"cp_layout": "stripe"}


def unsynchronised(model: Any, _batches: list[Batch]) -> AbstractContextManager[Any]:
    return model.no_sync()


def a_parameter(model: Any, _batches: list[Batch]) -> AbstractContextManager[Any]:
    model.module.module.extra = nn.Parameter(torch.zeros(1))
    return nullcontext()


def changed(change: Callable[[list[Batch]], Any]) -> Callable[..., AbstractContextManager[Any]]:
    """Return a `later` that changes micro-batches."""

    def later(_model: Any, batches: list[Batch]) -> AbstractContextManager[Any]:
        change(batches)
        return nullcontext()

    return later


def converted(name: str, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return changed(lambda batches: batches[0].update({name: convert(batches[0][name])}))


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def normed(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad.div_(each.grad.norm() + 1e-3)


@torch.no_grad()
def centred(model: nn.Module) -> None:
    for each in model.parameters():
        each.sub_(each.mean())


DIVIDED = ("cp", "sequence_parallel")


def sees_shards(features: Features) -> bool:
    """Return whether some stage sees shards of tokens alone."""
    return "cp" in features or {"sequence_parallel", "pp"} <= {*features}


FOUND = "computes something else on"
MIXES = f"{FOUND} .* than in one process: .* is off by"


def mixes(make: Callable[[int], nn.Module]) -> Case:
    return Case(make, on(*DIVIDED), MIXES)


def plain(refused: Callable[[Features], bool], words: str, **changes: Any) -> Case:
    return Case(models.Plain, refused, words, **changes)


# The beginning of each row of the table -> its models.
CASES: Mapping[str, Mapping[str, Case]] = {
    "takes `input_ids` alone": {"plain": Case(models.Plain)},
    "takes something else first": {
        "without dims": Case(
            models.OfVectors,
            on("cp"),
            "it is not known where this batch of vectors",
            batch=vectors,
            options=plan_of_vectors,
        ),
        "with dims": Case(
            models.OfVectors, batch=vectors, options=plan_of_vectors, cut=dims_of_vectors
        ),
    },
    "counts its own positions": {
        "counts": Case(models.Counts, on("cp"), MIXES),
        "counts from zeros": Case(models.CountsFromZeros, on("cp"), MIXES),
    },
    "takes `position_ids`, and its own do not start at 0": {
        "given": Case(models.Given),
        "offset": Case(models.Offset, sees_shards, FOUND),
        "offset said": Case(models.SaysOffset),
        "offset given": Case(models.Offset, batch=with_positions),
    },
    "mixes positions outside attention": {
        "conv": mixes(models.Conv),
        "cumsum": mixes(models.mixing(lambda x: x + x.cumsum(1))),
        "attention": Case(models.mixing(models.attended), on("sequence_parallel"), MIXES),
        "pool behind": Case(
            models.mixing(lambda x: x + x.mean(1, keepdim=True), "behind"), on("cp"), MIXES
        ),
    },
    "has a batch norm in training mode": {
        "batch norm": Case(
            models.Norm,
            on("several", "recompute", *DIVIDED),
            r"layers\.\d\.batch_norm \(BatchNorm1d\) takes statistics .*, and (recompute=True "
            r"would|sequence_parallel=True divides|2 micro-batches would|cp_size=\d divides)",
        ),
        "frozen batch norm": Case(models.FrozenNorm),
    },
    "changes parameters in its forward": {
        "shrinking": Case(
            models.Shrinking, always, r"changes parameter layers\.\d\.scale.*Change it after opt"
        ),
        "short": Case(models.Short, always, "changes parameter embed_tokens.weight|max_norm"),
    },
    "changes buffers in its forward": {
        "averages": Case(
            decoder(models.AverageLayer),
            on("dp", "several", "recompute", *DIVIDED),
            r"forward changes buffer layers\.\d\.mean|mean of .* would mix this rank's \d+ tokens",
        ),
        "largest": Case(
            decoder(feed_forward=models.LargestMLP),
            on("dp", "tp", "several", "recompute", *DIVIDED),
            "forward changes buffer layers.*.largest",
        ),
        "counting": Case(
            decoder(models.CountingLayer),
            on("several", "recompute"),
            "changes buffer layers.*.calls in each run",
        ),
    },
    "keeps state in attributes": {
        "remembering": Case(decoder(models.RememberingLayer), on("dp", "several", *DIVIDED), FOUND),
        "cooling": Case(models.Cooling, on("several"), FOUND),
        "noting": Case(models.Noting),
    },
    "returns another loss beside its logits": {
        "aux_loss": Case(models.Beside, always, "has aux_loss beside its logits"),
        "tuple": Case(models.InTuple, always, "returned a tuple"),
    },
    "has different weights on some tp or pp ranks": {
        "other weights": Case(models.Other, always, r"layers\.\d\.norm1.weight .*has values"),
        "other buffer": Case(models.OtherBuffer, always, "scale .*has values"),
        "other arguments": plain(
            always, r"arguments given to parallelize", options=recomputed_on_one
        ),
    },
    "gets a batch that differs": {
        "other labels": plain(always, "labels: on rank 1 .* not as on ", batch=other_labels)
    },
    "attends in one cp layout": {
        "stripe": plain(on("cp"), "cut in a stripe layout", cut=contiguous)
    },
    "has entries in its batch": {
        "weights": plain(always, "the batch has weights", batch=with_weights)
    },
    "uses a whole parameter between": {
        "scale": Case(decoder(feed_forward=models.ScaledMLP)),
        "norms of heads": Case(models.Normed),
    },
    "uses one parameter both there and outside": {
        "in and out": Case(
            decoder(feed_forward=models.BothMLP),
            lambda features: "tp" in features and "sequence_parallel" not in features,
            r"mlp\.scale.*in a parallel region and outside",
        )
    },
    "uses one parameter both on shards": {
        "gain": Case(  # logits that stay divided are shares as well
            models.Gained,
            lambda features: "sequence_parallel" in features and "loss_parallel" not in features,
            "gain'.*shares of the tokens",
        )
    },
    "is trained by a loop that scales gradients": {
        "torch's clipping": plain(
            on("tp", "pp", "zero"),
            "by different factors .* use scaletorch.compose.clip_grad_norm_|clip with clip_grad_no",
            gradients=clipped,
        )
    },
    "is trained by a loop that uses a statistic of a shard": {
        "gradients by their norms": plain(
            on("tp", "zero"),
            "the gradient .* was changed differently on tp ranks|whole_gradients",
            gradients=normed,
        ),
        "weights by their means": plain(
            on("tp"), "the weight .* was changed differently on tp ranks", weights=centred
        ),
    },
    "cannot do a later step": {
        "no_sync": plain(always, r"no_sync\(\), which all", later=unsynchronised),
        "parameter": plain(always, "extra came after the module was wrapped", later=a_parameter),
        "no labels": plain(
            always, "has no labels", later=changed(lambda each: each[0].pop("labels"))
        ),
        "no batch": plain(always, "has no micro-batches", later=changed(list.clear)),
        "gradient": plain(
            always,
            "input_ids of micro-batch 0 requires grad",
            later=converted("input_ids", lambda ids: ids.float().requires_grad_()),
        ),
        "numbers": plain(
            always, "labels .* integer", later=converted("labels", torch.Tensor.float)
        ),
    },
}
