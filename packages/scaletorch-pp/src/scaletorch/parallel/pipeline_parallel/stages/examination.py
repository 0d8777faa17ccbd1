"""The first forward of a kind, examined: whether each module gets what it gets in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ..runtime.forms import main_argument
from .stand_ins import StandIns

_BESIDE = (
    "a tensor that the model's forward makes from hidden states, or with a module of another "
    "stage: a skip connection, the embedding's output, a condition that is embedded once for all "
    "layers. It is another tensor here than in one process; let layers pass it on, with the hidden "
    "states in one tuple, or compute it in every layer"
)


class Examination:
    """Watches one forward of a stage.

    Args:
        modules: The stage's modules by name, in order; between them the model's own code runs.
        received: The hidden states from the stage before; None on the first stage.
        last: Whether it is the model's last stage.

    Attributes:
        entered: Whether the stage's first module has been called.
    """

    def __init__(self, modules: Mapping[str, nn.Module], received: Any, *, last: bool) -> None:
        self.left = received  # the output of the module that was called last
        self.stand_ins = StandIns()
        self.stand_ins.add(received)
        self._modules, self._received = modules, received
        self._exit = None if last else list(modules.values())[-1]
        self.entered = received is None
        self._inside = 0
        self._on = False  # whether stand-ins are followed

    def leaves(self) -> list[Tensor]:
        """Return the parameters of this stage's modules, and the tensors that were received."""
        parameters = [p for module in self._modules.values() for p in module.parameters()]
        return [*parameters, *tensors_in(self._received)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Examine the forward that runs in this context.

        Raises:
            InvalidArgumentError: A module gets what it would not get in one process, or the model's
                own code fails, which may be because this stage lacks modules.
        """
        with ExitStack() as stack:
            stack.enter_context(_uncompiled())
            stack.callback(self._end)
            for name, module in self._modules.items():
                before = module.register_forward_pre_hook(
                    self._before(name), prepend=True, with_kwargs=True
                )
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(self._after).remove)
            self._go_on()
            try:
                yield
            except (ScaletorchError, DistError):
                raise
            except Exception as error:
                if self._inside:  # a layer's own failure
                    raise
                raise InvalidArgumentError(_failed(error)) from error

    def stand_in(self, value: Any) -> Any:
        """Return the output of another stage's module for its argument."""
        return value if self.stand_ins.over else self.stand_ins.of(value)

    def check_output(self, output: Any) -> None:
        """Check the model's output on the last stage.

        Raises:
            InvalidArgumentError: It holds a stand-in.
        """
        if self.stand_ins.hold(output):
            raise InvalidArgumentError(f"{describe_rank()}: the model returns {_BESIDE}")

    def _before(self, name: str) -> Callable[..., None]:
        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            if self._inside > 1:
                return
            self._pause()
            entries = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}
            if not self.entered:  # the hidden states, which `HiddenFlow` compares
                self.entered = True
                entries.pop(main_argument(args, kwargs, self.left), None)
            for argument, value in entries.items():
                if self.stand_ins.hold(value):
                    raise InvalidArgumentError(
                        f"{describe_rank()}: {name} is given, as argument {argument}, {_BESIDE}"
                    )

        return check

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self.left = output
            self.stand_ins.over = module is self._exit
            self._go_on()

    def _go_on(self) -> None:
        if not self._on:
            self.stand_ins.__enter__()  # type: ignore[no-untyped-call]
            self._on = True

    def _pause(self) -> None:
        """Leave code inside a module alone: it may be compiled, and it may communicate."""
        if self._on and _get_current_dispatch_mode() is self.stand_ins:  # and no other on top
            self.stand_ins.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._on = False

    def _end(self) -> None:
        self._go_on()  # a compiled layer that has failed may have left half of it on
        self._pause()


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled code as it is written; the compiler would never again look at what it skips."""
    if "torch._dynamo" not in sys.modules:  # so nothing is compiled, and the import takes seconds
        return ExitStack()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _failed(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return (
        f"{describe_rank()}: the model's forward raised {type(error).__name__} outside its layers: "
        f"{text}\nIf it runs in one process, it uses what this stage does not have: on every stage "
        "but the first, hidden states come in place of input_ids, and on all, modules of other "
        "stages return their first argument. Compute such things inside the layers, or make them "
        "entries of the micro-batch"
    )
