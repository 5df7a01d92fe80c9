"""Who is in the cluster and who owns what: views, placement, membership and leadership, kept in etcd.

Knows nothing of tensors, tables or the data plane. `ring`, `view` and `planner` are pure; `store` states the laws that
`etcd` and `memory` both keep; `membership` and `leader` are written against those laws alone.
"""
