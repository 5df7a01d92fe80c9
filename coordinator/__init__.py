"""Who is in the cluster and who owns what: views, placement, membership and leadership, kept in etcd.

Knows nothing of tensors, tables or the data plane. Pure: `ring` places ranges, `draft` has the rules of the next view's
chains, `repair` chooses whom to fill, `balance` what moves to keep loads near their `share`, `planner` decides with
these and `wording` says why, `forecast` runs it ahead, `health` says who is gone, `pace` when. `store` states the laws
that `etcd` and `memory` both keep; `membership`, `world`, `lines` and `leader` are written against those laws alone.
"""
