"""Limits that keep the code easy to read: the field's names, small files and classes, no folders in a circle.

Exceptions stand here with their reasons.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_GIVEN_UP = """
told anew lane lanes young vouch vouches vouched treatment treatments world worlds wording forecast
keeper keepers herald hearsay kept shelf standstill linger crowd crowded heavy lives news office grace
places duty tidying tidy leftovers upkeep said asked wanted behind ahead unsent proven presence screening
subject subjects uses moments knobs knob hoard onlooker
"""
GIVEN_UP = set(_GIVEN_UP.split())
"""Words that say little, of which code made names once. docs/reference/glossary.md has those that it uses instead."""

FIELD_TERMS = {
    ("elasticps/security/authority.py", "subject"): "of an X.509 certificate",
    ("elasticps/torch/__init__.py", "ahead"): "public: `Ahead`, which `prefetch(loader, model, ahead=…)` gives",
    ("elasticps/torch/lookahead.py", "ahead"): "the same",
    ("elasticps/torch/group/rendezvous.py", "world"): "torch.distributed's world size",
    ("elasticps/huggingface.py", "world"): "the same",
    ("elasticps/lightning.py", "world"): "the same",
    ("benchmarks/training.py", "world"): "the same",
    ("elasticps/ray/train.py", "world"): "Ray Train's name for all workers",
    ("elasticps/client/tables.py", "ahead"): "public: `fetch(keys, ahead=…)`",
    ("elasticps/client/cache_batches.py", "asked"): "public: `CacheUse.asked`",
    ("elasticps/client/row_cache.py", "asked"): "the same",
    ("elasticps/metrics/client.py", "asked"): "the same",
    ("elasticps/client/table_stats.py", "asked"): "the same",
    ("elasticps/doctor/gather.py", "subject"): "of an X.509 certificate",
    ("elasticps/security/credentials.py", "subject"): "of an X.509 certificate",
    ("elasticps/security/session.py", "subject"): "the same",
    ("elasticps/security/openssl.py", "ahead"): "OpenSSL's name for reading more than a record",
    ("coordinator/core/patience.py", "grace"): "the time that a lease lasts beyond its owner's silence",
    ("coordinator/leader.py", "grace"): "the same",
    ("tests/coordinator/test_absent_workers.py", "grace"): "`LeaseGrace`",
    ("tests/e2e/test_caches.py", "asked"): "public: `CacheUse.asked`",
    ("tests/security/test_credentials.py", "subject"): "of an X.509 certificate",
    ("tests/server/test_compiled_sockets.py", "linger"): "the socket option SO_LINGER",
    ("tests/torch/test_lookahead.py", "ahead"): "the argument of `prefetch`",
    ("tests/torch/test_backward_passes.py", "world"): "torch.distributed's world size",
    ("tests/torch/group/rank_process.py", "world"): "torch.distributed's world size",
}
FORMATS = {
    ("chaos/live/kubernetes.py", "grace"): "Kubernetes' own grace period of a pod",
    ("tests/chaos/test_kubernetes.py", "grace"): "the same",
    ("chaos/sim/story.py", "proven"): "stored by `elasticps sim --record`, and the option `--proven`",
    ("chaos/sim/run.py", "proven"): "the same",
    ("chaos/sim/cli.py", "proven"): "the same",
    ("chaos/sim/cluster.py", "proven"): "the same",
}
PROTOBUF = {"told", "kept", "anew", "asked", "wanted"}
"""Fields of admin.proto, which are what they are until its version changes."""
_ADMIN = (
    "elasticps/admin/",
    "elasticps/cli/",
    "elasticps/checkpoint/range_recovery.py",
    "tests/admin/",
    "tests/dashboard/",
)

PUBLIC = {
    ("elasticps/local/cluster.py", "LocalCluster"),
    ("elasticps/ray/cluster.py", "Cluster"),
    ("elasticps/torch/embedding.py", "EmbeddingBag"),
    ("elasticps/torch/embedding.py", "TableLayer"),
    ("elasticps/torch/optimizer.py", "Optimizer"),
    ("replication/effects.py", "Push"),
}
"""Constructors whose parameters are the options that users (or, of `Push`, a frame) have."""
MOST_LINES = 500
SENTENCE = 4  # underscores: names of tests and of planted bugs are sentences, in which any word may stand
MOST_ATTRIBUTES = 15
MOST_PARAMETERS = 8


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _names(node: ast.AST) -> Iterator[str]:
    """The identifiers of a node."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg
    elif isinstance(node, ast.alias):
        yield from (node.name.rpartition(".")[2], node.asname or "")


