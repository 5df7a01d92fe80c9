"""A digest of the code that stories play: stories of several runs can be counted together if it stays the same.

It is of all modules that a story imports, as Python reads them, so that comments, docstrings and line breaks do not
count, nor does what no story has to do with (command line, dashboard, torch). Asked for in a process of its own: only
there is nothing imported but that.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOTS = ("chaos", "coordinator", "elasticps", "replication")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest() -> str:
    """Returns the digest of the code as it stands on disk: 16 hexadecimal digits."""
    command = [sys.executable, "-c", f"from {__name__} import played; print(played())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def played() -> str:
    """Returns the digest, in a process that has imported nothing else of these packages."""
    import chaos.sim.run  # noqa: F401

    modules = {name: m.__file__ for name, m in list(sys.modules.items()) if name.partition(".")[0] in ROOTS}
    del modules[__name__]
    return of((name, Path(file).read_bytes()) for name, file in sorted(modules.items()) if file)


def of(modules: Iterable[tuple[str, bytes]]) -> str:
    """Returns the digest of modules, given their names and sources."""
    found = hashlib.sha256()
    for name, source in modules:
        found.update(f"{name}\n{ast.dump(_undocumented(ast.parse(source)))}\n".encode())
    return found.hexdigest()[:16]


def _undocumented(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree
