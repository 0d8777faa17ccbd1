"""All public names of the package, each imported on first access."""

from .calibration import calibrate
from .clusters import (
    DEVICES,
    Cluster,
    Device,
    Link,
    cluster_named,
    read_bench,
    read_cluster,
    write_cluster,
)
from .describing import describe, usual_cuts
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from .estimate import Estimate, Memory, Time
from .known import Optimizer
from .layout import Layout
from .options import Options, Refused, legal
from .search import Plan, plan
from .showing import page, table
from .timing import time

__all__ = [
    "DEVICES",
    "Affine",
    "Behaviour",
    "Block",
    "Cluster",
    "Cut",
    "Description",
    "Device",
    "Estimate",
    "Layout",
    "Link",
    "Memory",
    "Optimizer",
    "Options",
    "Parameter",
    "Plan",
    "Refused",
    "Sent",
    "Time",
    "Work",
    "calibrate",
    "cluster_named",
    "describe",
    "legal",
    "page",
    "plan",
    "read_bench",
    "read_cluster",
    "table",
    "time",
    "usual_cuts",
    "write_cluster",
]
