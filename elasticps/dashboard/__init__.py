"""A web page that shows a cluster live: `elasticps dashboard`, `elasticps up --dashboard`.

store, servers ──poller──▶ events ──model──▶ snapshot and news ──fanout──▶ viewers, each over server-sent events

`model`, `timeline`, `ring` and `history` are pure: events and times in, plain values out. There is one poller, whatever
the number of viewers: no server does anything for a viewer.
"""
