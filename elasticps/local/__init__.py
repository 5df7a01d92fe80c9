"""A cluster on this machine: etcd, a coordinator and servers as processes of their own, for trying out and testing."""

from __future__ import annotations

from elasticps.local.cluster import LocalCluster
from elasticps.local.process import ServerProcess

__all__ = ["LocalCluster", "ServerProcess"]
