"""`python -m elasticps.warm`: compiles every kernel of servers and workers, once for a machine or an image."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from elasticps import kernels
from elasticps.client import warm as client
from elasticps.security import openssl
from elasticps.server.process import main as server

_AT_IMPORT = (
    "elasticps.torch.kernels.distinct", "elasticps.torch.kernels.merge", "elasticps.torch.pooling",
    "elasticps.torch.weights",
)  # fmt: skip
"""Modules whose kernels are compiled when they are imported; where there is no torch, nobody needs them."""


def warm() -> None:
    """Compiles what the cache does not have, and lists what lies beside the code."""
    server.warm()
    client.warm()
    client.warm_filters()
    if find_spec("torch"):
        for module in _AT_IMPORT:
            import_module(module)
    if openssl.LIBRARY is not None:
        from elasticps.security import records  # only where OpenSSL can be called

        records.warm()
    kernels.list_compiled()


if __name__ == "__main__":
    warm()
