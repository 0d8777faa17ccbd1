"""Descriptions of transformers in closed form, after Korthikanti et al. 2022 (arXiv 2205.05198).

No torch: sizes go in; memory, messages and work of a layer come out, term by term as in sections 4
and 5 of the paper. Activations have 2 bytes, dropout masks 1, logits 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from scaletorch.plan.description import Affine, Behaviour, Block, Cut, Description, Parameter

from .messages import sent_by_ends, sent_by_layer
from .operations import Terms, work_of_ends, work_of_layer
from .sizes import HALF, SINGLE, Program, Sizes

SOURCE = "closed forms after Korthikanti et al. 2022, arXiv 2205.05198"
GPT = Program()


def transformer(sizes: Sizes, cuts: Iterable[Cut], program: Program = GPT) -> Description:
    """Describe a transformer without running it.

    Args:
        sizes: Sizes of the model.
        cuts: Cuts to describe in addition to the whole model.
        program: How it is run, and what is counted.

    Example:
        >>> small = Sizes("small", hidden=64, layers=2, heads=4, vocab=256, length=32)
        >>> transformer(small, [Cut(tp=2)]).behaviours(Cut(tp=2))[1].kept
        Affine(fixed=0, per_row=67584.0)
    """
    described: dict[Cut, tuple[Behaviour, ...]] = {}
    refused: dict[Cut, str] = {}
    for cut in (Cut(), *cuts):
        if why := _refusal(sizes, cut):
            refused[cut] = why
        else:
            terms = Terms(sizes, program, cut)
            described[cut] = (_first(terms), _layer(terms), _last(terms))
    first = Block("embedding", 0, "layer" if program.placed else "first")
    layers = (Block(f"layers.{index}", 1, "layer") for index in range(sizes.layers))
    return Description(
        sizes.name, sizes.length, "bfloat16",
        (first, *layers, Block("norm+head+loss", 2, "last")),
        described, refused, (("0.words", "2.words"),) if sizes.tied and program.ends else (),
        SOURCE, early=False,
    )  # fmt: skip


def _refusal(sizes: Sizes, cut: Cut) -> str:
    if cut.ep > 1:
        return f"{sizes.name} has no experts to share out over ep {cut.ep}"
    for what, size in (
        ("heads", sizes.heads),
        ("heads of keys", sizes.kv_heads or sizes.heads),
        ("vocabulary", sizes.vocab),
    ):
        if size % cut.tp:
            return f"{what} of {sizes.name}, {size}, cannot be shared out over tp {cut.tp}"
    if sizes.length % (2 * cut.cp if cut.cp > 1 else 1):
        return f"{sizes.length} tokens cannot be shared out over cp {cut.cp} in two pieces each"
    return ""


def _layer(terms: Terms) -> Behaviour:
    of, program = terms.sizes, terms.program
    whole, shared = terms.whole, terms.shared
    norms = 2 * HALF * of.hidden * whole
    entering = 2 * HALF * of.hidden * whole  # attention and MLP
    masks = 2 * of.hidden * whole if program.dropout else 0
    projected = HALF * (of.hidden + 2 * of.keys + of.hidden) * shared
    statistics = SINGLE * of.heads * shared if program.attention == "fused" else 0
    inside = HALF * of.inner * (3 if of.gated else 2) * shared
    core = terms.scores * (2 * HALF + 1 if program.dropout else HALF)
    entered = HALF * of.hidden * whole
    kept = norms + entering + masks + projected + statistics + inside
    kept += core if program.attention == "core" else 0
    again = core if program.attention == "selective" else 0
    # Gradients of the largest inner tensors: probabilities and scores, or the MLP's.
    gradients = max(
        2 * HALF * terms.scores if program.attention != "fused" else 0,
        HALF * of.inner * 2 * shared,
    )
    return Behaviour(
        _layer_parameters(terms),
        kept=Affine(0, kept),
        entered=Affine(0, entered),
        forward_peak=Affine(0, again),
        backward_peak=Affine(0, again + gradients),
        handed=_handed(terms),
        sent=sent_by_layer(terms),
        work=work_of_layer(terms),
    )


def _layer_parameters(terms: Terms) -> tuple[Parameter, ...]:
    of, program = terms.sizes, terms.program
    both = of.hidden + 2 * of.keys
    ups = 2 if of.gated else 1
    parameters = [
        _divided("qkv", of.hidden * both, terms),
        _divided("out", of.hidden * of.hidden, terms),
        _divided("up", ups * of.hidden * of.inner, terms),
        _divided("down", of.inner * of.hidden, terms),
    ]
    if program.small:
        parameters.append(_repeated("norms", (2 if of.plain else 4) * of.hidden))
        if not of.plain:
            parameters += [
                _divided("divided biases", both + of.inner, terms),
                _repeated("whole biases", 2 * of.hidden),
            ]
    return tuple(parameters)


def _first(terms: Terms) -> Behaviour:
    of, program = terms.sizes, terms.program
    if not program.ends:
        return Behaviour((), handed=_handed(terms))
    parameters = [_divided("words", of.vocab * of.hidden, terms)]
    if program.small and not of.plain:
        parameters.append(_repeated("positions", of.length * of.hidden))
    sent, _ = sent_by_ends(terms)
    work, _ = work_of_ends(terms)
    return Behaviour(
        tuple(parameters),
        kept=Affine(0, of.hidden * terms.whole if program.dropout else 0),
        handed=_handed(terms), sent=sent, work=work,
    )  # fmt: skip


def _last(terms: Terms) -> Behaviour:
    of, program = terms.sizes, terms.program
    if not program.ends:
        return Behaviour(())
    parameters = [_divided("words", of.vocab * of.hidden, terms)]
    if program.small:
        parameters.append(_repeated("norm", (1 if of.plain else 2) * of.hidden))
    logits = of.vocab * terms.shared
    _, sent = sent_by_ends(terms)
    _, work = work_of_ends(terms)
    return Behaviour(
        tuple(parameters),
        kept=Affine(0, 2 * HALF * of.hidden * terms.whole + SINGLE * logits),
        forward_peak=Affine(0, HALF * logits),
        backward_peak=Affine(0, (SINGLE + HALF) * logits),
        sent=sent, work=work,
    )  # fmt: skip


def _handed(terms: Terms) -> Affine:
    tokens = terms.shared if terms.program.scattered else terms.whole
    return Affine(0, HALF * terms.sizes.hidden * tokens if terms.program.messages else 0)


def _divided(name: str, elements: int, terms: Terms) -> Parameter:
    return Parameter(name, elements, HALF, -(-elements // terms.cut.tp))


def _repeated(name: str, elements: int) -> Parameter:
    return Parameter(name, elements, HALF, elements)
