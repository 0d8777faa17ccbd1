"""What two ranks must be able to do on every backend: the bodies of tests on gloo, run again."""

import importlib.util
import sys
import time
from pathlib import Path

import torch
import torch.distributed as c10d
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import scaletorch.dist as dist

BODIES = {
    "test_collectives": [
        ("all_dtypes_and_ops", 2),
        ("test_all_reduce_in_place_on_views_scalars_and_empty_tensors",),
        ("test_leaves_that_require_grad_are_changed_and_record_nothing",),
        ("test_every_dtype_and_layout_is_moved_bit_by_bit",),
        ("exchange_flat_parts",),
        ("bad_flat_parts",),
        ("every_async",),
        ("test_an_uneven_all_to_all_is_an_error_on_every_rank_and_harms_nothing",),
        ("test_a_bad_scatter_list_is_an_error_on_every_rank",),
    ],
    "test_p2p": [
        ("test_send_and_recv_of_every_dtype_and_layout",),
        ("test_isend_and_irecv_with_tags",),
        ("test_a_parameter_is_received_into",),
        ("ring", False, 1 << 18),
        ("ring", True, 1 << 18),
        ("test_messages_of_one_pair_arrive_in_order",),
    ],
    "test_objects": [
        ("test_the_specified_examples",),
        ("test_any_text_of_an_error_travels",),
        ("test_lists_of_different_lengths_are_an_error_on_both",),
    ],
    "test_params": [
        ("test_a_dict_is_reduced_in_place_whatever_the_order_of_its_keys",),
        ("test_parameters_of_any_kind_are_reduced_in_place", True, -1),
        ("test_parameters_of_any_kind_are_reduced_in_place", False, -1),
        ("test_empty_lists_views_and_repeated_tensors",),
    ],
    "test_functional": [
        ("test_copy_and_reduce_bound_a_parallel_region",),
        ("check_inputs_unchanged",),
        ("test_dtypes_are_kept",),
        ("test_no_grad_records_nothing",),
    ],
}
FACTORIES = {
    getattr(torch, name)
    for name in ("tensor", "zeros", "ones", "full", "empty", "arange", "rand", "randn", "randint")
}


class OnDevice(TorchFunctionMode):
    """Tensors whose makers name no device are made by the CPU and moved."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in FACTORIES or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs)
        # `to` would lose the strides of what is made to be odd
        return made.to(self.device).requires_grad_(requires_grad)


def load(name):
    """A test file of this folder, as a module."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"every_backend_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_all(device=None):
    """Run everything; returns (name, seconds) of each."""
    done = []
    for file, calls in BODIES.items():
        module = load(file)
        for name, *args in calls:
            fn = getattr(module, name)
            start = time.monotonic()
            try:
                with OnDevice(device or "cpu"):
                    getattr(fn, "__rank_body__", fn)(*args)
            except BaseException as error:
                error.add_note(f"in {file}.{name}{tuple(args)}")
                raise
            done.append((f"{file}.{name}", time.monotonic() - start))
    return done


def train_with_ddp(device):
    """DistributedDataParallel gives the gradient of the mean of the ranks' losses."""
    rank, size = dist.get_dist_info()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    inputs = torch.randn(size, 4)
    expected = torch.autograd.grad(model(inputs).square().sum() / size, list(model.parameters()))
    wrapped = DistributedDataParallel(model.to(device))
    wrapped(inputs[rank : rank + 1].to(device)).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient)
        assert parameter.grad.device == parameter.device
    del wrapped


def use_device_mesh(device):
    """DTensors over meshes of one and two dims, and groups made by their members alone."""
    size = dist.get_world_size()
    whole = torch.arange(8.0 * size).view(size * 2, 4)
    mesh = c10d.init_device_mesh(device, (size,))
    sharded = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 4)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local().cpu(), whole)
    columns = sharded.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor().cpu(), whole)
    assert torch.equal((sharded @ sharded.t()).full_tensor().cpu(), whole @ whole.t())
    square = c10d.init_device_mesh(device, (size // 2, 2), mesh_dim_names=("a", "b"))
    total = torch.ones(3, device=device)
    dist.all_reduce(total, group=square.get_group("b"))
    assert total.tolist() == [2.0] * 3
    rank = dist.get_rank()
    pair = c10d.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    assert dist.all_gather_object(rank, pair) == list(c10d.get_process_group_ranks(pair))


def train_with_dtensors(device):
    """Partial sums become whole and sharded, and an MLP cut by columns, then rows, trains."""
    rank, size = dist.get_dist_info()
    mesh = c10d.init_device_mesh(device, (size,))
    own = torch.arange(2.0 * size, device=device) + rank
    total = torch.arange(2.0 * size) * size + sum(range(size))
    partial = DTensor.from_local(own, mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local().cpu(), total)
    shard = partial.redistribute(mesh, [Shard(0)])
    assert torch.equal(shard.to_local().cpu(), total.view(size, 2)[rank])
    assert torch.equal(shard.redistribute(mesh, [Replicate()]).to_local().cpu(), total)

    torch.manual_seed(0)
    first, last = torch.nn.Linear(4, 4 * size), torch.nn.Linear(4 * size, 2)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    inputs = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(model(inputs).square().sum(), [*model.parameters(), inputs])
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model.to(device), mesh, plan)
    there = inputs.detach().to(device).requires_grad_()
    model(there).square().sum().backward()
    found = [*(parameter.grad.full_tensor() for parameter in model.parameters()), there.grad]
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.cpu(), wanted)
