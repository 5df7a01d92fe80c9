"""elasticps: an elastic, fault-tolerant parameter server for distributed training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elasticps.errors import (
    Closed,
    ClusterUnreachable,
    ConfigError,
    Definite,
    Error,
    Indefinite,
    InputError,
    ServerError,
    SpecError,
    Timeout,
    UnknownTable,
    VersionMismatch,
)
from elasticps.spec import (
    ASP,
    BSP,
    FTRL,
    SGD,
    SSP,
    Accumulate,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Constant,
    Custom,
    Normal,
    RowAdagrad,
    TableSpec,
    Uniform,
    Zeros,
)

if TYPE_CHECKING:
    from elasticps.client import Client, DenseTensor, OpenStep, Resume, Shard, Shards, SparseTable, Step, connect
    from elasticps.local import LocalCluster

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "FTRL",
    "SGD",
    "SSP",
    "Accumulate",
    "Adagrad",
    "Adam",
    "AdamW",
    "Assign",
    "Client",
    "Closed",
    "ClusterUnreachable",
    "ConfigError",
    "Constant",
    "Custom",
    "Definite",
    "DenseTensor",
    "Error",
    "Indefinite",
    "InputError",
    "LocalCluster",
    "Normal",
    "OpenStep",
    "Resume",
    "RowAdagrad",
    "ServerError",
    "Shard",
    "Shards",
    "SparseTable",
    "SpecError",
    "Step",
    "TableSpec",
    "Timeout",
    "Uniform",
    "UnknownTable",
    "VersionMismatch",
    "Zeros",
    "connect",
]

# Imported when first asked for: half a second of kernels and gRPC, which most commands and processes do without.
_CLIENT = ("Client", "DenseTensor", "OpenStep", "Resume", "Shard", "Shards", "SparseTable", "Step", "connect")
_HOMES = {"LocalCluster": "elasticps.local"} | dict.fromkeys(_CLIENT, "elasticps.client")

if not TYPE_CHECKING:  # for type checkers a name that is not here stays an error

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
