"""After `elasticps.warm` no step of a worker waits for a compiler, whatever the worker uses."""

from __future__ import annotations

import subprocess
import sys

import elasticps as eps

_WORKER = """
import gc
import sys

import numpy as np
import torch
from numba.core.registry import CPUDispatcher

import elasticps as eps
from elasticps.torch import Embedding, Optimizer
from elasticps.warm import warm


def compiled():
    ours = [each for each in gc.get_objects() if isinstance(each, CPUDispatcher)]
    return {(each.py_func.__module__, each.py_func.__name__, kind) for each in ours for kind in each.overloads}


warm()
before = compiled()
assert len(before) > 20, before
keys, ones = np.array([1, 2, 3, 3, 900]), np.ones((5, 8), np.float32)
with eps.connect(sys.argv[1], worker="w0", app="compiled") as ps:
    filters = [[eps.Int8()], [eps.TopK(0.1)], [eps.Threshold(0.5), eps.BFloat16()], [eps.KeysOnce(), eps.KeyDeltas()]]
    tables = [ps.table(f[0].kind, dim=8, optimizer=eps.Adagrad(lr=0.1), push=f, pull=[eps.BFloat16()]) for f in filters]
    tables.append(ps.table("cached", dim=8, optimizer=eps.SGD(lr=0.1), cache=eps.Cache(rows=100, staleness=3)))
    tensor = ps.tensor("w", init=np.ones(90_000, np.float32), optimizer=eps.Adam())
    model = torch.nn.Sequential(Embedding(ps, "e", 8, optimizer=eps.SGD(lr=0.1)), torch.nn.Linear(8, 1))
    optimizer = Optimizer(ps, model, eps.Adam())
    for _ in range(3):
        for table in tables:
            table.pull(keys)
            table.pull(keys, read="any")
        ps.push({table: (keys, ones) for table in tables} | {tensor: tensor.pull()})
        optimizer.zero_grad()
        model(torch.arange(9)).sum().backward()
        optimizer.step()
    ps.flush()
    for name in ps.tables():
        ps.drop_table(name)
assert compiled() == before, compiled() - before
"""


def test_nothing_is_compiled_once_a_worker_trains(cluster: eps.LocalCluster) -> None:
    done = subprocess.run([sys.executable, "-c", _WORKER, cluster.url], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