def _attributes(node: ast.ClassDef, lines: list[str]) -> tuple[int, list[str]]:
    """The number of a class's attributes, and those with neither a comment nor a place in its docstring."""
    found: dict[str, int] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = each.lineno
    for inner in ast.walk(node):
        ours = isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
        if ours and isinstance(inner.ctx, ast.Store):  # type: ignore[attr-defined]
            found.setdefault(inner.attr, inner.lineno)  # type: ignore[attr-defined]
    text = ast.get_docstring(node) or ""
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}  # of properties that are set

    def described(name: str, line: int) -> bool:
        below = lines[line] if line < len(lines) else ""
        above = lines[line - 2].strip()
        in_docstring = re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)
        return "#" in lines[line - 1] or '"""' in below or above.startswith("#") or in_docstring is not None

    bare = [name for name, line in found.items() if name not in methods and not described(name, line)]
    return len(found), bare


def _parameters(method: ast.FunctionDef) -> int:
    return len(method.args.args) + len(method.args.kwonlyargs) - 1


def found() -> dict[str, list[str]]:
    """Everything that exceeds the limits, by file."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    files = [name for name in listed if "_pb2" not in name and (ROOT / name).exists()]
    modules = {_module(name): name for name in files if not name.startswith("tests/")}
    exceptions = FIELD_TERMS.keys() | FORMATS.keys()
    problems: dict[str, set[str]] = defaultdict(set)
    classes: dict[tuple[str, str], list[str]] = defaultdict(list)
    imports: dict[str, set[str]] = defaultdict(set)
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        nodes, lines = list(ast.walk(ast.parse(text))), text.split("\n")
        if len(lines) - 1 > MOST_LINES:
            problems[name].add("lines")
        used = Counter(each for node in nodes for each in _names(node))
        used[Path(name).stem if not Path(name).stem.startswith("test_") else ""] += 1
        for identifier in used:
            if name.startswith("tests/") and identifier.count("_") >= SENTENCE:
                continue
            for word in GIVEN_UP.intersection(_words(identifier)):
                if word in PROTOBUF and name.startswith(_ADMIN):
                    continue
                if (name, word) not in exceptions:
                    problems[name].add(identifier)
        if name.startswith("tests/"):
            continue
        module = _module(name)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                classes[module.split(".")[0], node.name].append(name)
                count, bare = _attributes(node, lines)
                if count > MOST_ATTRIBUTES and bare:
                    problems[name].add(f"class {node.name}: attributes")
                for each in node.body:
                    if (
                        isinstance(each, ast.FunctionDef)
                        and each.name == "__init__"
                        and _parameters(each) > MOST_PARAMETERS
                        and (name, node.name) not in PUBLIC
                    ):
                        problems[name].add(f"class {node.name}: parameters")
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    target = whole if whole in modules else node.module
                    if target in modules and _folder(target, modules) != _folder(module, modules):
                        imports[_folder(module, modules)].add(_folder(target, modules))
    for (_, class_name), where in classes.items():
        for name in where if len(where) > 1 else []:
            problems[name].add(f"class {class_name}: name used twice")
    for folder, targets in imports.items():
        for target in targets:
            if folder < target and folder in imports.get(target, ()):
                problems["folders"].add(f"{folder} and {target} import each other")
    return {name: sorted(problems[name]) for name in sorted(problems)}


def _module(name: str) -> str:
    return name[:-3].replace("/", ".").removesuffix(".__init__")


def _folder(module: str, modules: dict[str, str]) -> str:
    """The folder of a module. Of `elasticps` itself each module stands alone: what is public, errors, and commands."""
    if module.count(".") <= 1 and module.startswith("elasticps") and not modules[module].endswith("/__init__.py"):
        return module
    if module == "elasticps":
        return "elasticps/__init__"
    return module if modules[module].endswith("__init__.py") else module.rpartition(".")[0]


def test_files_classes_and_names_keep_the_limits() -> None:
    assert not found()


def test_paths_that_the_internals_name_exist() -> None:
    roots = ["", "elasticps/", "coordinator/", "replication/"]
    lost = []
    for page in [*sorted((ROOT / "docs/internals").glob("*.md")), ROOT / "CONTRIBUTING.md"]:
        paths = set(re.findall(r"`((?:[\w]+/)+[\w]+\.py)\b", page.read_text(encoding="utf-8")))
        lost += [f"{page.name}: {path}" for path in paths if not any((ROOT / root / path).exists() for root in roots)]
    assert not lost
