"""Estimates what a story costs without playing it, so that tests play cheap ones first."""

from __future__ import annotations

from chaos.sim.programs import HURRY_S, MOST_BESIDE
from chaos.sim.story import App, Story

PER_SERVER_AND_RANGE_S = 150.0
PER_OPERATION = {"free": 120.0, "bounded": 120.0, "tables": 120.0, "growing": 120.0, "rounds": 200.0}
PER_SHARD_AND_WORKER = 300.0
PER_PULL_BESIDE = 25.0
SHARDS = 60.0
SERVED_S = 0.005
"""What an operation takes beside its worker's thinking."""


def expected_events(story: Story) -> float:
    """Estimates a story's events, mostly within a factor of two: fitted to sixty that were played. An event costs 15 to
    35 µs of CPU time."""
    quiet = PER_SERVER_AND_RANGE_S * story.training_s * story.servers * story.ranges
    return quiet + sum(_events_of(app, story) for app in story.apps)


def _events_of(app: App, story: Story) -> float:
    """Estimates the events of one application's workers."""
    if app.kind not in PER_OPERATION:
        return PER_SHARD_AND_WORKER * SHARDS * app.workers
    operation_s = app.think_s + SERVED_S + 4 * story.weather.latency_s
    operations = PER_OPERATION[app.kind] * story.training_s / operation_s
    pulls = app.readers * min(MOST_BESIDE, story.training_s / HURRY_S) * (2 if app.large else 1)
    return app.workers * (operations + (PER_PULL_BESIDE * pulls if app.kind in ("free", "bounded") else 0))
