"""elasticps on Ray: servers as actors, data that is handed out once, checkpoints that Ray Train's belong to.

    with elasticps.ray.Cluster(servers=3, replicas=2) as cluster:
        TorchTrainer(train, train_loop_config={"url": cluster.url}, scaling_config=…).fit()

Workers connect to `cluster.url` as anywhere else. `ShardedBlocks` hands out the blocks of a Ray Dataset by `ps.shards`,
`report` asks for a checkpoint of the servers beside Ray Train's own.

Do not `prepare_model` a model whose weights are at the servers: each worker sends its gradients there itself, and
`DistributedDataParallel` would average them once more. `elasticps.torch.Optimizer` refuses such a model.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ImportError("elasticps.ray needs Ray: pip install 'elasticps[ray]'", name="ray")

from elasticps.ray.cluster import Cluster, RayServer
from elasticps.ray.data import ShardedBlocks
from elasticps.ray.train import report

__all__ = ["Cluster", "RayServer", "ShardedBlocks", "report"]
