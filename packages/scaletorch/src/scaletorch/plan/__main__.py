"""`python -m scaletorch.plan --model FOLDER --length 4096 --rows 256 --ranks 64`: choose a layout.

`python -m scaletorch.plan describe` writes a model description to a file, so that later plans do
not need the model. `python -m scaletorch.plan calibrate` measures the speed of this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from ..dist.errors import InvalidArgumentError, ScaletorchError
from ..parallel.pg_manager import Grid, parse_layout
from .arguments import (
    ASSUMED,
    AXES,
    OTHERS,
    cluster_of,
    cuts_of,
    options_of,
    sizes_of,
    subcommand,
)
from .clusters import Cluster
from .description import Description, Kernels
from .estimate import Estimate
from .files import read, write, write_cluster
from .search import Plan, plan
from .showing import explained, fits, grouped, named, page, table


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if a layout fits, 1 if none does, 2 for an error."""
    command, arguments = subcommand(sys.argv[1:] if given is None else list(given))
    try:
        return {"plan": _plan, "describe": _describe, "calibrate": _calibrate}[command](arguments)
    except (ScaletorchError, OSError) as error:
        print(f"python -m {__package__}: error: {error}", file=sys.stderr)
        return 2


def _plan(arguments: Any) -> int:
    cluster = cluster_of(arguments)
    description = description_of(arguments, cluster.device.kernels)
    options = options_of(arguments)
    grid = parse_layout(arguments.explain) if arguments.explain else None
    if grid and not (arguments.json or arguments.html):  # estimate no other grid
        sizes = (
            {axis: [getattr(grid, axis)] for axis in AXES} if options.meant(grid) else {"dp": []}
        )
        options = replace(options, sizes=sizes)
    found = plan(description, arguments.rows, cluster, options=options)
    notes = [*_assumed(arguments, description, cluster)]
    if grid:
        print(explained(found, _chosen(found, grid, arguments.explain)))
    elif not (found.fitting or found.tried):
        raise InvalidArgumentError(_none(found, sizes_of(arguments)))
    else:
        print(table(found, arguments.top, notes))
    if arguments.json:
        arguments.json.write_text(json.dumps(_content(found, notes), indent=1) + "\n")
    if arguments.html:
        arguments.html.write_text(page(found, arguments.top, notes), encoding="utf-8")
    return 0 if found.fitting else 1


def _assumed(arguments: Any, description: Description, cluster: Cluster) -> Iterator[str]:
    if not (arguments.device or arguments.cluster):
        yield ASSUMED
    if description.kernels != cluster.device.kernels:
        yield OTHERS.format(description.kernels, cluster.device.kernels)


def _describe(arguments: Any) -> int:
    description = description_of(arguments, arguments.kernels)
    write(description, arguments.out)
    cuts = f"{len(description.cuts)} ways of cutting it"
    print(f"{arguments.out}: {description.name}, {description.elements:,} parameters, {cuts}")
    for cut, why in description.refused.items():
        print(f"refused: {cut}: {why}")
    return 0


def _calibrate(arguments: Any) -> int:
    import torch

    from .calibration import calibrate

    dtype = getattr(torch, arguments.dtype)
    cluster = calibrate(arguments.ranks, dtype=dtype, backend=arguments.backend)
    write_cluster(cluster, arguments.out)
    print(f"{arguments.out}: {cluster.ranks} x {cluster.device.name}: {cluster.device.source}")
    return 0


def description_of(arguments: Any, kernels: Kernels) -> Description:
    """Return the model description: read from a file, or made by running the layers hollow.

    Args:
        arguments: Parsed command-line arguments.
        kernels: The device type whose kernels run the model.

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
    # These import torch; planning from a description file does not need it.
    from ..compose.naming import read_argument
    from ..parallel.pipeline_parallel import Split
    from .describing import describe, experts_of
    from .describing.named import named as model_named

    name, build = model_named(arguments.model, arguments.dtype)
    return describe(
        build, arguments.length, cuts=cuts_of(arguments, experts_of(build)),
        batch=_loaded(arguments, "batch", Callable), plan=_loaded(arguments, "plan", Mapping),
        split=_loaded(arguments, "split", Split), name=name,
        loss_fn=_loaded(arguments, "loss", Callable),
        row_dims=dict(map(read_argument, arguments.row_dims)),
        sequence_dims=dict(map(read_argument, arguments.sequence_dims)), kernels=kernels,
    )  # fmt: skip


def _loaded(arguments: Any, option: str, kind: Any) -> Any:
    given = getattr(arguments, option)
    if given is None:
        return None
    from ..compose.naming import load

    found = load(given)
    if not isinstance(found, kind):
        raise InvalidArgumentError(
            f"--{option} {given} has to name a {kind.__name__}, and names a {type(found).__name__}"
        )
    return found


def _chosen(found: Plan, grid: Grid, text: str) -> Estimate:
    """Return the best estimate for a grid.

    Raises:
        InvalidArgumentError: No estimate has this grid; the message says why.
    """
    for each in chain(found.ranked(), found.over):
        if each.layout.grid == grid:
            return each
    why = next((each.why for each in found.illegal if each.grid == grid), "")
    ranks = found.cluster.ranks
    if grid.world_size != ranks:
        why = f"it has {grid.world_size} ranks, and {ranks} are planned for"
    why = why or "sizes that were asked for, or ways that the model is described for, leave it out"
    raise InvalidArgumentError(f"{text} is not legal: {why}")


def _none(found: Plan, sizes: dict[str, list[int]]) -> str:
    """Return the message for a search without legal layouts, with the most frequent reason."""
    named = ", ".join(f"{name} {' or '.join(map(str, own))}" for name, own in sizes.items())
    start = f"no layout of {found.cluster.ranks} ranks with {found.rows} rows"
    start += f" and {named}" if named else ""
    if not found.refused:
        return (
            f"{start} is there: sizes of dp, pp, cp and tp have to multiply to the ranks, and ep "
            "to divide dp x cp x tp and be one that the model is described for"
        )
    count, example, why = grouped(found.refused)[0]
    return f"{start} is legal; of {len(found.refused)} for {count} such as {example}: {why}"


def _content(found: Plan, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "model": found.description.name, "length": found.description.length, "rows": found.rows,
        "cluster": asdict(found.cluster),
        "estimates": [
            {**each.as_json(), "peak": each.peak, "fits": fits(found, each)}
            for each in found.estimates or found.over
        ],
        "refused": [(named(each), each.why) for each in found.refused], "notes": notes,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
