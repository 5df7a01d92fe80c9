"""Serves a reader's rows: by gRPC for services in any language, with health and metrics for Kubernetes."""

from elasticps.serving.client import FoundRows, LookupClient, lookup
from elasticps.serving.service import start_lookup

__all__ = ["FoundRows", "LookupClient", "lookup", "start_lookup"]
