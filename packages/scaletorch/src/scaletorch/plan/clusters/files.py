"""Clusters as JSON files, and links as `python -m scaletorch.dist.bench --json FILE` measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast, get_args

from ...dist.errors import InvalidArgumentError
from ..description import Kernels
from .cluster import Cluster, Device, Link, Shares
from .devices import device_named
from .units import BYTES, BYTES_A_SECOND, FLOPS, SECONDS, quantity

# Calls as the bench names them, and as descriptions do, if these are others.
_CALLS = {"send_recv": "send"}
_DEVICE = {field.name for field in fields(Device)}
_UNITS = {"overhead": SECONDS, "updating": BYTES_A_SECOND, "group_memory": BYTES}
_DOUBTFUL = 1.0  # constants with a larger relative error are noise


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster, in bytes and seconds."""
    path.write_text(json.dumps(asdict(cluster), indent=1) + "\n")


def read_cluster(path: Path, ranks: int | None = None) -> Cluster:
    """Read a cluster: `{"ranks": 16, "device": "H100-SXM", "links": [{"ranks": 8, ...}, ...]}`.

    Args:
        path: Of a file as `write_cluster` writes it; numbers may have units, such as "80GiB", the
            device may be a name of the table, and a link `{"ranks": 8, "bench": FILE}` for what
            `scaletorch.dist.bench` measured.
        ranks: Of the job; None for all that the file has.

    Raises:
        InvalidArgumentError: No such file, a field that is missing or unknown, a unit that is, or
            links that do not join all ranks.
    """
    content = _json(path)
    _fields(content, {"ranks", "device", "links"}, set(), str(path))
    given = content["device"]
    device = device_named(given) if isinstance(given, str) else device_of(given, f"{path}: device")
    if not isinstance(content["links"], list):
        raise InvalidArgumentError(f"{path}: links must be a list, by level")
    links = tuple(
        _link(each, f"{path}: link {at}", path.parent) for at, each in enumerate(content["links"])
    )
    number = _whole(content["ranks"], f"{path}: ranks")
    if ranks is not None and ranks > number:
        raise InvalidArgumentError(f"{path} has {number} ranks, and the job {ranks}")
    return Cluster(number if ranks is None else ranks, device, links)


def read_bench(path: Path) -> Link:
    """Read what `python -m scaletorch.dist.bench --json FILE` measured, as the link of its ranks.

    Raises:
        InvalidArgumentError: It is another file, or has neither all_reduce nor send_recv.
    """
    content = _json(path)
    try:
        ranks = int(content["conditions"]["ranks"])
        calls = {
            _CALLS.get(name, name): (each["alpha_step"], 1 / max(each["beta_bus"], 1e-15))
            for name, each in content["constants"].items()
            if each["error"] <= _DOUBTFUL
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidArgumentError(
            f"{path} is none of `python -m scaletorch.dist.bench --json FILE`: it has no "
            "conditions and constants"
        ) from None
    plain = calls.get("send") or calls.get("all_reduce")
    if plain is None:
        raise InvalidArgumentError(f"{path} measured neither all_reduce nor send_recv")
    return Link(ranks, *plain, calls=calls)


def device_of(given: Any, where: str) -> Device:
    """Read a device.

    Raises:
        InvalidArgumentError: A field is missing or unknown, or has no such value.
    """
    _fields(given, {"name", "memory", "flops", "moving"}, _DEVICE, where)
    if not isinstance(given["flops"], Mapping):
        raise InvalidArgumentError(f'{where}: flops go by dtype, such as {{"bfloat16": "312e12"}}')
    if not isinstance(given.get("efficiency", {}), Mapping):
        raise InvalidArgumentError(f"{where}: efficiency goes by sort of operation")
    more = {
        name: quantity(given[name], units, f"{where}: {name}")
        for name, units in _UNITS.items() if given.get(name)
    }  # fmt: skip
    return Device(
        str(given["name"]),
        int(quantity(given["memory"], BYTES, f"{where}: memory")),
        {
            dtype: quantity(each, FLOPS, f"{where}: flops of {dtype}")
            for dtype, each in given["flops"].items()
        },
        quantity(given["moving"], BYTES_A_SECOND, f"{where}: moving"),
        more.get("overhead", 0.0),
        {
            name: _shares(pairs, f"{where}: efficiency of {name}")
            for name, pairs in given.get("efficiency", {}).items()
        },
        more.get("updating", 0.0),
        _share(given.get("hides", 1.0), f"{where}: hides"),
        _share(given.get("spread", 0.1), f"{where}: spread"),
        str(given.get("source", "")),
        int(more.get("group_memory", 0)),
        _kernels(given.get("kernels", "cuda"), f"{where}: kernels"),
    )


def _kernels(given: object, where: str) -> Kernels:
    if given in get_args(Kernels):
        return cast(Kernels, given)
    raise InvalidArgumentError(f"{where} must be one of {', '.join(get_args(Kernels))}: {given!r}")


def _link(given: Any, where: str, folder: Path) -> Link:
    if isinstance(given, Mapping) and "bench" in given:
        _fields(given, {"bench"}, {"ranks"}, where)
        found = read_bench(folder / str(given["bench"]))
        ranks = _whole(given.get("ranks", found.ranks), f"{where}: ranks")
        return Link(ranks, found.latency, found.bandwidth, found.calls)
    _fields(given, {"ranks", "latency", "bandwidth"}, {"calls"}, where)
    calls = given.get("calls", {})
    pairs = calls.values() if isinstance(calls, Mapping) else [None]
    if not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise InvalidArgumentError(f"{where}: calls have a latency and a bandwidth each")
    return Link(
        _whole(given["ranks"], f"{where}: ranks"),
        *_pair(given["latency"], given["bandwidth"], where),
        {name: _pair(each[0], each[1], f"{where}: {name}") for name, each in calls.items()},
    )


def _pair(latency: object, bandwidth: object, where: str) -> tuple[float, float]:
    return (
        quantity(latency, SECONDS, f"{where}: latency"),
        quantity(bandwidth, BYTES_A_SECOND, f"{where}: bandwidth"),
    )


def _share(given: object, where: str) -> float:
    if isinstance(given, int | float) and 0 <= given < math.inf:
        return float(given)
    raise InvalidArgumentError(f"{where} must be a number from 0, got {given!r}")


def _shares(given: Any, where: str) -> Shares:
    try:
        pairs = tuple((float(size), float(share)) for size, share in given)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{where} must be pairs of size and share") from None
    sizes = [size for size, _ in pairs]
    if sizes != sorted(set(sizes)) or any(share <= 0 for _, share in pairs):
        raise InvalidArgumentError(f"{where} must have ascending sizes and shares above 0")
    return pairs


def _whole(given: object, where: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InvalidArgumentError(f"{where} must be a whole number from 1, got {given!r}")
    return given


def _fields(given: Any, needed: set[str], more: set[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} must have the fields {', '.join(sorted(needed))}")
    if missing := sorted(needed - given.keys()):
        raise InvalidArgumentError(f"{where} misses {', '.join(missing)}")
    if unknown := sorted(given.keys() - needed - more):
        known = ", ".join(sorted(needed | more))
        raise InvalidArgumentError(f"{where} has unknown {', '.join(unknown)}; known are {known}")


def _json(path: Path) -> Any:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} must be a JSON object")
    return content
