"""The form of each part of a module, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping

Recipe = Mapping[str, str]  # part -> form

# The first form of each part is the usual one.
FORMS: Mapping[str, str] = {
    "embed": "table scaled factored one_hot types normed by_frequency max_norm",
    "positions": "none table given slice sinusoid rotary rotary_inside",
    "layers": "list sequential dict",
    "norm": "rms layer hand group none",
    "residual": "pre post parallel scaled sandwich none",
    "inside": "none conv gru shift mean count ids cumsum",
    "calls": "call forward own_call hook late_hook checkpoint reentrant",
    "heads": "length attribute both config shape",
    "count": "4 8 ungrouped8",
    "qkv": "separate packed by_head thirds kv_packed",
    "kv": "all half one",
    "bias": "no yes",
    "head_norm": "none rms layer hand shared l2 whole bare",
    "temperature": "none scalar per_head root",
    "gate": "none features per_head",
    "attend": "sdpa by_hand mask alibi alibi_buffer sinks relative talking full",
    "across": "none mean softmax group",
    "mlp": "gated plain fused glu pairs scaled gained beta normed softmax l2 roll topk cumsum "
    "maxout rms functional functional_down standardised none",
    "shared": "none head layers mlp norm weight qk looped twice",
    "frozen": "none embed layer norms head biases",
    "between": "none gain skips unet dense weighted mean cumsum conv gru rows",
    "behind": "none scale bias cap norm",
    "head": "plain bias deep functional cosine",
    "output": "logits object dataclass",
    "loss": "tokens smoothing z_loss by_hand sequences penalty reads rolled pairs",
    "plan": "right no_head head_column no_embed q_row k_whole up_row down_column no_down "
    "fused_column no_divide norms_whole norms_replicate o_split gate_whole",
}
USUAL: Recipe = {part: forms.split()[0] for part, forms in FORMS.items()}
_RARE = {"plan": 0.15, "loss": 0.25, "shared": 0.25, "frozen": 0.2}


def draw(seed: int) -> Recipe:
    """Return a recipe in which some parts differ from the usual form; their share varies."""
    source = random.Random(f"module {seed}")
    odd = source.choice((0.08, 0.2, 0.4))
    recipe = {
        part: source.choice(forms.split()[1:])
        if source.random() < _RARE.get(part, odd)
        else USUAL[part]
        for part, forms in FORMS.items()
    }
    return fitting(recipe)


def fitting(recipe: Recipe) -> Recipe:
    """Return a recipe without incompatible forms."""
    found = {**USUAL, **recipe}
    if found["temperature"] == "per_head" or found["attend"] in ("alibi_buffer", "sinks"):
        found["heads"] = "length"  # a plan has one style for each module
    if found["mlp"] == "none" and found["shared"] == "mlp":
        found["shared"] = "none"
    if found["shared"] == "head" or found["head"] == "functional":
        found["embed"] = "scaled" if found["embed"] == "factored" else found["embed"]
        found["head"] = "functional" if found["head"] == "functional" else "plain"
    if found["head"] == "functional" and found["shared"] == "head":
        found["shared"] = "none"
    if found["shared"] == "qk" and (found["qkv"] != "separate" or found["kv"] != "all"):
        found["shared"] = "none"
    if found["head"] == "functional" and found["frozen"] == "head":
        found["frozen"] = "none"
    return found


def odd(recipe: Recipe) -> Recipe:
    """Return the parts that differ from the usual form."""
    return {part: form for part, form in recipe.items() if form != USUAL[part]}


def shown(recipe: Recipe) -> str:
    """Return a recipe as words that `parsed` reads."""
    return " ".join(f"{part}={form}" for part, form in odd(recipe).items()) or "usual"


def parsed(words: list[str]) -> Recipe:
    """Return the recipe of words such as "mlp=topk"."""
    given = dict(word.split("=", 1) for word in words if word != "usual")
    for part, form in given.items():
        if form not in FORMS.get(part, "").split():
            raise ValueError(f"{part}={form}: {part} is one of {FORMS.get(part, '; '.join(FORMS))}")
    return fitting(given)
