"""Which layout to train with: how much memory, how long, from the object that will run."""

from .buckets import Optimizer
from .calibrate import calibrate
from .cluster import Cluster, Device, Link
from .cluster_files import read_bench, read_cluster, write_cluster
from .describing import describe, usual_cuts
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from .devices import CLUSTERS, DEVICES, cluster_named, device_named
from .estimate import Estimate, Memory, Time, Traffic
from .explaining import Line, lines
from .layout import Layout
from .options import Options, Refused, legal
from .search import Plan, plan
from .timing import time, timer

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
    "Line",
    "Link",
    "Memory",
    "Optimizer",
    "Options",
    "Parameter",
    "Plan",
    "Refused",
    "Sent",
    "Time",
    "Traffic",
    "Work",
    "calibrate",
    "cluster_named",
    "describe",
    "device_named",
    "legal",
    "lines",
    "plan",
    "read_bench",
    "read_cluster",
    "time",
    "timer",
    "usual_cuts",
    "write_cluster",
]
