"""The state that a stage keeps between calls of forward, backward and train steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..runtime.forms import Form
from .calls import Gates
from .cut import Chunks
from .passage import MANY_FORMS, Passages
from .ties import TiedGradients
from .weights import Deferral


@dataclass(slots=True, eq=False)
class RuntimeState:
    """The state of a `PipelineParallel` that the train steps use; not for users.

    Attributes:
        chunks: The rank's stages in the model, of which one can be selected.
        passages: The forwards of its stages.
        gates: The wrappers of each stage's modules.
        tied: The parameters that several ranks hold.
        deferral: The collector of the linear layers' postponed weight gradients.
        parameters: The rank's parameters when the running step began.
        trained: For each rank, a hash of which parameters it trained in the last step.
        forms: The forms of hidden states that `Mail` knows from earlier steps.
        reached: Stage and micro-batch signature of each input that has received a gradient.
        ids: The `input_ids` of the next forward, on any stage; None if they are not a tensor.
        steps_alone: Whether only steps may call the stage, since callers expect a whole model.
        in_step: Whether a step is calling the stage.
    """

    chunks: Chunks
    passages: Passages
    gates: list[Gates]
    tied: TiedGradients
    deferral: Deferral
    parameters: tuple[nn.Parameter, ...] = ()
    trained: tuple[int, ...] = ()
    forms: dict[Hashable, dict[int, Form]] = field(default_factory=dict)
    reached: set[Hashable] = field(default_factory=set)
    ids: Tensor | None = None
    steps_alone: bool = False
    in_step: bool = False

    def note_parameters(self, module: nn.Module) -> int:
        """Record the parameters at the beginning of a step, since adapters may add some.

        Returns:
            A hash that changes when parameters are frozen, unfrozen or cast.
        """
        self.parameters = tuple(module.parameters())
        return hash(tuple((each.requires_grad, each.dtype) for each in self.parameters))

    def compare_parameters(self, trained: tuple[int, ...]) -> None:
        """Forget the forms of hidden states if parameters were frozen, unfrozen or cast.

        A tied parameter must be frozen on all its owners or on none.

        Args:
            trained: The result of `note_parameters` on each rank. All ranks compare the same
                hashes, so both sides of a message forget its form together.

        Raises:
            StateError: Only some owners have frozen a tied parameter; on every rank.
        """
        if trained != self.trained:
            self.tied.require_alike()
        if trained != self.trained or len(self.forms) > MANY_FORMS:
            self.forms.clear()
            self.passages.found.clear()
            self.reached.clear()
            self.trained = trained
