"""The worker's side: routing, sessions, connections."""

from elasticps.client.cluster import Client, OpenStep, Step, connect
from elasticps.client.handles import DenseTensor, SparseTable

__all__ = ["Client", "DenseTensor", "OpenStep", "SparseTable", "Step", "connect"]
