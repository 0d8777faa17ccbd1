"""Known model families as data: names of modules, and the plan for models that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import matching
from ..cuts.fused import Fused
from ..cuts.per_head import PerHead
from ..cuts.stacked import Slices, Stacked
from .attention import state_layers
from .dense_families import DENSE
from .family import Family
from .partial_families import PARTIAL
from .plan import Divide, Match, match_plan


class Recognised(NamedTuple):
    """What is known of a model for which no plan was given.

    Attributes:
        name: What messages call that knowledge.
        matches: What is sharded.
        complete: Names of modules in which every parameter must be among the matches.
        heads: Name of an attention module -> its projections, cut at head borders. What sums
            gradients in it must be of the size of one head.
    """

    name: str
    matches: list[Match]
    complete: tuple[str, ...]
    heads: Mapping[str, tuple[str, ...]]


LLAMA = Family(
    name="Llama",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.self_attn": Divide(
            "num_heads", "num_kv_heads", "num_key_value_heads", optional=True
        ),
        "**.layers.*.self_attn.q_proj": "column",
        "**.layers.*.self_attn.k_proj": "column",
        "**.layers.*.self_attn.v_proj": "column",
        "**.layers.*.self_attn.o_proj": "row",
        "**.layers.*.mlp.gate_proj": "column",
        "**.layers.*.mlp.up_proj": "column",
        "**.layers.*.mlp.down_proj": "row",
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset(
        {
            "**.embed_tokens",
            "**.lm_head",
        }
    ),
    complete=("**.layers.*.self_attn", "**.layers.*.mlp"),
    # DiffLlama weighs heads against others; BitNet norms the features of all heads.
    foreign=frozenset({"lambda_init", "attn_sub_norm"}),
    heads={"**.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
)

# Patches are shared out; bytes, in the layers around theirs, stay whole.
BLT = replace(
    LLAMA, name="BLT", plan={**LLAMA.plan, "**.global_transformer.layers.*": "sequence_layer"}
)

GPT2 = Family(
    name="GPT-2",
    plan={
        "**.wte": "vocab",
        "**.h.*.attn": Divide(
            "num_heads", "n_head", "split_size", "embed_dim", "n_embd", optional=True
        ),
        "**.h.*.attn.c_attn": Fused("column", 3),
        "**.h.*.attn.c_proj": "row",
        "**.h.*.mlp.c_fc": "column",
        "**.h.*.mlp.c_proj": "row",
        "**.ln_f": "sequence_join",  # what follows reshapes by the whole length
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset({"**.wte", "**.ln_f", "**.lm_head"}),
    complete=("**.h.*.attn", "**.h.*.mlp"),
    foreign=frozenset({"kv_dim"}),  # GPT-BigCode: one key and value head, or head by head
    heads={"**.h.*.attn": ("c_attn",)},
)

# The first GPT, which has no norm behind its layers.
OPENAI_GPT = replace(
    GPT2,
    name="GPT",
    plan={
        **{name: style for name, style in GPT2.plan.items() if name not in ("**.wte", "**.ln_f")},
        "**.tokens_embed": "vocab",
        "**.h.*": "sequence_layer",
    },
)

GPT_NEOX = Family(
    name="GPT-NeoX",
    plan={
        "**.embed_in": "vocab",
        "**.layers.*.attention": Divide(
            "num_attention_heads", "num_heads", "hidden_size", optional=True
        ),
        # Query, key and value of one head follow one another: the weight is cut between heads.
        "**.layers.*.attention.query_key_value": "column",
        "**.layers.*.attention.dense": "row",
        "**.layers.*.mlp.dense_h_to_4h": "column",
        "**.layers.*.mlp.dense_4h_to_h": "row",
        "**.embed_out": "column_gather",
        "**.lm_head": "column_gather",  # what newer models call it
    },
    may_lack=frozenset({"**.embed_in", "**.embed_out", "**.lm_head"}),
    complete=("**.layers.*.attention", "**.layers.*.mlp"),
    heads={"**.layers.*.attention": ("query_key_value",)},
)

# Its last layer adds a bias that the attention has and does not use, to hidden states.
GPT_NEOX_JAPANESE = replace(
    GPT_NEOX,
    name="GPT-NeoX Japanese",
    plan={**GPT_NEOX.plan, "**.gpt_neox_japanese": "sequence", "**.layers.*": "sequence_layer"},
    complete=("**.layers.*.mlp",),
)

GPT_OSS = Family(
    name="gpt-oss",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.self_attn": PerHead("sinks"),
        "**.layers.*.self_attn.q_proj": "column",
        "**.layers.*.self_attn.k_proj": "column",
        "**.layers.*.self_attn.v_proj": "column",
        "**.layers.*.self_attn.o_proj": "row",
        "**.layers.*.mlp.experts": Stacked(
            {
                "gate_up_proj": Slices(2, unit=2),  # [experts, in, gate and up by turns]
                "gate_up_proj_bias": Slices(1, unit=2),
                "down_proj": 1,
            },
            added=("down_proj_bias",),
        ),
        "**.layers.*.mlp.router": "sequence",
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.self_attn",),
    heads={"**.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
)

FAMILIES: tuple[Family, ...] = (
    *(BLT, LLAMA, OPENAI_GPT, GPT2, GPT_NEOX_JAPANESE, GPT_NEOX, GPT_OSS),
    *DENSE,
    *PARTIAL,
)


def _foreign(model: nn.Module, family: Family, names: Sequence[str]) -> str | None:
    """Return which module of the family's names has other parts or parameters, or None."""
    patterns = {**dict.fromkeys(family.heads), **dict.fromkeys(family.complete)}
    for name in (n for pattern in patterns for n in matching(pattern, names)):
        module = model.get_submodule(name)
        own = {**vars(module), **module._modules}
        found = [each for each in sorted(family.foreign) if own.get(each, False) is not False]
        if found:
            return f"'{name}' has {', '.join(found)}: it computes otherwise"
    for pattern, style in family.plan.items():
        needed = {*getattr(style, "names", ()), *getattr(style, "sharded", ())}
        for name in matching(pattern, names) if needed else ():
            lacking = sorted(needed - {*model.get_submodule(name)._parameters})
            if lacking:
                return f"'{name}' has no parameter {', '.join(lacking)}"
    return None


