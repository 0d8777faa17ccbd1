"""Hollow tensors: of any size and never filled, so that code runs on them and computes nothing.

A hollow tensor is a plain CPU tensor whose memory is never touched, so the system never commits it.
Kernels are chosen, storages shared and messages sent as for any other tensor, and a model with a
trillion parameters fits on a laptop. Small data from which indices are computed (ids, positions,
token counts) stays real. Kernels that keep more on the CPU can run as on GPUs (`OfCuda`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .meter import Meter

aten = torch.ops.aten
_SMALL = 2**20  # largest tensor in bytes that is filled for real


class Hollow(TorchDispatchMode):
    """Run code on hollow tensors; a selection of the best scores takes all experts in turn."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self._sizes: dict[int, int] = {}
        self._hollow: set[int] = set()

    def make(self, like: Tensor) -> Tensor:
        """Return a hollow tensor with the same shape, strides and dtype."""
        with _disable_current_modes():
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        self._note(tensor, hollow=True)
        return tensor

    def _is_hollow(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._hollow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation if no input is hollow; otherwise compute only its output shapes."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        hollow = [tensor for tensor in inputs if self._is_hollow(tensor)]
        if func.namespace == "c10d":
            return self._send(func, args, kwargs, inputs, sends=not hollow)
        if func in _VALUES:
            return _VALUES[func](func, args, kwargs) if hollow else func(*args, **kwargs)
        if func in _CHOICES and self._is_hollow(args[0]):
            result = self._choose(func, args, kwargs)
        elif not hollow:
            result = self._really(func, args, kwargs, inputs)
        elif _is_view(func):
            return func(*args, **kwargs)
        else:
            result = self._shapes(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not _is_view(func):
            for output in outputs:
                self._note(output, hollow=False)
            self._meter.operation(func, args, inputs, outputs)
        return result

    def _really(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        device = kwargs.get("device")
        if inputs or (device is not None and torch.device(device).type != "cpu"):
            return func(*args, **kwargs)
        with _disable_current_modes():
            form = func(*args, **{**kwargs, "device": "meta"}) if "device" in kwargs else None
        if not isinstance(form, Tensor) or form.nbytes <= _SMALL:
            return func(*args, **kwargs)
        return self.make(form)

    def _shapes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        written = [
            value for value, known in zip(args, func._schema.arguments, strict=False)
            if known.alias_info is not None and known.alias_info.is_write
        ]  # fmt: skip
        written += [kwargs[name] for name in ("out", "grad_input") if name in kwargs]
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor):
                self._note(tensor, hollow=True)
        returns = func._schema.returns
        if returns and all(each.alias_info is not None for each in returns):
            return written[0] if len(returns) == 1 else tuple(written)
        # A selection by a hollow mask takes everything.
        chosen = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with _disable_current_modes(), chosen:
            run = _grouped if func is aten._grouped_mm.default else func
            forms = run(*tree_map(_form, tuple(args)), **tree_map(_form, dict(kwargs)))
        return tree_map(lambda form: self.make(form) if isinstance(form, Tensor) else form, forms)

    def _choose(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a selection that takes all items equally often; `topk` has real, equal scores."""
        if func is aten.gather.default:
            with _disable_current_modes():
                return torch.full(args[2].shape, 1 / args[0].shape[args[1]], dtype=args[0].dtype)
        result = self._shapes(func, args, kwargs)
        scores, index = args[0], result[1] if isinstance(result, tuple) else result
        names = [argument.name for argument in func._schema.arguments]
        given = (dict(zip(names, args, strict=False)) | dict(kwargs)).get("dim")
        dim = -1 if given is None else int(given)
        size = max(scores.shape[dim], 1) if scores.ndim else 1
        count, top = index.numel(), func is aten.topk.default
        with _disable_current_modes():
            if top:  # in random order
                seeded = torch.Generator().manual_seed(0)
                blocks = torch.rand(-(-count // size), size, generator=seeded)
                turn = blocks.argsort(-1).flatten()[:count]
            else:
                turn = torch.arange(count) % size
            last = index.movedim(dim, -1) if index.ndim else index
            chosen = turn.view(last.shape)
            chosen = (chosen.movedim(-1, dim) if index.ndim else chosen).contiguous()
            if top:
                return torch.full_like(result[0], 1 / size), chosen
        return (result[0], chosen) if isinstance(result, tuple) else chosen

    def _send(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor], *, sends: bool,
    ) -> Any:  # fmt: skip
        objects = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.ScriptObject))
        group = next(each for each in objects if "ProcessGroup" in str(each._type()))
        members = torch.distributed.ProcessGroup.unbox(group)
        self._meter.collective(func, members, tensors)
        if sends:
            return func(*args, **kwargs)
        with _disable_current_modes():
            work = torch.ops.c10d.barrier(torch.zeros(1), group, [], False, -1)
        for tensor in tensors:  # results of hollow tensors are hollow
            self._note(tensor, hollow=True)
        given = [arg for arg in args if isinstance(arg, Tensor | list)]
        returned = [
            work if "Work" in str(each.type) else given[place]
            for place, each in enumerate(func._schema.returns)
        ]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _note(self, tensor: Tensor, *, hollow: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if hollow:
            self._hollow.add(key)
        if key not in self._sizes:
            self._sizes[key] = size
            self._meter.memory(key, size)
            weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self._hollow.discard(key)
        if size := self._sizes.pop(key, 0):
            self._meter.memory(key, -size)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _grouped(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return the shape of a grouped matmul; torch's own shape formula takes only bfloat16."""
    form = aten._grouped_mm.default(a.bfloat16(), b.bfloat16(), *rest, **options)
    return cast(Tensor, form).to(a.dtype)


def _number(_: Any, args: Sequence[Any], __: Any) -> Any:
    """Return the value read from a hollow scalar: True, 1.0 or 0."""
    return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 0


_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _number,
    aten.equal.default: lambda *_: True,
}
_CHOICES = frozenset((
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default,
    aten.argmax.default, aten.gather.default,
))  # fmt: skip


class OfCuda(TorchFunctionMode):
    """Run hollow tensors, which are on the CPU, by CUDA's kernels: fused operators in one call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the fused replacement of a torch function, if there is one."""
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attend by flash attention (cuDNN keeps the same), or by cuDNN (masks that are not learned).

    float32 goes to the memory-efficient operator, the rest to plain matmuls.
    """
    half = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] == value.shape[-1]
    learned = attn_mask is not None and attn_mask.requires_grad
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    mask = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # it is added to the scores
        mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    options: dict[str, Any] = {"scale": scale}
    call: Any = aten._scaled_dot_product_efficient_attention
    more: tuple[Any, ...] = (mask, True, dropout_p, is_causal)
    if half and mask is None and query.ndim == 4:
        call, more = aten._scaled_dot_product_flash_attention, (dropout_p, is_causal, False)
    elif half and not learned and query.ndim == 4:
        call, more = aten._scaled_dot_product_cudnn_attention, (*more, False)
    elif grouped or query.ndim != 4 or query.dtype == torch.float64:
        call, more = aten._scaled_dot_product_attention_math, (mask, dropout_p, is_causal)
        options["enable_gqa"] = grouped
    out: Tensor = call(query, key, value, *more, **options)[0]
    return out


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalize by layer norm, as one kernel; torch decomposes its own before a mode sees it."""
    if weight is not None and weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)  # CUDA runs several kernels as well
    return F.layer_norm(input, normalized_shape, weight, None, 1e-6 if eps is None else eps)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop in one kernel that keeps a mask of bytes."""
    if not training or p == 0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


_FUSED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
}
