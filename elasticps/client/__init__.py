"""The worker's side: routing, sessions, connections."""

from elasticps.client.cluster import Client, OpenStep, Step, connect
from elasticps.client.handles import DenseTensor, SparseTable
from elasticps.client.joining import Resume
from elasticps.client.shards import Shard, Shards

__all__ = ["Client", "DenseTensor", "OpenStep", "Resume", "Shard", "Shards", "SparseTable", "Step", "connect"]