class UnplannedError(InvalidArgumentError):
    """A model for which no plan was given has none of its own, and is of no known family."""


def find_family(model: nn.Module) -> Recognised | None:
    """Find the known family whose names the model has, and match its plan, if there is one."""
    names = _names(model)
    for family in FAMILIES:
        if not _absent(family, names) and _foreign(model, family, names) is None:
            matches = match_plan(model, family.plan, family.may_lack)
            complete = tuple(n for pattern in family.complete for n in matching(pattern, names))
            heads = {n: own for p, own in family.heads.items() for n in matching(p, names)}
            return Recognised(f"the {family.name} family", matches, complete, heads)
    return None


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules(remove_duplicate=False)]


def _absent(family: Family, names: Sequence[str]) -> bool:
    needed = (pattern for pattern in family.plan if pattern not in family.may_lack)
    return any(not matching(pattern, names) for pattern in needed)


def unplanned(model: nn.Module, tp_size: int) -> InvalidArgumentError:
    """Return the error of a model that has no plan, which says how to get one."""
    name, states, names = type(model).__name__, state_layers(model), _names(model)
    if states:
        return InvalidArgumentError(
            f"{name} has nothing that tensor parallelism divides, no attention and no MLP: its "
            f"layers ({', '.join(states)}) keep a state, which every rank would need whole; leave "
            "tp_size at 1 and use the other axes, or pass a plan of your own"
        )
    alike = next((family for family in FAMILIES if not _absent(family, names)), None)
    other = "" if alike is None else f": {alike.name} has such names, but "
    other += "" if alike is None else str(_foreign(model, alike, names))
    return UnplannedError(
        f"{name} has no plan of its own for its layers (_tp_plan of transformers), and is of no "
        f"known model family{other}; print(explain(model, {tp_size})) of "
        "scaletorch.parallel.tensor_parallel writes a plan of its layers: complete it, and pass it "
        "as plan="
    )


def check_complete(modules: Mapping[str, nn.Module], known: Recognised) -> None:
    """Refuse a model that has parameters where its family has none.

    Raises:
        InvalidArgumentError: It has.
    """
    planned = {m.module for m in known.matches if not isinstance(m.style, Divide)}
    for name in known.complete:
        for inner, module in modules[name].named_modules(prefix=name):
            if module not in planned and module._parameters and not _is_vector(name, inner, module):
                raise InvalidArgumentError(
                    f"the names are those of {known.name}, but '{inner}' has "
                    f"parameters {sorted(module._parameters)} that its plan does not know; "
                    "pass a plan of your own"
                )


def _is_vector(name: str, inner: str, module: nn.Module) -> bool:
    """Return whether what is right inside a module is a norm, or another with vectors alone.

    It works on one head, or on all features: on others its shape would not fit.
    """
    direct = inner.rpartition(".")[0] == name and not module._modules
    return direct and all(parameter.ndim < 2 for parameter in module.parameters())
