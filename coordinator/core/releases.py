"""Which releases of etcd will do."""

from __future__ import annotations

import re

OLDEST = (3, 4)  # Debian 12's, 3.4.23, was tried


def warning(release: str) -> str:
    """What is to be said about a release such as "3.5.9"; "" if nothing, or if it is not known which one it is."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if found is None:
        return ""
    major, minor, patch = (int(number or 0) for number in found.groups())
    if (major, minor) < OLDEST:
        return f"etcd {release} is older than any that was tried: take 3.4, or better 3.5.3 or later"
    if (major, minor) == (3, 5) and patch <= 2:
        return (
            f"etcd {release} may corrupt its data when it is killed under load, and its makers advise against it: it "
            "will do for trying out; else take etcd 3.5.3 or later"
        )
    return ""
