"""Descriptions of tiny models, from `explain` and `volumes`: exact, but for what experts send."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.context_parallel import volumes
from scaletorch.parallel.tensor_parallel import explain
from scaletorch.plan import Affine, Behaviour, Block, Cut, Description, Parameter, Sent

from .drawing import Case

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
COMPARED = 128  # bytes of what ranks compare before each attention
WAYS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
PLACES = ("first", "layer", "last")


def model_of(case: Case) -> Llama:
    """Return the plain model, where the caller wants it."""
    if case.family == "mixture":
        return Mixture(MixtureConfig(**SIZES, num_layers=case.layers))
    return Llama(LlamaConfig(**SIZES, num_layers=case.layers, tie_embeddings=case.tied))


def described(case: Case) -> Description:
    """Describe what a case trains, for its cut."""
    with torch.device("meta"):
        model = model_of(case)
    cut = case.layout.cut
    blocks = [Block("embed_tokens", 0, "first")]
    blocks += [Block(f"layers.{at}", 1, "layer") for at in range(case.layers)]
    blocks.append(Block("norm+lm_head", 2, "last"))
    kinds = tuple(_behaviour(case, model, cut, kind) for kind in range(3))
    tied = (("0.embed_tokens.weight", "2.lm_head.weight"),) if case.tied else ()
    return Description(case.family, case.length, case.dtype, tuple(blocks), {cut: kinds}, tied=tied)


def _inside(name: str, kind: int) -> str | None:
    """Return a parameter's name inside a block of a kind; only the first layer is looked at."""
    if kind == 1:
        return name.removeprefix("layers.0.") if name.startswith("layers.0.") else None
    wanted = "embed_tokens" if kind == 0 else "(norm|lm_head)"
    return name if re.match(rf"{wanted}\b", name) else None


def _behaviour(case: Case, model: Llama, cut: Cut, kind: int) -> Behaviour:
    item = getattr(torch, case.dtype).itemsize
    shapes = explain(model, cut.tp, sequence_parallel=cut.sequence_parallel)
    parameters = []
    for each in shapes.parameters:
        name = _inside(each.name, kind)
        if name is not None:
            whole = torch.Size(each.shape).numel()
            local = tuple(torch.Size(shape).numel() for shape in each.local_shapes)
            expert = ".experts." in name
            if expert and cut.ep > 1:
                local = (whole // cut.ep,) * cut.ep
            parameters.append(Parameter(name, whole, item, local, expert))
    tokens = _tokens(case)
    hidden = Affine(0, tokens * SIZES["hidden_size"] * item // (cut.tp if cut.sequence_parallel else 1))
    sent = tuple(_sent(case, model, cut, kind, item))
    return Behaviour(tuple(parameters), sent=sent, handed=hidden)


def _tokens(case: Case) -> int:
    return case.length // case.layout.cut.cp


def _sent(case: Case, model: Llama, cut: Cut, kind: int, item: int) -> Iterator[Sent]:
    explained = explain(model, cut.tp, sequence_parallel=cut.sequence_parallel)
    for each in explained.communications:
        if _inside(f"{each.module}." , kind) is None:
            continue
        factor = WAYS[each.operation] * item * (cut.tp - 1) / cut.tp
        size = Affine(each.fixed * factor, each.per_token * _tokens(case) * factor)
        again = not (each.module.endswith("down_proj") and each.phase == "forward")
        yield Sent("tp", each.operation, each.phase, 1, size, again=again)
    if kind == 1 and cut.cp > 1:
        yield from _attention(case, model, cut)


def _attention(case: Case, model: Llama, cut: Cut) -> Iterator[Sent]:
    config, hops = model.config, cut.cp - 1
    head = config.hidden_size // config.num_heads
    heads = -(-config.num_heads // cut.tp), max(1, config.num_kv_heads // cut.tp)
    volume = volumes(
        *heads, _tokens(case), head, ranks=cut.cp, dtype=getattr(torch, case.dtype)
    )["ring"]
    yield Sent("cp", "all_gather", "forward", 1, Affine(COMPARED * hops))
    yield Sent("cp", "send", "forward", 2 * hops, Affine(0, volume.forward))
    yield Sent("cp", "send", "backward", 3 * hops, Affine(0, volume.backward))
