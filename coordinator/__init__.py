"""Who is in the cluster and who owns which ranges: views, placement, membership and leadership, kept in etcd.

Knows nothing of tensors, tables or the data plane. The pure part is `core`: `ring` places ranges, `draft` has the rules
of the next view's chains, `repair` chooses the servers to fill, `balance` the ranges to move, to keep each load near
its `share`; `planner` decides with these and `reasons` says why, `dry_run` runs it ahead of time; `health` judges who
is gone, `patience` how long a leader waits, `lost_keys` what it puts back. `store` states the laws that `etcd` and
`memory` both keep; `membership`, `cluster_tracker`, `server_links` and `leader` are written against those laws alone.
"""

import os
import sys

# grpc reads these as it is imported, so they are set before any module here, or in elasticps, can import it. With its
# handling of forks a fifth of all children crashed, and more (1.85, while others wait in it, 60 forks each time).
# Failed connections are reported by us, with the endpoint, not by grpc's log on stderr.
GRPC_HANDLES_FORKS = "grpc" in sys.modules and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") != "0"
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
