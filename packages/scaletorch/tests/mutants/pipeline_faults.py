"""Faults of pipeline parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

from scaletorch.parallel.pipeline_parallel import PassThrough

from .mutant import Catalogue

PIPELINE = Catalogue("parallel.pipeline_parallel", "1x2x1x1")
fault = PIPELINE.fault
TIED = "synchronisation: embed_tokens.weight | lm_head.weight"
LATER = "backward: *_proj | lm_head"


@fault("stages.stage:cut", layout="1x3x1x1", born="start: layers.?.*")
def two_layers_lost(cut: Any, model: nn.Module, placement: Any, stages: Any, *more: Any) -> Any:
    """Five layers over three stages are rounded down to three: two belong to nobody."""
    chunks = cut(model, placement, stages, *more)
    for name in (modules[-1] for modules in placement.stages[:2]):
        parent, _, leaf = name.rpartition(".")
        lost = model.get_submodule(name)
        if not isinstance(lost, PassThrough):
            model.get_submodule(parent)._modules[leaf] = PassThrough(lost, "lost")
    return chunks


@fault("stages.stage:cut", born="forward: layers.?")
def layer_on_two_stages(cut: Any, model: nn.Module, placement: Any, stages: Any, *more: Any) -> Any:
    """The last layer of the first stage stays on the second one too."""
    parent, _, leaf = placement.stages[0][-1].rpartition(".")
    layers = model.get_submodule(parent)._modules
    layer = layers[leaf]
    chunks = cut(model, placement, stages, *more)
    if 1 in stages:
        spared: Any = layer
        through: Any = layers[leaf]
        inner = spared.forward
        spared.forward = lambda x, *args: inner(through(x, *args), *args)
        layers[leaf] = spared
    return chunks


@fault(
    "stages.stage:PipelineParallel.backward",
    born="synchronisation: gradients ; backward: gradients",
)
def micro_batches_overwrite(backward: Any, self: Any, *args: Any) -> Any:
    """A micro-batch's gradients replace those of the one before."""
    for parameter in self.parameters():
        parameter.grad = None
    return backward(self, *args)


@fault("steps.training:Training._switch_sync", layout="2x1x1x1", born="synchronisation: gradients")
def last_micro_batch_unsynced(switch: Any, self: Any) -> None:
    """Gradients are synchronised one micro-batch too early: the last stays local."""
    if not hasattr(self.step.pipeline, "early"):
        self.step.pipeline.early = True
        self._backwards -= 1
    switch(self)


@fault("steps.training:Training.__init__", born="data: labels")
def labels_of_next_micro_batch(init: Any, self: Any, *args: Any) -> None:
    """Outputs of a micro-batch meet the labels of the next one."""
    init(self, *args)
    batches = self.step.inputs.batches
    labels = [batch["labels"] for batch in batches]
    for batch, of_next in zip(batches, [*labels[1:], labels[0]], strict=True):
        batch["labels"] = of_next


@fault("stages.stage:PipelineParallel.backward", born="backward: layers.?")
def boundary_gradient_averaged(backward: Any, self: Any, *args: Any) -> Any:
    """The gradient that goes back to the previous stage is divided by the micro-batches."""
    gradient = backward(self, *args)
    return None if gradient is None else gradient / 2


@fault("stages.ties:TiedGradients.sync", born=TIED)
def tied_gradients_not_summed(sync: Any, self: Any) -> Any:
    """A head tied to the embedding on another stage keeps its own gradient."""
    return None


@fault("stages.ties:TiedGradients.sync", born=TIED)
def tied_gradients_summed_twice(sync: Any, self: Any) -> Any:
    """Tied gradients that are summed already are summed once more."""
    return (sync(self), sync(self))[0]


@fault("stages.weights:WeightGradients.accumulate", schedule="zb_h1", born=LATER)
def weight_gradients_forgotten(accumulate: Any, self: Any) -> Any:
    """Gradients of weights that a backward has left for later are never computed."""
    return None


@fault("stages.weights:WeightGradients.leave", schedule="zb_v", born=LATER)
def weight_gradients_of_next_layer(
    leave: Any, self: Any, weight: Any, inputs: Any, gradient: Any
) -> Any:
    """A weight gradient that is computed later meets inputs that were scaled in between."""
    return leave(self, weight, inputs * 0.5, gradient)


@fault("stages.weights:WeightGradients.leave", schedule="zb_h1", born=LATER)
def weight_gradients_twice(leave: Any, self: Any, *given: Any) -> Any:
    """A weight gradient that a backward has left for later is computed twice."""
    return (leave(self, *given), leave(self, *given))[0]


@fault("runtime.mail:Mail.take_gradients", schedule="dualpipe_v", born="backward: layers.?")
def gradients_between_chunks_doubled(take: Any, self: Any, key: Any) -> Any:
    """The gradient that a stage hands back to another one of its rank counts twice."""
    local = key in self._outputs
    return [tensor * 2 if local else tensor for tensor in take(self, key)]
