"""Serves a reader's rows: by gRPC for services in any language, with health and metrics for Kubernetes."""

from elasticps.serving.metrics import ReaderMetrics
from elasticps.serving.service import start_lookup

__all__ = ["ReaderMetrics", "start_lookup"]
