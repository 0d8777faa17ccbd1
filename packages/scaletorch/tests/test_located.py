"""Where faults are born is said of each, and a report of another place is not taken for it."""

from fnmatch import fnmatchcase

import pytest
from mutants import MUTANTS, matches
from mutants.hunt import MODELS
from mutants.located import DIRECTIONS

WORDS = {"model", "loss", "gradients", "norm", "clip", "weights", "labels"}
NORMS = "backward: *.q_norm | *.k_norm ; synchronisation: *_norm.weight"


@pytest.mark.parametrize(
    ("born", "direction", "modules", "parameters", "led"),
    [
        (NORMS, "backward", ["layers.0.self_attn.q_norm"], [], True),
        (NORMS, "backward", [], ["layers.0.self_attn.q_norm.weight"], True),
        (NORMS, "synchronisation", [], ["layers.0.self_attn.q_norm.weight"], True),
        (NORMS, "forward", ["layers.0.self_attn.q_norm"], [], False),
        (NORMS, "backward", ["layers.0.self_attn.q_norm", "layers.0.mlp"], [], False),
        (NORMS, "synchronisation", [], ["layers.0.self_attn.q_norm.weight", "spare.bias"], False),
        (NORMS, "backward", [], [], False),
        ("backward: layers.?", "backward", ["layers.3"], [], True),
        ("backward: layers.?", "backward", ["layers.3.mlp"], [], False),
        ("backward: layers.?", "backward", ["layers.12"], [], False),
        ("synchronisation: gradients", "synchronisation", [], ["embed_tokens.weight"], True),
        ("synchronisation: gradients", "backward", [], ["embed_tokens.weight"], False),
        ("update: norm", "update", ["norm"], [], True),
        ("update: norm", "update", ["weights"], [], False),
        ("forward: model", "forward", [""], [], True),
        ("data: labels", "data", ["labels"], [], True),
    ],
)
def test_a_report_leads_there_or_not(born, direction, modules, parameters, led):
    assert matches(born, direction, modules, parameters) is led


def test_every_fault_is_born_where_its_model_has_something():
    names = {}
    for kind, (model_fn, _, _) in MODELS.items():
        model = model_fn()
        own = {name for name, _ in model.named_modules()}
        own.update(name for name, _ in model.named_parameters(remove_duplicate=False))
        names[kind] = own | WORDS | {"position_ids"}
    nowhere = []
    for mutant in MUTANTS.values():
        for place in mutant.born.split(" ; "):
            direction, patterns = place.split(": ")
            assert direction in DIRECTIONS, mutant.name
            nowhere += [
                (mutant.name, pattern)
                for pattern in patterns.split(" | ")
                if not any(fnmatchcase(name, pattern) for name in names[mutant.model])
            ]
    assert not nowhere
