"""Publishes a model's rows into Redis, or into a folder of increments, while it is trained.

A reader gives windows of changes; `publish` writes them to a target, each key at most once in a batch.
docs/reference/published.md has what is written.
"""

from elasticps.publishing.folder import PublishedFolder, PublishedRows, read_increments
from elasticps.publishing.publisher import Publisher, PublisherStats, publish
from elasticps.publishing.targets import PublishError

__all__ = [
    "PublishError",
    "PublishedFolder",
    "PublishedRows",
    "Publisher",
    "PublisherStats",
    "publish",
    "read_increments",
]
