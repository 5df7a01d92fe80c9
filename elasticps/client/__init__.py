"""The worker's side: routing, sessions, connections."""

from elasticps.client.cluster import Client, connect
from elasticps.client.handles import DenseTensor, SparseTable
from elasticps.client.shards import Shard, Shards
from elasticps.client.starting import Resume
from elasticps.client.steps import OpenStep, Step

__all__ = ["Client", "DenseTensor", "OpenStep", "Resume", "Shard", "Shards", "SparseTable", "Step", "connect"]
