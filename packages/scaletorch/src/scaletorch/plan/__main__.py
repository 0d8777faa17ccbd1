"""`python -m scaletorch.plan --model FOLDER --length 4096 --rows 256 --ranks 64`: which layout?

`python -m scaletorch.plan describe` writes what is known of a model to a file, from which plans are
made without it, and `python -m scaletorch.plan calibrate` what this machine reaches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..compose.naming import load, parse_layout
from ..dist.errors import InvalidArgumentError, ScaletorchError
from .arguments import ASSUMED, cluster_of, cuts_of, restrictions, subcommand
from .cluster_files import write_cluster
from .description import Description, read, write
from .estimate import Estimate
from .search import Plan, plan
from .showing import Shown, explained, grouped, page, png, table
from .timing import timeline


def main(given: Sequence[str] | None = None) -> int:
    """Run the command: 0 if a layout fits, 1 if none does, 2 for what cannot be planned."""
    command, arguments = subcommand(sys.argv[1:] if given is None else list(given))
    try:
        return {"plan": _plan, "describe": _describe, "calibrate": _calibrate}[command](arguments)
    except (ScaletorchError, OSError) as error:
        print(f"python -m {__package__}: error: {error}", file=sys.stderr)
        return 2


def _plan(arguments: Any) -> int:
    description = description_of(arguments)
    cluster = cluster_of(arguments)
    found = plan(description, arguments.rows, cluster, **restrictions(arguments))
    shown = shown_of(found, arguments)
    if not found.estimates:
        raise InvalidArgumentError(_none(shown, restrictions(arguments)))
    if arguments.explain:
        print(explained(shown, _chosen(found, arguments.explain)))
    else:
        print(table(shown, arguments.top))
    _write(shown, arguments)
    return 0 if shown.fitting else 1


def _describe(arguments: Any) -> int:
    description = description_of(arguments)
    write(description, arguments.out)
    cuts = f"{len(description.cuts)} ways of cutting it"
    print(f"{arguments.out}: {description.name}, {description.elements:,} parameters, {cuts}")
    for cut, why in description.refused.items():
        print(f"refused: {cut}: {why}")
    return 0


def _calibrate(arguments: Any) -> int:
    import torch

    from .calibrate import calibrate

    dtype = getattr(torch, arguments.dtype)
    cluster = calibrate(arguments.ranks, dtype=dtype, backend=arguments.backend)
    write_cluster(cluster, arguments.out)
    print(f"{arguments.out}: {cluster.ranks} x {cluster.device.name}: {cluster.device.source}")
    return 0


def description_of(arguments: Any) -> Description:
    """Return what is known of the model: read, or found out by running its layers hollow.

    Raises:
        InvalidArgumentError: No model is named, or it cannot be described.
    """
    if getattr(arguments, "description", None):
        if arguments.model:
            raise InvalidArgumentError("say --model or --description, not both")
        return read(arguments.description)
    if not arguments.model:
        raise InvalidArgumentError(
            "say --model: a folder with a config.json of transformers, or package.module:function; "
            "or --description FILE"
        )
    if arguments.length is None:
        raise InvalidArgumentError("say --length: how many tokens a sequence has")
    from .describing import (  # which a plan of a description has no need of
        describe,
        experts_of,
        named,
    )

    name, build = named(arguments.model, arguments.dtype)
    return describe(
        build, arguments.length, cuts=cuts_of(arguments, experts_of(build)),
        batch=load(arguments.batch) if arguments.batch else None, name=name,
    )  # fmt: skip


def shown_of(found: Plan, arguments: Any) -> Shown:
    """Return a plan as it is shown."""
    notes = [ASSUMED] if not (arguments.device or arguments.cluster) else []
    description, cluster = found.description, found.cluster
    return Shown(
        description.name, description.length, found.rows, cluster, found.estimates, found.refused,
        found.explain, lambda layout: timeline(description, layout, cluster), notes,
    )  # fmt: skip


def _chosen(found: Plan, text: str) -> Estimate:
    """Return the best estimate of a layout.

    Raises:
        InvalidArgumentError: There is none, and why.
    """
    grid = parse_layout(text)
    for each in found.estimates:
        if each.layout.grid == grid:
            return each
    why = next((why for name, why in found.refused.items() if name.startswith(text)), "")
    ranks = found.cluster.ranks
    why = why or f"it has {grid.world_size} ranks, and {ranks} are planned for"
    raise InvalidArgumentError(f"{text} is not legal: {why}")


def _none(shown: Shown, asked: dict[str, Any]) -> str:
    """Return why no layout is legal: the reason of most of them."""
    named = ", ".join(f"{name} {' or '.join(map(str, own))}" for name, own in asked.items())
    start = f"no layout of {shown.cluster.ranks} ranks with {shown.rows} rows"
    start += f" and {named}" if named else ""
    reasons = list(grouped(shown.refused))
    if not reasons:
        return f"{start} is there: sizes have to multiply to the ranks"
    count, example, why = reasons[0]
    return f"{start} is legal; of {len(shown.refused)} for {count} such as {example}: {why}"


def _write(shown: Shown, arguments: Any) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(_content(shown), indent=1) + "\n")
    if arguments.html:
        arguments.html.write_text(page(shown, arguments.top), encoding="utf-8")
    if arguments.png:
        png(arguments.png, shown, arguments.top)


def _content(shown: Shown) -> dict[str, Any]:
    return {
        "model": shown.name, "length": shown.length, "rows": shown.rows,
        "cluster": asdict(shown.cluster),
        "estimates": [
            {**each.as_json(), "peak": each.peak, "fits": shown.fits(each)}
            for each in shown.estimates
        ],
        "refused": dict(shown.refused), "notes": list(shown.notes),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
