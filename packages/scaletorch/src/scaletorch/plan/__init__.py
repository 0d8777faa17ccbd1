"""Which layout to train with: how much memory, how long, from the object that will run."""

from .calibrate import calibrate
from .cluster import Cluster, Device, Link
from .cluster_files import read_bench, read_cluster, write_cluster
from .describing import describe, usual_cuts
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from .devices import CLUSTERS, DEVICES, cluster_named, device_named
from .estimate import Estimate, Memory, Time, Traffic
from .layout import Layout
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
    "Link",
    "Memory",
    "Parameter",
    "Sent",
    "Time",
    "Traffic",
    "Work",
    "calibrate",
    "cluster_named",
    "describe",
    "device_named",
    "read_bench",
    "read_cluster",
    "time",
    "timer",
    "usual_cuts",
    "write_cluster",
]
