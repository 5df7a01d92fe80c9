"""Ray Train beside elasticps: its reports, with a checkpoint of the servers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

CHECKPOINT = "elasticps_checkpoint"
"""The metric, and the key of a Ray Train checkpoint's metadata, with the number of the servers' checkpoint."""


def report(
    ps: Any, metrics: Mapping[str, Any], checkpoint: Any = None, *, full: bool = False, timeout: float | None = None
) -> None:
    """`ray.train.report`, with a checkpoint of the servers that belongs to it: call it in every worker, after a step.

    The first worker asks for it (`ps.checkpoint`), waits until it is made, and adds its number to its metrics and to
    the metadata of `checkpoint`, as `elasticps_checkpoint`. Then it reports, as the others have done meanwhile: Ray
    Train waits for all.

    checkpoint: a `ray.train.Checkpoint` with what is not at the servers, such as buffers. None: the first worker makes
    one with nothing but the number, so that Ray Train has the metrics in its result. full, timeout: as for
    `ps.checkpoint` and its `result`. Raises CheckpointError, which says why there is none, such as a cluster without
    `checkpoint_url`; Timeout.
    """
    from ray import train  # brings in pyarrow and pandas: only training loops wait for that

    if train.get_context().get_world_rank() != 0:
        train.report(dict(metrics), checkpoint=checkpoint)
        return
    number = ps.checkpoint(full=full).result(timeout)
    with tempfile.TemporaryDirectory() as folder:
        chosen = train.Checkpoint.from_directory(folder) if checkpoint is None else checkpoint
        chosen.update_metadata({CHECKPOINT: number})
        train.report({**metrics, CHECKPOINT: number}, checkpoint=chosen)
