"""A server as a client sees it: its link, its troubles, its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.view import ServerInfo
from elasticps.client.transport import Link
from elasticps.errors import ServerError, ServerFull, SpecError, Timeout, UnknownTable
from replication.chain import Member

RETRY_FIRST_S = 0.01


@dataclass(eq=False)
class Peer:
    """A server as this client sees it."""

    info: ServerInfo
    member: Member
    link: Link
    retry_at_s: float = 0.0
    retry_in_s: float = RETRY_FIRST_S
    hello_at_s: float = 0.0
    down_since_s: float | None = None
    trouble: str = "not connected yet"


def server_error(document: Mapping[str, Any], server: str) -> Exception:
    """What a refusal is raised as."""
    code, text = document.get("code"), str(document.get("message"))
    if code == "spec":
        return SpecError(text)
    if code == "unknown-table":
        return UnknownTable(text)
    if code == "behind":
        return Timeout(text)
    if code == "memory":
        return ServerFull(text, str(document.get("server")), str(document.get("table")), int(document.get("bytes", 0)))
    return ServerError(f"server {server} refused: {text}")
