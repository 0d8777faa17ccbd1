"""A plain module rewritten, in place, as one stage of a pipeline."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_rank, group_ranks
from ....dist.agreement import agree
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import ModuleWrapper, axis_group, describe_rank
from ..runtime.forms import Form, is_hidden, signature, tensors_in
from ..runtime.recorder import Recorder
from ..schedules.choose import AnySchedule, stages_of
from ..splitting.split import Placement, Split, place
from ..splitting.tree import changes_nothing
from .cut import Passage, cut
from .examination import Examination
from .hidden import HiddenFlow
from .ties import Tie, TiedGradients, find_ties
from .weights import Deferral, WeightGradients, defer_weight_gradients

MANY_FORMS = 4096  # forms that are remembered at most, on every rank alike

_serials: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)


class PipelineParallel(ModuleWrapper):
    """One rank's stages of a pipeline over an unmodified module.

    ``model`` itself is rewritten: modules of other ranks become `PassThrough`, and their parameters
    are freed. Names stay: ``layers.5.mlp.up_proj.weight`` is called so on the rank that has it. The
    module's forward is run as it is, with hidden states in place of ``input_ids`` on every stage
    but the first, or as ``inputs_embeds`` where it has an argument of that name. Build the
    optimizer afterwards.

    Every rank of the pipeline passes the same whole model; they compare names, shapes, dtypes and
    the split here. A parameter shared by modules of several ranks starts from the first owner's
    values.

    Args:
        model: a plain module that holds its layers in a list.
        config: where to cut; None infers it (`infer_split`).
        group: the ranks in order; None is the manager's pp axis.
        schedule: what `train_step_pipeline` runs: a name of `SCHEDULES`, a function of ranks and
            micro-batches, or a schedule. It decides which stages a rank has.

    Raises:
        InvalidArgumentError: a split that does not fit, more stages than layers, or no such
            schedule.
        MismatchError: the ranks were given different models, splits or schedules.
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
        placement, ranks_stages, splits = _agreed_placement(model, config, schedule, group)
        super().__init__(model)
        self.group = group
        self.ranks = ranks
        self.rank = ranks.index(get_rank())
        self.schedule = schedule
        self.all_stages = ranks_stages  # each rank's, chunk by chunk
        self.stages = ranks_stages[self.rank]
        self.num_stages = sum(map(len, ranks_stages))
        self.placement = placement
        self.forms: dict[Hashable, dict[int, Form]] = {}  # what `Mail` knows from earlier steps
        self._trained: tuple[int, ...] = ()
        self.deferral = Deferral()
        homes = {stage: rank for rank, stages in enumerate(ranks_stages) for stage in stages}
        ties = find_ties(model, placement, homes, self.rank)
        passage = Passage()
        self._flows = [
            HiddenFlow(stage, *_ends(model, placement, stage), passage) for stage in self.stages
        ]
        self._examined: set[Hashable] = set()  # kinds of forwards that were, the first time
        self._chunks = cut(model, placement, self.stages, passage)
        self._takes_embeds = _takes(model, "inputs_embeds")
        if splits:
            defer_weight_gradients(model, self.deferral)
        self.recorder: Recorder | None = None  # set by `recording`
        self._tied = TiedGradients(ties, ranks, self.rank, group)
        self._tied.share_values()
        self._own = tuple(self.parameters())
        self.name = f"{ranks} {next(_serials[ranks])}"  # the same on all its ranks, and no other's
        self.serials = count()  # numbers steps

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank takes ``input_ids``."""
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.num_stages - 1 in self.stages

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several ranks hold, with all their names in the whole model."""
        return self._tied.ties

    @property
    def tied_parameters(self) -> dict[str, tuple[int, ...]]:
        """Places of the ranks that hold a parameter of several, ascending, by each of its names.

        After a train step all its owners hold the same gradient, so whoever adds up over stages (a
        global norm) counts it on the first owner alone.
        """
        return {name: tie.owners for tie in self._tied.ties for name in tie.names}

    def select(self, chunk: int) -> None:
        """Let ``forward`` run this one of the rank's stages; the first one where none is selected.

        The modules of the others are out of the model until `select_all`.
        """
        self._chunks.select(chunk)

    def select_all(self) -> None:
        """Put back the modules of all the rank's stages."""
        self._chunks.restore()

    def forward(self, input_or_hidden: Any, **kwargs: Any) -> Any:
        """Run a stage.

        Args:
            input_or_hidden: [B, L] ``input_ids`` on the first stage, else what the stage before
                returned, such as [B, L, H] hidden states.
            **kwargs: further arguments of the model's forward, the same on every stage.

        Returns:
            Hidden states, or several tensors in the container that the layers return them in; what
            the model returns on the last stage.

        Raises:
            InvalidArgumentError: the model changes hidden states outside the modules of its split,
                or gives one of these modules, or returns, what is another tensor in one process.
        """
        stage, flow = self.stages[self._chunks.selected], self._flows[self._chunks.selected]
        received = input_or_hidden if stage else None
        kind = (stage, self.training, torch.is_grad_enabled(), *_kind(input_or_hidden, kwargs))
        examination = None if kind in self._examined else self._examination(stage, received)
        flow.start(received, examination)
        try:
            with nullcontext() if examination is None else examination.watching():
                if stage > 0 and self._takes_embeds:
                    output = self.module(inputs_embeds=received, **kwargs)
                else:
                    output = self.module(input_or_hidden, **kwargs)
            if stage < self.num_stages - 1:
                output = flow.passed_on(output)
            elif examination is not None:
                examination.check_output(output)
        finally:
            flow.reset()
        self._examined.add(kind)
        return output

    def _examination(self, stage: int, received: Any) -> Examination | None:
        """Return what examines the first forward of a kind; None where nothing has been cut."""
        if self.num_stages == 1:
            return None
        if len(self._examined) > MANY_FORMS:
            self._examined.clear()
        own = {name: self.module.get_submodule(name) for name in self.placement.stages[stage]}
        modules = {name: module for name, module in own.items() if not changes_nothing(module)}
        return Examination(modules, received, last=stage == self.num_stages - 1)

    def backward(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any) -> Any:
        """Backpropagate through a stage.

        Args:
            input_tensor: the hidden states that forward was given, leaves; None on the first stage.
            output_tensor: what forward returned, or the loss on the last stage; or weight gradients
                that an earlier backward has left for later.
            output_tensor_grad: gradient of ``output_tensor``, for each tensor that requires one
                where there are several; None for a loss.

        Returns:
            The gradient of ``input_tensor``, a list where it is not one tensor; None on the first
            stage.
        """
        if isinstance(output_tensor, WeightGradients):
            return output_tensor.accumulate()
        before = [parameter.grad for parameter in self._own]
        outputs = [tensor for tensor in tensors_in(output_tensor) if tensor.requires_grad]
        if outputs:  # none where everything up to here is frozen
            gradients = None if output_tensor_grad is None else tensors_in(output_tensor_grad)
            torch.autograd.backward(outputs, gradients)
        leaves = [] if input_tensor is None else tensors_in(input_tensor)
        made = [_gradient(tensor) for tensor in leaves if tensor.requires_grad]
        pairs = zip(self._own, before, strict=True)
        fresh = [parameter for parameter, gradient in pairs if parameter.grad is not gradient]
        _part(fresh, [*made, *self.deferral.gradients()])
        if input_tensor is None:
            return None
        return made[0] if isinstance(input_tensor, Tensor) and made else made

    def trained(self) -> int:
        """Return a number that changes when parameters are frozen, unfrozen or cast."""
        self._own = tuple(self.parameters())  # adapters may have come
        return hash(tuple((parameter.requires_grad, parameter.dtype) for parameter in self._own))

    def forget_forms(self, trained: tuple[int, ...]) -> None:
        """Forget the forms of what stages pass on, where parameters were frozen, unfrozen or cast.

        Args:
            trained: what `trained` returned on each rank.
        """
        if trained != self._trained or len(self.forms) > MANY_FORMS:
            self.forms.clear()
            self._examined.clear()
            self._trained = trained

    def check_ties(self) -> None:
        """Check that the parameters that several ranks hold are those that they were.

        Raises:
            StateError: Another one is in the place of one of them.
        """
        own = [tie for tie in self._tied.ties if tie.parameter is not None]
        held = set(self.parameters()) if own else set()
        for tie in own:
            if tie.parameter not in held:
                raise StateError(
                    f"{describe_rank()}: {tie.names[0]}, which several ranks hold, has been "
                    "replaced by another parameter, so its gradients would not be summed; copy "
                    "values into it (load_state_dict without assign=True)"
                )

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


