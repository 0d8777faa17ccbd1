"""A plain module rewritten, in place, as one stage of a pipeline."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import get_rank, group_ranks
from ...dist.agreement import agree
from ...dist.errors import InvalidArgumentError
from ..pg_manager import ModuleWrapper, axis_group
from .cut import cut
from .hidden import HiddenFlow
from .split import Placement, Split, place
from .ties import TiedGradients, find_ties

if TYPE_CHECKING:
    from .record import Recorder


class PipelineParallel(ModuleWrapper):
    """One stage of a pipeline over an unmodified module.

    ``model`` itself is rewritten: modules of other stages become `PassThrough`, and their
    parameters are freed. Names stay: ``layers.5.mlp.up_proj.weight`` is called so on the stage that
    has it. The module's forward is run as it is, with hidden states in place of ``input_ids`` on
    every stage but the first, or as ``inputs_embeds`` where it has an argument of that name. Build
    the optimizer afterwards.

    Every rank of the pipeline passes the same whole model; they compare names, shapes, dtypes and
    the split here. A parameter shared by modules of several stages starts from the first owner's
    values.

    Args:
        model: a plain module that holds its layers in a list.
        config: where to cut; None infers it (`infer_split`).
        group: the stages in order; None is the manager's pp axis.

    Raises:
        InvalidArgumentError: a split that does not fit, or more stages than layers.
        MismatchError: the ranks were given different models or splits.
    """

    def __init__(
        self, model: nn.Module, config: Split | None = None, group: ProcessGroup | None = None
    ) -> None:
        group = axis_group("pp", group)
        ranks = group_ranks(group)
        placement = _agreed_placement(model, config, len(ranks), group)
        super().__init__(model)
        self.group = group
        self.ranks = ranks
        self.stage = ranks.index(get_rank())
        self.placement = placement
        ties = find_ties(model, placement, self.stage)
        own_layers = cut(model, placement, self.stage)
        self._embeds = not self.is_first_stage and _takes(model, "inputs_embeds")
        self._flow = HiddenFlow(own_layers, first=self.is_first_stage, last=self.is_last_stage)
        self.recorder: Recorder | None = None  # set by `recording`
        self._tied = TiedGradients(ties, ranks, self.stage, group)
        self._tied.share_values()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage takes ``input_ids``."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.num_stages - 1

    @property
    def tied_parameters(self) -> dict[str, tuple[int, ...]]:
        """Stages that hold a parameter of several stages, ascending, by each of its names.

        After a train step all its owners hold the same gradient, so whoever adds up over stages (a
        global norm) counts it on the first owner alone.
        """
        return {name: tie.owners for tie in self._tied.ties for name in tie.names}

    def forward(self, input_or_hidden: Any, **kwargs: Any) -> Any:
        """Run this stage.

        Args:
            input_or_hidden: [B, L] ``input_ids`` on the first stage, else [B, L, H] hidden states.
            **kwargs: further arguments of the model's forward, the same on every stage.

        Returns:
            Hidden states [B, L, H], or what the model returns on the last stage.

        Raises:
            InvalidArgumentError: the model changes hidden states outside the modules of its split.
        """
        self._flow.start(input_or_hidden)
        try:
            if self._embeds:
                output = self.module(inputs_embeds=input_or_hidden, **kwargs)
            else:
                output = self.module(input_or_hidden, **kwargs)
            self._flow.finish(output)
        finally:
            self._flow.reset()
        return output

    def backward(
        self,
        input_tensor: Tensor | None,
        output_tensor: Tensor,
        output_tensor_grad: Tensor | None,
    ) -> Tensor | None:
        """Backpropagate through this stage.

        Args:
            input_tensor: the hidden states that forward was given, a leaf; None on the first stage.
            output_tensor: what forward returned, or the loss on the last stage.
            output_tensor_grad: gradient of ``output_tensor``; None for a loss.

        Returns:
            The gradient of ``input_tensor``; None on the first stage.
        """
        if output_tensor.requires_grad:  # not so where everything up to here is frozen
            torch.autograd.backward(output_tensor, output_tensor_grad)
        if input_tensor is None:
            return None
        gradient = input_tensor.grad
        return torch.zeros_like(input_tensor) if gradient is None else gradient

    def set_earlier_gradients_aside(self) -> None:
        """Begin a step: ``sync_tied_gradients`` will add gradients it has summed already once."""
        self._tied.begin()

    def postpone_tied_gradients(self) -> None:
        """End a step whose gradients ``sync_tied_gradients`` sums together with a later step's."""
        self._tied.postpone()

    def sync_tied_gradients(self) -> None:
        """Sum the gradients of parameters that several stages hold; equal bits on every owner.

        The train steps do so. A loop of one's own calls it once, on every stage, after the last
        backward of an accumulation that began without gradients.
        """
        self._tied.sync()


def _takes(model: nn.Module, argument: str) -> bool:
    """Tell whether the forward has an argument, also where subclasses pass all on to it."""
    passing = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for base in type(model).__mro__:
        if "forward" in vars(base):
            parameters = inspect.signature(vars(base)["forward"]).parameters
            if argument in parameters or not passing <= {p.kind for p in parameters.values()}:
                return argument in parameters
    return False


def _parameter_facts(model: nn.Module) -> list[str]:
    first: dict[nn.Parameter, str] = {}
    facts = []
    for name, p in model.named_parameters(remove_duplicate=False):
        form = f"shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
        owner = first.setdefault(p, name)
        facts.append(f"parameter {name} of {form}" + (f", tied to {owner}" * (owner != name)))
    return facts


def _agreed_placement(
    model: nn.Module, config: Split | None, num_stages: int, group: ProcessGroup | None
) -> Placement:
    """Place the model's modules on stages, the same on every rank or an error on every rank."""
    if not isinstance(model, nn.Module):
        message = f"PipelineParallel wraps an nn.Module, got {type(model).__name__}"
        raise InvalidArgumentError(message)
    facts = _parameter_facts(model)
    outcome: Placement | InvalidArgumentError
    try:
        outcome = place(model, config, num_stages)
        facts.append(f"{outcome.split}")
    except InvalidArgumentError as error:
        outcome = error
    failed = outcome if isinstance(outcome, InvalidArgumentError) else None
    agree("the model that PipelineParallel splits", facts, group, error=failed)
    if isinstance(outcome, InvalidArgumentError):
        raise outcome
    return outcome
