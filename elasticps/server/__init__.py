"""One server: an event loop that owns the rows of its ranges.

Imports point one way: `process` → this folder → `roles` → `network` → `fast` → `core`.
"""
