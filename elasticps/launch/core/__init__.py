"""Decisions of `elasticps launch`: who has which part of a cluster, and when a job is over. Pure."""
