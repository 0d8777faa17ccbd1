"""All public names of the package, each imported on first access."""

from .calibration import calibrate
from .clusters import (
    CLUSTERS,
    DEVICES,
    Cluster,
    Device,
    Link,
    cluster_named,
    device_named,
)
from .describing import describe, usual_cuts
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from .estimate import Estimate, Memory, Time
from .files import read_bench, read_cluster, write_cluster
from .known import Optimizer
from .layout import Layout
from .options import Options, Refused, legal
from .search import Plan, plan
from .timing import time

__all__ = [
    "CLUSTERS",
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
    "device_named",
    "legal",
    "plan",
    "read_bench",
    "read_cluster",
    "time",
    "usual_cuts",
    "write_cluster",
]
