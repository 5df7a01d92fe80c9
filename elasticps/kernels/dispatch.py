"""How compiled kernels call one another, so that a first start compiles each of them once.

A function that a compiled one calls is compiled by numba as if Python called it: with wrappers for Python and for C,
down to machine code, and again for each number that stands in a call; then all of that again into the caller. Here a
kernel that another one calls is made only as far as the caller needs it, its unoptimised text, and once for the types
of its arguments. Where it has a signature of its own, not even that: its callers call the machine code that is there.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
from llvmlite.binding import add_symbol
from numba.core import codegen, compiler, registry, types, typing
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock

log = logging.getLogger(__name__)

Types = tuple[Any, ...]

# Seen as untyped: numba has types for some of what it exports only.
_numba: Any = numba
_codegen: Any = codegen
_compiler: Any = compiler
_registry: Any = registry
_types: Any = types
_typing: Any = typing


def njit(*only: Any, signature: Types | None = None, cache: bool = False, **options: Any) -> Callable[[Any], Any]:
    """numba's, for kernels. `signature`: types of the arguments; compiled callers then share one machine code, which
    is not inlined, so a call of it costs nanoseconds. That is for kernels that take a batch.

    With `only`, signatures as numba takes them, or where the text is to be inlined, it is just numba's.
    """
    if only or options.get("inline") == "always":
        numbas: Callable[[Any], Any] = _numba.njit(*only, cache=cache, **options)
        return numbas

    def wrap(function: Any) -> Any:
        kernel = Kernel(function, targetoptions={"nopython": True, "no_cfunc_wrapper": True, **options})
        kernel.signature = signature
        if cache:
            kernel.enable_caching()
        return kernel

    return wrap


class _Text(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """What callers link: they optimise it together with their own, and make machine code of that."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is none


class _Nothing(_Text):
    """Of a kernel whose machine code is called: only that it must be there before the caller is."""

    def _get_module_for_linking(self) -> Any:
        return self._final_module


@dataclass(frozen=True)
class _Load:
    """What a caller does first that comes from the cache."""

    module: str
    name: str

    def __call__(self) -> None:
        getattr(importlib.import_module(self.module), self.name).load()


class _Cache(FunctionCache):
    """A kernel that cannot be kept, on a full disk or where nothing can be written, is used all the same."""

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]  # numba has no types
        except OSError as error:
            log.debug("cannot keep the kernel %s in %s: %s", self._name, self.cache_path, error)


class Kernel(_registry.CPUDispatcher):  # type: ignore[misc]
    """Python calls it like any other of numba's. Compiled code gets one version for the types of its arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.signature: Types | None = None
        self._made: dict[Types, tuple[Any, object]] = {}  # signature, and under which key numba finds how to call it

    def enable_caching(self) -> None:
        self._cache = _Cache(self.py_func)  # type: ignore[no-untyped-call]

    def load(self) -> Any:
        """Compiles, or loads from the cache, the version for the kernel's own signature, and makes it known."""
        with global_compiler_lock:
            if self.signature not in self.overloads:
                self.compile(self.signature)
            made = self.overloads[self.signature]
            add_symbol(self._symbol, made.library.get_pointer_to_function(made.fndesc.llvm_func_name))
            return made

    @property
    def _symbol(self) -> str:
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}"

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """For a caller that is compiled: how it calls this kernel with arguments of these types."""
        pysig, folded = self._compiler.fold_argument_types(args, kws)
        given = tuple(_types.unliteral(each) for each in folded)
        signature, _ = self._text(given) if self.signature is None else self._linked(self.signature)
        name = self.py_func.__name__
        template = _typing.make_concrete_template(f"CallTemplate({name})", key=name, signatures=[signature])
        return template, pysig, given, {}

    def get_overload(self, sig: Any) -> Any:
        made = self._made.get(tuple(sig))
        return super().get_overload(sig) if made is None else made[1]

    def _text(self, args: Types) -> tuple[Any, object]:
        with global_compiler_lock:
            if args not in self._made:
                flags = _compiler.Flags()
                self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
                flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
                library = _Text(self.targetctx.codegen(), self.py_func.__qualname__)
                made = _compiler.compile_extra(
                    self.typingctx, self.targetctx, self.py_func, args, None, flags, self.locals, library
                )
                self._keep(args, made, made.fndesc, library)
            return self._made[args]

    def _linked(self, args: Types) -> tuple[Any, object]:
        with global_compiler_lock:
            if args not in self._made:
                made = self.load()
                function = copy.copy(made.fndesc)
                function.mangled_name = self._symbol
                function.inline = False
                library = _Nothing(self.targetctx.codegen(), self._symbol)
                library._reload_init.add(_Load(self.py_func.__module__, self.py_func.__name__))
                self._keep(args, made, function, library)
            return self._made[args]

    def _keep(self, args: Types, made: Any, function: Any, library: _Text) -> None:
        key = object()
        self.targetctx.insert_user_function(key, function, [library])
        self._made[args] = made.signature, key
