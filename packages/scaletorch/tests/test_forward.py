"""What becomes of a module's forward, as docs/decisions/forward.md tells it."""

from types import MethodType

from torch import nn
from training import llama

from scaletorch.compose import parallelize
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear


def forwards(tp_size):
    """Return for each module of a layer its class and what of a forward the instance has."""
    manager = setup_process_group_manager(tp_size=tp_size, dp_size=2 // tp_size)
    model = parallelize(llama(), manager, recompute=True, rehearse=False)
    destroy_process_group_manager()
    layer = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    found = {}
    for name in ("", "mlp", "mlp.up_proj"):
        module = layer.get_submodule(name)
        own = vars(module).get("forward")
        plain = isinstance(own, MethodType) and own.__func__.__qualname__
        kinds = [kind.__name__ for kind in type(module).__mro__]
        found[name] = type(own).__name__, plain, kinds[: kinds.index("Module")]
    return found


def test_a_sharded_layer_is_read_from_outside_in():
    for found in run_ranks(forwards, 2, 2):
        kind, _, kinds = found["mlp.up_proj"]
        assert (kind, kinds[0]) == ("method", ColumnParallelLinear.__name__)
        kind, _, kinds = found["mlp"]
        assert kind == "method"
        assert "Region" in kinds[0]
        assert "Region" in kinds
        kind, name, _ = found[""]
        assert kind == "method"
        assert name.startswith("_around")


def test_a_plain_linear_layer_has_the_forward_of_its_class():
    for found in run_ranks(forwards, 2, 1):
        kind, _, kinds = found["mlp.up_proj"]
        assert (kind, kinds) == ("NoneType", ["Linear"])
