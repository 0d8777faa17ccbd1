"""Choose a layout: python -m scaletorch.plan --model FOLDER --length 4096 --rows 256 --ranks 64."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..dist.errors import InvalidArgumentError, ScaletorchError
from ..parallel.pipeline_parallel import SCHEDULES
from .clusters import DEVICES, Cluster, cluster_named, read_cluster
from .description import CHUNKS, Description, Kernels
from .estimate import bytes_in
from .search import Options, Plan, plan
from .tables import explained, fits, named, page, table

DEFAULT = "A100-SXM-80GB"
AXES = ("dp", "pp", "cp", "tp", "ep")
DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\
Options that restrict layouts take one or more values: --tp 4 8 --recompute none full.
Exit status: 0 a layout fits, 1 none does, 2 what is asked for cannot be planned."""


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if a layout fits, 1 if none does, 2 for an error."""
    prog = f"python -m {__package__}"
    try:
        return _plan(_planning(prog).parse_args(given))
    except (ScaletorchError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


def _plan(arguments: Any) -> int:
    cluster = _cluster_of(arguments)
    description = _description_of(arguments, cluster.device.kernels)
    found = plan(description, arguments.rows, cluster, options=_options_of(arguments))
    print(table(found, arguments.top))
    if arguments.top == 1:
        print(*(f"\n{explained(found, best)}" for best in found.top(1)))
    if arguments.json:
        arguments.json.write_text(json.dumps(_content(found, arguments.top), indent=1) + "\n")
    if arguments.html:
        arguments.html.write_text(page(found, arguments.top), encoding="utf-8")
    return 0 if any(fits(found, best) for best in found.top(1)) else 1


def _content(found: Plan, top: int) -> dict[str, Any]:
    return {
        "model": found.description.name, "length": found.description.length, "rows": found.rows,
        "cluster": asdict(found.cluster),
        "estimates": [
            {**asdict(each), "peak": each.peak, "fits": fits(found, each)}
            for each in found.estimates or found.top(top)
        ],
        "refused": [(named(each), each.why) for each in found.refused],
    }  # fmt: skip


def _planning(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="List the layouts of a training, with their memory and step time.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    say = parser.add_argument
    model = "folder with a config.json of transformers, or package.module:function"
    say("--model", required=True, help=model)
    say("--length", type=_count, required=True, metavar="N", help="tokens of a sequence")
    say("--ranks", type=_count, required=True, metavar="N", help="how many devices")
    say("--rows", type=_count, required=True, metavar="N", help="sequences of a global batch")
    either, named = parser.add_mutually_exclusive_group(), f"{', '.join(DEVICES)} ({DEFAULT})"
    either.add_argument("--device", choices=DEVICES, default=DEFAULT, metavar="NAME", help=named)
    either.add_argument("--cluster", type=Path, metavar="FILE", help="JSON of devices and links")
    say("--memory", metavar="SIZE", help="of a device, such as 80GiB; else as the device has")
    say("--dtype", choices=DTYPES, help="of parameters; else as the model is built")
    say("--batch", help="package.module:function of rows, what `train_step` takes of a model")
    say("--plan", help="package.module:name of a tensor parallel plan")
    for axis in AXES:
        say(f"--{axis}", type=_count, nargs="+", metavar="N", help="allowed sizes")
    say("--micro-rows", type=_count, nargs="+", metavar="N", help="rows of a micro-batch")
    say("--zero", type=int, nargs="+", choices=range(4), help="stages of ZeRO")
    say("--recompute", nargs="+", choices=("none", "selective", "full"))
    say("--schedule", nargs="+", choices=[name for name in SCHEDULES if name != "forward_only"])
    say("--cp-method", dest="cp_methods", nargs="+", metavar="NAME", help="as for `parallelize`")
    say("--top", type=_count, default=10, metavar="N", help="layouts in the table (10)")
    for name in ("json", "html"):
        say(f"--{name}", type=Path, metavar="FILE", help=f"write the plan as {name.upper()}")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _cluster_of(arguments: Any) -> Cluster:
    """Return the cluster that the arguments select."""
    if arguments.cluster:
        cluster = read_cluster(arguments.cluster, arguments.ranks)
    else:
        cluster = cluster_named(arguments.device, arguments.ranks)
    if arguments.memory is None:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory=bytes_in(arguments.memory)))


def _options_of(arguments: Any) -> Options:
    names = ("micro_rows", "zero", "recompute", "cp_methods")
    given = {name: getattr(arguments, name) for name in names}
    found: dict[str, Any] = {name: tuple(values) for name, values in given.items() if values}
    if arguments.schedule:
        found["schedules"] = tuple((name, CHUNKS.get(name, 1)) for name in arguments.schedule)
    sizes = {axis: given for axis in AXES if (given := getattr(arguments, axis))}
    return Options(**found, sizes=sizes)


def _description_of(arguments: Any, kernels: Kernels) -> Description:
    """Return the description of the model; imports torch, which other arguments do without."""
    from ..compose.naming import load
    from .describing import describe, usual_cuts

    name, build, experts = _model_named(arguments.model, arguments.dtype)
    recompute = arguments.recompute or ["none"]
    cuts = usual_cuts(
        arguments.ranks, tp=arguments.tp, cp=arguments.cp, ep=arguments.ep, experts=experts,
        methods=arguments.cp_methods or ("ring",),
        selective=[name == "selective" for name in recompute],
    )  # fmt: skip
    own = arguments.plan and load(arguments.plan)
    if not isinstance(own, Mapping | None):
        raise InvalidArgumentError(
            f"--plan {arguments.plan} must name a Mapping, got a {type(own).__name__}"
        )
    return describe(
        build, arguments.length, cuts=cuts, batch=arguments.batch and load(arguments.batch),
        plan=own, name=name, kernels=kernels,
    )  # fmt: skip


def _model_named(given: str, dtype: str | None) -> tuple[str, Callable[[], Any], int]:
    """Return name, builder and experts in a layer of a config's folder or `package.module:name`."""
    import torch

    from ..compose.experts import count_experts
    from ..compose.naming import load
    from .describing import built

    kind = None if dtype is None else getattr(torch, dtype)
    folder = Path(given)  # with a config.json of transformers
    if (folder / "config.json").exists():
        name, make = folder.resolve().name, _of_config(folder)
    elif ":" in given:
        name, make = "", load(given)
        if not callable(make):
            made = type(make).__name__
            raise InvalidArgumentError(f"{given!r} must be a function of the model, got {made}")
    else:
        raise InvalidArgumentError(
            f"{given!r} is neither a folder with a config.json of transformers nor "
            "package.module:function; nothing is downloaded: get its config.json first"
        )

    def build() -> Any:
        module = make()
        for parameter in module.parameters() if kind else ():
            parameter.data = parameter.data.to(kind)
        return module

    return name, build, count_experts(built(build))


def _of_config(folder: Path) -> Callable[[], Any]:
    try:
        import transformers
    except ImportError as error:
        raise InvalidArgumentError(
            'a config of transformers needs it: pip install "scaletorch[transformers]"'
        ) from error
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # validators raise other types than ValueError
        why = " ".join(str(error).split("\n")[:2])
        raise InvalidArgumentError(f"{folder} has no config of transformers: {why}") from error
    config.use_cache = False  # training does not need a cache
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


if __name__ == "__main__":
    sys.exit(main())
