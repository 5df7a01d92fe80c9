"""A view as the page draws it: the ranges in the order of their hashes, their chains, and what is under way. Pure."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View


def draw(view: View) -> dict[str, Any]:
    """Plain values. Arrays are base64 of little-endian int16, as a view may have 65,536 ranges:

    chains   [ranges, replicas]: indices into `servers`, head first, -1: no replica
    joining  [ranges]: who is being filled, -1: nobody; leaving: whose place it takes, -1: nobody's
    """
    return {
        "cluster": view.cluster,
        "epoch": view.epoch,
        "reason": view.reason,
        "ranges": view.ranges,
        "replicas": view.replicas,
        "servers": [server.name for server in view.servers],
        "chains": _packed(view.chains),
        "joining": _packed(view.joining),
        "leaving": _packed(view.leaving),
    }


def _packed(array: NDArray[np.int32]) -> str:
    return base64.b64encode(array.astype("<i2").tobytes()).decode("ascii")


def counts(view: View) -> dict[str, dict[str, int]]:
    """Of each server of a view, by name, how many ranges it heads, holds, and is being filled with."""
    size = len(view.servers)
    heads = np.bincount(view.heads[view.heads >= 0], minlength=size).tolist()
    held = np.bincount(view.chains[view.chains >= 0], minlength=size).tolist()
    joining = np.bincount(view.joining[view.joining >= 0], minlength=size).tolist()
    return {
        server.name: {"heads": heads[i], "held": held[i], "joining": joining[i]}
        for i, server in enumerate(view.servers)
    }


def under_way(view: View) -> tuple[int, int, int]:
    """Ranges that are short of a replica, replicas being filled for those, and replicas that move."""
    short = (view.chains < 0).any(axis=1)
    filling = view.joining >= 0
    return int(short.sum()), int((short & filling).sum()), int((~short & filling).sum())
