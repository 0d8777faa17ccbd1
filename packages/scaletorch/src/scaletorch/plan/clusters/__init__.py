"""Clusters: devices, links, and files that describe them."""

from .cluster import Cluster, Device, Link
from .devices import CLUSTERS, DEVICES, cluster_named, device_named
from .files import read_bench, read_cluster, write_cluster

__all__ = [
    "CLUSTERS",
    "DEVICES",
    "Cluster",
    "Device",
    "Link",
    "cluster_named",
    "device_named",
    "read_bench",
    "read_cluster",
    "write_cluster",
]
