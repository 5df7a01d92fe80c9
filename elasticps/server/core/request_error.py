"""How a server says no."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A request that this server will not do: a code for programs, a sentence for people."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.document: dict[str, Any] = {"code": code, "message": message} | more
