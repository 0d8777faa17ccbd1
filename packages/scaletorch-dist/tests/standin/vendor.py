"""The stand-in under a vendor's names: what the modules in `plugins/` do when they are imported."""

import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as c10d

sys.path.append(str(Path(__file__).parent))


def install(device, backend, before=None, narrow=False):
    """Make the host's memory a device of torch, and gloo a backend for it.

    With `STANDIN_DEFERRED` its calls run on a stream: see `stream.h`.

    `before(store, rank, size)` is called before a group is made. A `narrow` backend moves float64
    as float32.
    """
    import build

    from scaletorch.dist.devices import entry_of_backend

    library = build.load_library()
    if "STANDIN_DEFERRED" in os.environ:
        library.defer_calls()
    torch.utils.rename_privateuse1_backend(device)
    torch._register_device_module(device, device_module(device, library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def create(store, rank, size, timeout):
        if before is not None:
            before(store, rank, size)
        inner = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        return library.wrap(inner, backend, list(entry_of_backend(backend).reduces), narrow)

    c10d.Backend.register_backend(backend, create, devices=[device])


def device_module(device, library):
    """What torch expects as `torch.<device>`."""
    module = types.ModuleType(f"torch.{device}")
    module.is_available = lambda: True
    module.is_initialized = lambda: "STANDIN_UNUSED" not in os.environ
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: int(os.environ.get("STANDIN_DEVICES", 4))
    module.get_device_properties = lambda which: types.SimpleNamespace(uuid=f"card-{which}")
    module.current_device = library.current_device
    module.set_device = lambda which: library.set_device(index_of(which))
    module.synchronize = lambda which=None: None
    module.mem_get_info = lambda which=None: (1 << 30, 1 << 30)
    module.memory_allocated = module.memory_reserved = lambda which=None: 0
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda which=None: torch.get_rng_state()
    module.set_rng_state = lambda state, which=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def index_of(which):
    """The index of a device however it is written."""
    if isinstance(which, int):
        return which
    return torch.device(which).index or 0
