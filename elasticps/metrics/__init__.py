"""Prometheus metrics of servers, coordinators and workers. Nothing here is imported by a process that serves none.

Names begin with `elasticps_server_`, `elasticps_cluster_` and `elasticps_coordinator_` (both of coordinators), and
`elasticps_worker_`. Values are read from what the processes keep anyway when somebody scrapes; only latencies are
measured on the way, of one frame in `timing.SAMPLE`.
"""

from __future__ import annotations

from elasticps.metrics.client import ClientMetrics, serve_client

__all__ = ["ClientMetrics", "serve_client"]
