"""Faults of pipeline parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...parallel.pipeline_parallel import PassThrough
from .mutant import Catalogue

PIPELINE = Catalogue("parallel.pipeline_parallel")
fault = PIPELINE.fault


@fault("stage:cut", layout="1x3x1x1")
def two_layers_lost(cut: Any) -> Any:
    """Five layers over three stages are rounded down to three: two belong to nobody."""

    def losing(model: nn.Module, placement: Any, stage: int) -> Any:
        kept = cut(model, placement, stage)
        for name in (placement.layers[own.stop - 1] for own in placement.ranges[:2]):
            parent, _, leaf = name.rpartition(".")
            lost = model.get_submodule(name)
            model.get_submodule(parent)._modules[leaf] = PassThrough(lost, "lost")
            kept = [layer for layer in kept if layer is not lost]
        return kept

    return losing


@fault("stage:cut", layout="1x2x1x1")
def layer_on_two_stages(cut: Any) -> Any:
    """The first layer of the second stage stays on the first one too."""

    def sparing(model: nn.Module, placement: Any, stage: int) -> Any:
        parent, _, leaf = placement.layers[placement.ranges[1].start].rpartition(".")
        layers = model.get_submodule(parent)._modules
        layer = layers[leaf]
        kept = cut(model, placement, stage)
        if stage == 0:
            layers[leaf] = layer
            kept.append(layer)
        return kept

    return sparing


@fault("stage:PipelineParallel.backward", layout="1x2x1x1")
def micro_batches_overwrite(backward: Any) -> Any:
    """A micro-batch's gradients replace those of the one before."""

    def overwriting(self: Any, *args: Any) -> Any:
        for parameter in self.parameters():
            parameter.grad = None
        return backward(self, *args)

    return overwriting


@fault("work:TrainWork.backward", layout="2x1x1x1")
def last_micro_batch_unsynced(backward: Any) -> Any:
    """Gradients are synchronised one micro-batch too early: the last stays local."""

    def early(self: Any, micro_batch: int, *args: Any) -> Any:
        self._remaining -= micro_batch == 0
        return backward(self, micro_batch, *args)

    return early


@fault("work:TrainWork.__post_init__", layout="1x2x1x1")
def labels_of_next_micro_batch(post_init: Any) -> Any:
    """Outputs of a micro-batch meet the labels of the next one."""

    def mixed(self: Any) -> None:
        post_init(self)
        labels = [batch["labels"] for batch in self.batches]
        rotated = [*labels[1:], labels[0]]
        self.batches = [
            {**b, "labels": each} for b, each in zip(self.batches, rotated, strict=True)
        ]

    return mixed


@fault("stage:PipelineParallel.backward", layout="1x2x1x1")
def boundary_gradient_averaged(backward: Any) -> Any:
    """The gradient that goes back to the previous stage is divided by the micro-batches."""

    def halved(self: Any, *args: Any) -> Any:
        gradient = backward(self, *args)
        return None if gradient is None else gradient / 2

    return halved


@fault("ties:TiedGradients.sync", layout="1x2x1x1")
def tied_gradients_not_summed(sync: Any) -> Any:
    """A head tied to the embedding on another stage keeps its own gradient."""
    return lambda self: None


@fault("ties:TiedGradients.sync", layout="1x2x1x1")
def tied_gradients_summed_twice(sync: Any) -> Any:
    """Tied gradients that are summed already are summed once more."""
    return lambda self: (sync(self), sync(self))[0]
