"""Descriptions in files: a small JSON, a line for each number, so that two can be compared."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..dist.errors import InvalidArgumentError
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work

VERSION = 8


def write(description: Description, path: Path) -> None:
    """Write a description, a line for each behaviour, so that two can be compared."""
    content = {
        "version": VERSION, "name": description.name, "length": description.length,
        "dtype": description.dtype, "source": description.source, "tied": description.tied,
        "kernels": description.kernels,
        "blocks": [asdict(block) for block in description.blocks],
        "cuts": [
            {"cut": asdict(cut), "kinds": [asdict(kind) for kind in kinds]}
            for cut, kinds in description.cuts.items()
        ],
        "refused": [[asdict(cut), why] for cut, why in description.refused.items()],
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Description:
    """Read what `write` wrote.

    Raises:
        InvalidArgumentError: It is no description, or one of another version.
    """
    try:
        content = json.loads(path.read_text())
        if (version := content.pop("version")) != VERSION:
            raise InvalidArgumentError(
                f"{path} is of version {version}, and {VERSION} is read here"
            )
        found = Description(
            content["name"], content["length"], content["dtype"],
            tuple(Block(**each) for each in content["blocks"]),
            {Cut(**each["cut"]): tuple(map(_behaviour, each["kinds"])) for each in content["cuts"]},
            {Cut(**cut): why for cut, why in content["refused"]},
            tuple(map(tuple, content["tied"])), content["source"], kernels=content["kernels"],
        )  # fmt: skip
        kinds = 1 + max(block.kind for block in found.blocks)
        if type(found.length) is not int or {kinds} != {len(x) for x in found.cuts.values()}:
            raise ValueError("its length is no number, or its blocks are of other kinds than cuts")
        return found
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path} is no description of a model: {_told(error)}") from None


def _told(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _affine(given: dict[str, Any]) -> Affine:
    if any(type(each) not in (int, float) or not math.isfinite(each) for each in given.values()):
        raise ValueError(f"{given} are no finite numbers")
    return Affine(**given)


def _behaviour(given: dict[str, Any]) -> Behaviour:
    return Behaviour(
        tuple(Parameter(**{**each, "local": tuple(each["local"])}) for each in given["parameters"]),
        **{f.name: _affine(given[f.name]) for f in fields(Behaviour) if f.type == "Affine"},
        sent=tuple(Sent(**{**each, "bytes": _affine(each["bytes"])}) for each in given["sent"]),
        work=tuple(
            Work(**{**each, "flops": _affine(each["flops"]), "moved": _affine(each["moved"])})
            for each in given["work"]
        ),
    )
