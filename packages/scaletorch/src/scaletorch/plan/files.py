"""Descriptions and clusters as JSON files; each dataclass field is checked against its type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..dist.errors import InvalidArgumentError
from .clusters import Cluster, Link, device_named
from .description import Description

VERSION = 9  # of the description format
# Calls whose name in the bench differs from that in descriptions.
_CALLS = {"send_recv": "send"}
_DOUBTFUL = 1.0  # constants with a larger relative error are ignored as noise


def write(description: Description, path: Path) -> None:
    """Write a description with one number a line, so that two files can be compared by diff."""
    content = {"version": VERSION, **_plain(description)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Description:
    """Read a description that `write` wrote.

    Raises:
        InvalidArgumentError: The file is not a description, or has another version.
    """
    content = _json_of(path)
    if (version := content.pop("version", "none")) != VERSION:
        raise InvalidArgumentError(
            f"{path} is no description of version {VERSION}, but of {version}: describe the model "
            "again"
        )
    found: Description = _read_as(Description, content, str(path))
    count = 1 + max((block.kind for block in found.blocks), default=0)
    if {count} != {len(kinds) for kinds in found.cuts.values()}:
        raise InvalidArgumentError(f"{path}: its blocks are of other kinds than its cuts")
    return found


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster, in bytes and seconds."""
    path.write_text(json.dumps(_plain(cluster), indent=1) + "\n")


def read_cluster(path: Path, ranks: int | None = None) -> Cluster:
    """Read a cluster: `{"ranks": 16, "device": "H100-SXM", "links": [{"ranks": 8, ...}, ...]}`.

    Args:
        path: A file in the format of `write_cluster`, in bytes and seconds. The device may be a
            name of the table, and a link may be `{"ranks": 8, "bench": FILE}` with a result of
            `scaletorch.dist.bench`.
        ranks: Number of ranks of the job; None for all ranks in the file.

    Raises:
        InvalidArgumentError: The file does not exist, a field is missing, unknown or of the wrong
            type, or the links do not join all ranks.
    """
    content = _json_of(path)
    if isinstance(name := content.get("device"), str):
        content["device"] = asdict(device_named(name))
    if isinstance(links := content.get("links"), list):
        content["links"] = [_measured(each, path.parent) for each in links]
    found: Cluster = _read_as(Cluster, content, str(path))
    if ranks is not None and ranks > found.ranks:
        raise InvalidArgumentError(f"{path} has {found.ranks} ranks, and the job {ranks}")
    return found if ranks is None else replace(found, ranks=ranks)


def _measured(link: Any, folder: Path) -> Any:
    """Return a link with the figures of the bench file that it names, if any."""
    if not isinstance(link, Mapping) or "bench" not in link:
        return link
    more = {name: own for name, own in link.items() if name != "bench"}
    return asdict(read_bench(folder / str(link["bench"]))) | more


def read_bench(path: Path) -> Link:
    """Read a file of `python -m scaletorch.dist.bench --json FILE` as the link between its ranks.

    Raises:
        InvalidArgumentError: It is another file, or has neither all_reduce nor send_recv.
    """
    content = _json_of(path)
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


def _json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InvalidArgumentError: The file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} must be a JSON object")
    return content


def _plain(value: Any) -> Any:
    """Return a value in JSON types; a dict with keys other than str becomes a list of pairs."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _plain(own) for key, own in value.items()}
    return [[_plain(key), _plain(own)] for key, own in value.items()]


def _read_as(kind: Any, given: Any, where: str) -> Any:
    """Convert JSON content to a value of a type.

    Args:
        kind: A dataclass, a tuple, a dict, a `Literal` or a plain type.
        given: Content, as `_plain` returns it.
        where: Position in the file, for error messages.

    Raises:
        InvalidArgumentError: A field is missing or unknown, or has another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, given, where)
    if origin is tuple and isinstance(given, list | tuple):
        each = inner[:1] * len(given) if inner[-1] is Ellipsis else inner
        if len(each) == len(given):
            pairs = enumerate(zip(each, given, strict=True))
            return tuple(_read_as(own, value, f"{where} {at}") for at, (own, value) in pairs)
    elif origin is dict and inner[0] is not str:
        return dict(_read_as(tuple[tuple[inner], ...], given or [], where))  # type: ignore[valid-type]
    elif origin is dict and isinstance(given, Mapping):
        return {name: _read_as(inner[1], own, f"{where} {name}") for name, own in given.items()}
    elif _is_plain(kind, given):
        return given
    wanted = {int: "a whole number", float: "a finite number", str: "text"}.get(kind, kind)
    raise InvalidArgumentError(f"{where} must be {wanted}, got {given!r}")


def _is_plain(kind: Any, given: Any) -> bool:
    """Return whether a value is one of a `Literal`, a finite float, or exactly of a plain type."""
    if get_origin(kind) is Literal:
        return given in get_args(kind)
    if kind is float:
        return type(given) in (int, float) and math.isfinite(given)
    return type(given) is kind


def _dataclass(kind: Any, given: Any, where: str) -> Any:
    needed, known = _fields(kind)
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} must have the fields {', '.join(sorted(needed))}")
    if missing := sorted(needed - given.keys()):
        raise InvalidArgumentError(f"{where} misses {', '.join(missing)}")
    if unknown := sorted(given.keys() - known.keys()):
        names = ", ".join(sorted(known))
        raise InvalidArgumentError(f"{where} has unknown {', '.join(unknown)}; known are {names}")
    return kind(
        **{name: _read_as(known[name], own, f"{where}: {name}") for name, own in given.items()}
    )


@cache
def _fields(kind: Any) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the names of fields without a default, and the types of all fields."""
    needed = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    return frozenset(needed), get_type_hints(kind)
