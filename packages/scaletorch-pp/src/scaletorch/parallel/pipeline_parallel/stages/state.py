"""State that a stage keeps between the calls of its forward, its backward and the train steps."""

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
    """The parts of a `PipelineParallel` that the train steps drive; not for users.

    Attributes:
        chunks: The rank's stages in the model, of which one can be selected.
        passages: The forwards of its stages.
        gates: What surrounds the modules of each of them.
        tied: The parameters that several ranks hold.
        deferral: Where the linear layers leave their weight gradients.
        parameters: The rank's parameters when the running step began.
        trained: A number for each rank that tells which parameters it trained in the last step.
        forms: The forms of hidden states that `Mail` knows from earlier steps.
        reached: The stages, with the signature of a micro-batch, whose input has got a gradient.
        ids: The `input_ids` of the forward that comes, on any stage; None if they are no tensor.
        steps_alone: A stage may be called by steps alone, since callers take it for a whole model.
        in_step: A step calls the stage.
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
        """Note the parameters at the beginning of a step, since adapters may have come.

        Returns:
            A number that changes when parameters are frozen, unfrozen or cast.
        """
        self.parameters = tuple(module.parameters())
        return hash(tuple((each.requires_grad, each.dtype) for each in self.parameters))

    def compare_parameters(self, trained: tuple[int, ...]) -> None:
        """Forget the forms of hidden states if parameters were frozen, unfrozen or cast.

        Those that several ranks hold must have been so on all of them.

        Args:
            trained: The result of `note_parameters` on each rank. All ranks decide by the same
                numbers, so the two sides of a message always forget together.

        Raises:
            StateError: One of several owners has frozen a parameter alone; on every rank.
        """
        if trained != self.trained:
            self.tied.require_alike()
        if trained != self.trained or len(self.forms) > MANY_FORMS:
            self.forms.clear()
            self.passages.found.clear()
            self.reached.clear()
            self.trained = trained
