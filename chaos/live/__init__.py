"""Real processes under load, killed, frozen and cut off by a plan; then every value is checked.

plan      what happens when, from YAML         targets    whom a fault hits
stage     the cluster, its hosts and network   kubernetes the same, of pods
netns     network namespaces                   proxy      delays and losses without them
nemesis   carries out the plan                 load       workers that train meanwhile
runner    a run from beginning to end          figures, report, screen: what people see of it
"""