def _part(parameters: Iterable[nn.Parameter], kept: Iterable[Tensor]) -> None:
    """Give gradients memory of their own, where autograd took that of tensors still to be used.

    It takes views as they are, and adds the next micro-batch's into them.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            continue  # none, or one that only stands for shards elsewhere
        if gradient.untyped_storage().data_ptr() in memory:
            parameter.grad = gradient.clone()


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _ends(
    model: nn.Module, placement: Placement, stage: int
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return a stage's first and last module, but not where the model begins or ends."""
    names = placement.stages[stage]
    last = stage == len(placement.stages) - 1
    entry = None if stage == 0 else model.get_submodule(names[0])
    return entry, None if last else model.get_submodule(names[-1])


def _kind(given: Any, kwargs: Mapping[str, Any]) -> Iterator[Hashable]:
    """Yield what the way of a forward may depend on."""
    for tensor in tensors_in(given) if is_hidden(given) else [given]:
        yield signature(tensor)
    for name, value in kwargs.items():
        yield name, signature(value)


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
    model: nn.Module, config: Split | None, schedule: AnySchedule, group: ProcessGroup | None
) -> tuple[Placement, tuple[tuple[int, ...], ...], bool]:
    """Place the model's modules on stages, the same on every rank or an error on every rank.

    Returns:
        The placement, each rank's stages, and whether the schedule parts backwards.
    """
    facts: list[str] = []
    failed: Exception | None = None
    try:
        if not isinstance(model, nn.Module) or isinstance(model, PipelineParallel):
            message = f"PipelineParallel wraps a plain nn.Module, got {type(model).__name__}"
            raise InvalidArgumentError(message)
        facts = _parameter_facts(model)
        stages, splits = stages_of(schedule, len(group_ranks(group)))
        placement = place(model, config, sum(map(len, stages)))
        facts += [f"{placement.split}", f"stages of each rank: {stages}"]
    except Exception as error:  # a function that makes a schedule may raise anything
        failed = error
    agree("the model that PipelineParallel splits", facts, group, error=failed)
    return placement, stages, splits
