"""What is known of the ranks: devices, links, what a machine reaches, and files of these."""

from .calibrate import calibrate
from .cluster import Cluster, Device, Link
from .devices import CLUSTERS, DEVICES, cluster_named, device_named
from .files import read_bench, read_cluster, write_cluster

__all__ = [
    "CLUSTERS",
    "DEVICES",
    "Cluster",
    "Device",
    "Link",
    "calibrate",
    "cluster_named",
    "device_named",
    "read_bench",
    "read_cluster",
    "write_cluster",
]
