"""The control plane of a server: gRPC, with the standard health service beside our own."""

from __future__ import annotations

from elasticps.admin.client import fetch_cluster, fetch_health, fetch_hot, fetch_status, fetch_tables
from elasticps.admin.service import AdminServer, start_admin

__all__ = ["AdminServer", "fetch_cluster", "fetch_health", "fetch_hot", "fetch_status", "fetch_tables", "start_admin"]
