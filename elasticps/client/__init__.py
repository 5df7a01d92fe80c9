"""The worker's side: routing, sessions, connections."""

from elasticps.client.cache_batches import CacheUse
from elasticps.client.client import Client, connect
from elasticps.client.core.join import Resume
from elasticps.client.data_shards import Shard, Shards
from elasticps.client.lifecycle import KeyUsage, TableState
from elasticps.client.losses import Loss
from elasticps.client.stats import log_stats
from elasticps.client.steps import OpenStep, Step
from elasticps.client.tables import DenseTensor, SparseTable, TableInfo

__all__ = [
    "CacheUse",
    "Client",
    "DenseTensor",
    "KeyUsage",
    "Loss",
    "OpenStep",
    "Resume",
    "Shard",
    "Shards",
    "SparseTable",
    "Step",
    "TableInfo",
    "TableState",
    "connect",
    "log_stats",
]
