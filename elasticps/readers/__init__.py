"""Readers: processes that hold a model's rows and follow its training, to serve them.

`reader` connects one; docs/internals/readers.md explains how rows come to it.
"""

from elasticps.model.key_share import share_of
from elasticps.readers.opening import reader
from elasticps.readers.reader import Reader
from elasticps.readers.remote import RemoteReader, remote_reader
from elasticps.readers.values import AppliedWindow, AsOf, ReaderSpec, ReaderStats, TableChange

__all__ = [
    "AppliedWindow",
    "AsOf",
    "Reader",
    "ReaderSpec",
    "ReaderStats",
    "RemoteReader",
    "TableChange",
    "reader",
    "remote_reader",
    "share_of",
]
