"""A plain module changed, in place, into one rank's stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_rank, group_ranks
from ....dist.building import prepare_backward, tensors_in
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import ModuleWrapper, axis_group, describe_rank
from ...pg_manager.building import (
    connect,
    deep_copy,
    mark_staged,
    refuse_generate,
    show_output,
)
from ..runtime.forms import Form, facts_of
from ..runtime.mail import goes_in_batches
from ..schedules.builders import AnySchedule
from ..splitting.modules import forward_takes, siblings_of
from ..splitting.split import Split
from .calls import Gates, check_crossed, check_output, examining
from .cut import Chunks, agreed_placement, cut
from .passage import Passage, Passages
from .stand_ins import UnknownValueError, has_stand_ins, standing_like, with_received
from .ties import Tie, TiedGradients, find_ties, groups_of_owners, neighbours
from .weights import Deferral, WeightGradients, defer_weight_gradients

MANY_FORMS = 4096  # at most this many kinds of micro-batches are remembered on a rank


@dataclass(slots=True, eq=False)
class RuntimeState:
    """The state of a `PipelineParallel` that the train steps use; not for users."""

    chunks: Chunks  # the rank's stages in the model; one can be selected
    passages: Passages  # the forwards of its stages
    gates: list[Gates]  # the wrappers of each stage's modules
    crossed: tuple[str, ...]  # names of the modules around those of several stages
    tied: TiedGradients | None  # the parameters that several ranks hold; None if there are none
    deferral: Deferral  # the collector of the linear layers' postponed weight gradients
    parameters: tuple[nn.Parameter, ...] = ()  # the rank's, when the running step began
    trained: tuple[int, ...] = ()  # a hash of the parameters that each rank trained last
    # The forms of hidden states that `Mail` knows from earlier steps, by micro-batch signature.
    forms: dict[Hashable, dict[int, Form]] = field(default_factory=dict)
    # The stage and the micro-batch signature of each input that has received a gradient.
    reached: set[Hashable] = field(default_factory=set)
    ids: Tensor | None = None  # of the next forward, on any stage; None if they are not a tensor
    steps_alone: bool = False  # only steps may call the stage: callers expect a whole model
    in_step: bool = False  # a step is calling the stage

    def watch(self, model: nn.Module, gates: Iterable[Gates]) -> None:
        """Surround the modules of stages; adapters may have replaced some since the last step."""
        check_crossed(model, self.crossed)
        for gate in gates:
            gate.watch(model)

    def note_parameters(self, module: nn.Module) -> int:
        """Record the parameters at the beginning of a step, since adapters may add some.

        The result is a hash that changes when parameters are frozen, unfrozen or cast.
        """
        self.parameters = tuple(module.parameters())
        return hash(tuple((p.requires_grad, p.dtype) for p in self.parameters))

    def compare_parameters(self, trained: tuple[int, ...]) -> None:
        """Forget the forms of hidden states if parameters were frozen, unfrozen or cast.

        All ranks compare the same hashes, the results of `note_parameters` on each rank, so both
        sides of a message forget its form together.
        """
        if trained != self.trained and self.tied is not None:
            self.tied.require_same_frozen()
        if trained != self.trained or len(self.forms) > MANY_FORMS:
            self.forms.clear()
            self.passages.found.clear()
            self.reached.clear()
            self.trained = trained


class PipelineParallel(ModuleWrapper):
    """One rank's stages of a pipeline, cut from a plain module.

    `model` is changed in place: modules of other ranks become `PassThrough`, and their parameters
    are freed. Parameter names stay: `layers.5.mlp.up_proj.weight` keeps this name on its rank. The
    module's own forward runs on each stage. On later stages it gets the step's `input_ids` too, or
    a stand-in without them (as `inputs_embeds` if it takes these). Build the optimizer
    afterwards.

    Every rank of the pipeline passes the same whole model; the ranks compare names, shapes, dtypes
    and the split. A parameter shared by modules of several ranks starts from the first owner's
    values.

    Args:
        model: A plain module that holds its layers in a list.
        config: The places to cut it at; None infers them.
        group: The ranks in order; None is the manager's pp axis.
        schedule: The schedule of `train_step_pipeline`: a name in `SCHEDULES`, a function of the
            numbers of ranks and micro-batches, or a schedule. It decides which stages a rank has.

    Raises:
        InvalidArgumentError: The split does not fit the model, there are more stages than layers,
            or the schedule is unknown.
        MismatchError: The ranks were given different models, splits or schedules.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Split | None = None,
        group: ProcessGroup | None = None,
        *,
        schedule: AnySchedule = "1f1b",
    ) -> None:
        group = axis_group("pp", group)
        ranks = group_ranks(group)
        placement, ranks_stages, splits, number = agreed_placement(model, config, schedule, group)
        super().__init__(model)
        self.group = group
        self.ranks = ranks
        self.rank = ranks.index(get_rank())
        self.schedule = schedule
        self.all_stages = ranks_stages  # each rank's, chunk by chunk
        self.stages = ranks_stages[self.rank]
        self.num_stages = sum(map(len, ranks_stages))
        self.placement = placement
        self._takes_embeds = forward_takes(model, "inputs_embeds")
        # Ties can only be found in the whole model, before the cut.
        homes = {stage: rank for rank, stages in enumerate(ranks_stages) for stage in stages}
        ties = find_ties(model, placement, homes, self.rank)
        owners: dict[tuple[int, ...], ProcessGroup] = {}
        if group is not None and goes_in_batches(group):
            connect(group, neighbours(ranks_stages))
            owners = groups_of_owners(group, [tie.owners for tie in ties], number)
        tied = TiedGradients(ties, ranks, self.rank, group, owners) if ties else None
        passages = Passages(name for name, _ in placement.homes())
        deferral = Deferral()
        last = self.num_stages - 1
        lists = [{n: siblings_of(model, n) for n in names} for names in placement.stages]
        self._ends = [next(reversed(own.values()), "") for own in lists]  # of each last module
        gates = [Gates(passages, s, lists[s], last=s == last) for s in self.stages]
        chunks = cut(model, placement, self.stages, passages)
        if splits:
            defer_weight_gradients(model, deferral)
        if tied is not None:
            tied.share_values()
        prepare_backward(model.parameters())
        self.runtime = RuntimeState(chunks, passages, gates, placement.crossed(), tied, deferral)
        self.runtime.note_parameters(self)
        if self.num_stages > 1:
            mark_staged(model)
            refuse_generate(model, "each rank has its stages of the pipeline alone")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy of a pipeline that has a single stage.

        Raises:
            StateError: The pipeline has several stages.
        """
        if self.num_stages > 1:
            raise StateError(
                f"{describe_rank()}: a stage of a pipeline cannot be copied: for an average of "
                "weights keep average = {n: t.clone() for n, t in model.state_dict().items()}, "
                "update its tensors after each step (average[n].lerp_(t, 0.01)), and call "
                "model.load_state_dict(average) to evaluate or save it"
            )
        memo[id(self.group)] = self.group
        return deep_copy(self, None, memo)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast the placeholders of this rank's modules too."""
        for passing in self.runtime.chunks.passing():
            passing._apply(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def is_first_stage(self) -> bool:
        """True on the rank that takes `input_ids`."""
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """True on the rank that computes the loss."""
        return self.num_stages - 1 in self.stages

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that several ranks hold, with all their names in the whole model."""
        return () if self.runtime.tied is None else self.runtime.tied.ties

    @property
    def tied_parameters(self) -> dict[str, tuple[int, ...]]:
        """For each name of a tied parameter, the ascending places of its owners in the pipeline.

        After a train step all owners hold the same gradient, so a sum over stages (a global norm)
        counts it on the first owner alone.
        """
        return {name: tie.owners for tie in self.ties for name in tie.names}

    def select(self, chunk: int) -> None:
        """Select the rank's stage that `forward` runs; the default is the first.

        The modules of the rank's other stages are out of the model until `select_all`.
        """
        self.runtime.chunks.select(chunk)

    def select_all(self) -> None:
        """Put back the modules of all the rank's stages."""
        self.runtime.chunks.restore()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the selected stage; if the pipeline has one stage, call the model itself.

        Args:
            *inputs: One value: [B, L] `input_ids` on the first stage, else the output of the
                previous stage, such as [B, L, H] hidden states.
            **kwargs: Further arguments of the model's forward, the same on every stage.

        Returns:
            On the last stage the model's output. On others hidden states, or several tensors in the
            container that the layers return.

        Raises:
            InvalidArgumentError: It is called as the whole model; or the model's forward changes
                hidden states outside the split's modules, or a module takes, or the model returns,
                a tensor that this stage does not have.
        """
        if self.num_stages == 1:
            return self.module(*inputs, **kwargs)
        if len(inputs) != 1 or (self.runtime.steps_alone and not self.runtime.in_step):
            raise InvalidArgumentError(
                f"{describe_rank()}: this is one of {self.num_stages} stages of a pipeline, which "
                "takes one input: input_ids, or the output of the previous stage; and it was "
                "called as the whole model. Call on every rank train_step, eval_step or "
                "forward_step of scaletorch.compose, or train_step_pipeline or pipeline_forward"
            )
        (input_or_hidden,) = inputs
        runtime, chunk = self.runtime, self.runtime.chunks.selected
        stage, gates, model = self.stages[chunk], runtime.gates[chunk], self.module
        if not runtime.in_step:  # a step has done so for all its forwards
            runtime.watch(model, [gates])
        kind = (stage, self.training, torch.is_grad_enabled(), *facts_of(input_or_hidden, kwargs))
        passages, before = runtime.passages, self._ends[stage - 1]
        passage = passages.begin(kind, stage, input_or_hidden, gates.modules, before)
        try:
            output = self._run(model, passage, gates, kwargs)
            passages.keep(kind, passage)
        finally:
            passages.running = None
        show_output(model, output)
        return output

    def _run(
        self, model: nn.Module, passage: Passage, gates: Gates, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the model's forward with a single process's arguments; return the stage's output."""
        passage.first, named = self._first(passage)
        output: Any = None
        examined = examining(passage) if passage.examines else nullcontext()
        with examined, suppress(UnknownValueError):
            if named:
                output = model(inputs_embeds=passage.first, **kwargs)
            else:
                output = model(passage.first, **kwargs)
        if not gates.last:
            own = (p for module in gates.modules.values() for p in module.parameters())
            return passage.passed_on(output, own, self._ends[passage.stage])
        if has_stand_ins(output):
            output = with_received(output)  # it may have been received for a layer of this stage
            check_output(output)
        return output

    def _first(self, passage: Passage) -> tuple[Any, bool]:
        """Return the first argument of the model's forward, and whether to pass `inputs_embeds`.

        Later stages get the integer ids too. For floating point inputs they get a stand-in, since
        the form is enough. If the input is unknown, the stand-in has the form of the received
        hidden states.
        """
        passages, ids, given = self.runtime.passages, self.runtime.ids, passage.hidden
        if passage.stage == 0:
            return given, False
        if ids is not None and not ids.is_floating_point():
            return ids, False
        base = next(tensors_in(given))
        if ids is not None:
            return standing_like(ids, passages, base), False
        return standing_like(given, passages, base), self._takes_embeds

    def backward(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any) -> Any:
        """Backpropagate through a stage.

        Args:
            input_tensor: The hidden states given to forward, leaves; None on the first stage.
            output_tensor: The output of forward, or the loss on the last stage; or the weight
                gradients that an earlier backward has postponed.
            output_tensor_grad: The gradient of `output_tensor`, or one for each tensor in it that
                requires grad; None for a loss.

        Returns:
            The gradient of `input_tensor`, or a list of gradients if it holds several tensors; None
            on the first stage.
        """
        if isinstance(output_tensor, WeightGradients):
            return output_tensor.accumulate()
        into = self.runtime.deferral.into
        fresh = [parameter for parameter in self.runtime.parameters if parameter.grad is None]
        outputs = [tensor for tensor in tensors_in(output_tensor) if tensor.requires_grad]
        gradients = None if output_tensor_grad is None else [*tensors_in(output_tensor_grad)]
        if outputs:  # none if all layers so far are frozen
            torch.autograd.backward(outputs, gradients)
        passed_back = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in tensors_in(input_tensor)
            if tensor.requires_grad
        ]
        if fresh:
            kept = passed_back if into is None else [*passed_back, *into.gradients()]
            _give_own_memory(fresh, kept)
        if input_tensor is None:
            return None
        return passed_back[0] if isinstance(input_tensor, Tensor) and passed_back else passed_back

    def check_ties(self) -> None:
        """Check that no tied parameter was replaced since the model was split.

        Raises:
            StateError: Another parameter has replaced one.
        """
        if self.runtime.tied is not None:
            self.runtime.tied.check(self.parameters())

    def sync_tied_gradients(self) -> None:
        """Sum the gradients of parameters that several ranks hold; equal bits on every owner.

        The train steps call this. In your own loop, call it once on every rank, after the last
        backward of an accumulation that began without gradients.
        """
        if self.runtime.tied is not None:
            self.runtime.tied.sync()


def _give_own_memory(parameters: Iterable[nn.Parameter], kept: Iterable[Tensor]) -> None:
    """Copy gradients that share memory with tensors still in use.

    Autograd may store a view as `.grad`, and would add the next micro-batch's gradient in place.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            continue  # no gradient, or a placeholder for sharded ones
        if gradient.untyped_storage().data_ptr() in memory:
            parameter.grad = gradient.clone()
