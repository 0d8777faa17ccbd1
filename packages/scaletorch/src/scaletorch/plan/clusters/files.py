"""Clusters as JSON files, and links as `python -m scaletorch.dist.bench --json FILE` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...dist.errors import InvalidArgumentError
from ..reading import json_of, read_as
from .cluster import Cluster, Link
from .devices import device_named

# Calls as the bench names them, and as descriptions do, if these are others.
_CALLS = {"send_recv": "send"}
_DOUBTFUL = 1.0  # constants with a larger relative error are noise


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster, in bytes and seconds."""
    path.write_text(json.dumps(asdict(cluster), indent=1) + "\n")


def read_cluster(path: Path, ranks: int | None = None) -> Cluster:
    """Read a cluster: `{"ranks": 16, "device": "H100-SXM", "links": [{"ranks": 8, ...}, ...]}`.

    Args:
        path: Of a file as `write_cluster` writes it, in bytes and seconds; the device may be a name
            of the table, and a link `{"ranks": 8, "bench": FILE}` for what `scaletorch.dist.bench`
            measured.
        ranks: Of the job; None for all that the file has.

    Raises:
        InvalidArgumentError: No such file, a field that is missing, unknown or of another type, or
            links that do not join all ranks.
    """
    content = json_of(path)
    if isinstance(name := content.get("device"), str):
        content["device"] = asdict(device_named(name))
    if isinstance(links := content.get("links"), list):
        content["links"] = [_measured(each, path.parent) for each in links]
    found: Cluster = read_as(Cluster, content, str(path))
    if ranks is not None and ranks > found.ranks:
        raise InvalidArgumentError(f"{path} has {found.ranks} ranks, and the job {ranks}")
    return found if ranks is None else replace(found, ranks=ranks)


def _measured(link: Any, folder: Path) -> Any:
    """Return a link with what its file of the bench has, if it names one."""
    if not isinstance(link, Mapping) or "bench" not in link:
        return link
    more = {name: own for name, own in link.items() if name != "bench"}
    return asdict(read_bench(folder / str(link["bench"]))) | more


def read_bench(path: Path) -> Link:
    """Read what `python -m scaletorch.dist.bench --json FILE` measured, as the link of its ranks.

    Raises:
        InvalidArgumentError: It is another file, or has neither all_reduce nor send_recv.
    """
    content = json_of(path)
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
