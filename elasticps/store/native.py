"""What numba lacks for fast kernels: raw loads and stores, prefetch, and arrays over an address.

Kernels get one table's state as an int64 array, the header, whose fields are numbered here. Addresses and capacities
travel in it, because a call costs about 0.2 µs for each array argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic
from numba.np import arrayobj

from elasticps.kernels import njit

Function = TypeVar("Function")

# Seen as untyped: a caller passes no typing context, whatever the definition says.
intrinsic: Callable[[Callable[..., Any]], Any] = _intrinsic
_arrays: Any = arrayobj
_types: Any = types
_compile: Any = njit(nogil=True, cache=True, error_model="numpy")
_compile_forced: Any = njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
_compile_inline: Any = njit(nogil=True, cache=True, error_model="numpy", inline="always")

# Fields of a table's header, int64 [HEADER_SIZE].
(
    H_DESCRIPTORS,  # address of the descriptors of ranges with rows, a `range_map.RangeMap`: see D_…
    H_LAST,  # its capacity less one
    H_STAMPS,  # address of int64 [ranges]: the stamp of rows of a range that change now
    H_SALT,
    H_SHIFT,
    H_DIM,
    H_STRIDE,  # bytes of a row: weights, slots, zeros up to a multiple of 8
    H_SLOTS_AT,  # byte in the row where slots start
    H_SLOT_FLOATS,
    H_DTYPE,  # index into spec.DTYPES
    H_INIT,  # see values.INIT_KINDS
    H_SEED,
    H_INIT_VALUES,  # address of float64 [4]
    H_CONSTANTS,  # address of float32 [1 + n]: the slots' first value, then the optimizer's constants
    H_CONSTANT_COUNT,
    H_SCRATCH,  # address of float32 [dim]: a 2-byte row as float32, while it is updated
    H_FREE,  # first of the rows given back, each holding the address of the next; 0 = none
    H_LOW,  # the slab that is being emptied, from here up to H_HIGH; 0 = none
    H_HIGH,
    H_ASIDE,  # first of its rows that are given back
    H_UNSWEPT,  # first of those that may be its rows, or others
    H_NEXT,  # unused part of the newest slab
    H_END,
    H_ROWS,
    H_NEED,  # what a kernel that stopped early asks for: a range whose segment must grow, or NEED_SLAB
    H_FINITE,  # 1: gradients are refused that are not all finite
    H_STAMP,  # newest stamp of any range, where it stands in an index entry
    H_STALE,  # of the keys that were looked up last: 0 if all have a row with that stamp, else how many they are
    H_RETAINED,  # 1 while rows are kept for a checkpoint, of ranges with D_RETAINED
    H_RETAINED_SHIFT,  # right shift that turns a hash into its part, an interval of a range
    H_CURSOR,  # the parts before it have been written
    H_RETAINED_FREE,  # first of the records given back, each holding the address of the next; 0 = none
    H_RETAINED_NEXT,  # unused part of the newest block of records
    H_RETAINED_END,
    H_RETAINED_ROOM,  # records that can be had
    H_USAGE_AT,  # byte in the row where its usage starts: last use, count, and a score; 0 if rows keep none
    H_USAGE_FLOATS,  # 2, or 3 with a score
    H_TIMES,  # address of int64 [ranges]: cluster time of a range in seconds
    H_POLICIES,  # address of the policies of ranges, a `range_map.RangeMap`: see P_…
    H_POLICIES_LAST,  # its capacity less one
    H_ADMITS,  # 1 if keys without a row may have to wait for one
    H_WAITING,  # address of the header of the keys that wait: their index, in fields of the same numbers
    H_SPARE,  # address of a row of no key: pushes of keys that wait change it in place of a row of theirs
    HEADER_SIZE,
) = range(44)
NEED_SLAB = -1

# Of a range whose policies are others than its table's, or in which something is counted: its number; the bits of a
# float64, the share of a half-life in a second, 0 if counts never fall; the number of the admission policy, see
# `admission`, and the bits of its threshold; a word that stands for all policies, see `policies.word_of`; keys that the
# policy has given a row; what was evicted, by reason; the address of its sketch, 0 for none, and bytes of a block of
# that; 1 once there was a row, or a key that waits for one.
P_RANGE, P_DECAY, P_ADMISSION, P_THRESHOLD, P_WORD, P_ADMITTED, P_EVICTED = range(7)
P_SKETCH, P_WIDTH, P_COUNTED, POLICY = 11, 12, 13, 14

# Of a range with rows: its number, where its index segment lies, its capacity, its rows, and the address of what is
# kept aside of it, 0 if nothing is: the stamp from which on rows are, before they change, then the newest record of
# each of its parts, 0 = none.
D_RANGE, D_SEGMENT, D_CAPACITY, D_COUNT, D_RETAINED, DESCRIPTOR = 0, 1, 2, 3, 4, 5
MAX_STAMP = (1 << 15) - 1
STAMP_BIT = 48  # of an index entry's second word; the row's address is below, the highest bit is 0
ADDRESS = (1 << STAMP_BIT) - 1

# Keys and floats may be read-only and unaligned, as slices of a received frame are.
INT = types.int64
WORDS = types.Array(types.int64, 1, "C")
FLOATS_OUT = types.Array(types.float32, 1, "C")
KEYS = types.Array(types.int64, 1, "C", readonly=True, aligned=False)
FLOATS = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
MATRIX = types.Array(types.float32, 2, "C", readonly=True, aligned=False)

copy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
"""Copies bytes: to, from, how many."""


def kernel(function: Function) -> Function:
    """A compiled function that is bitwise deterministic on any CPU.

    No fastmath: LLVM then neither reorders nor contracts to fused multiply-add. numpy's error model: x / 0 is inf.
    """
    return cast(Function, _compile(function))


def linked(*signature: Any) -> Callable[[Function], Function]:
    """A kernel that is compiled once, for arguments of these types: other kernels call that. For those that take a
    batch, and that several kernels call."""

    def wrap(function: Function) -> Function:
        return cast(Function, njit(nogil=True, cache=True, error_model="numpy", signature=signature)(function))

    return wrap


def signature_of(kernel: Any) -> tuple[Any, ...]:
    """What a `linked` kernel takes."""
    found: tuple[Any, ...] = kernel.signature
    return found


def inlined(function: Function) -> Function:
    """A kernel that LLVM must inline: the call would cost more than its body on one row."""
    return cast(Function, _compile_forced(function))


def template(function: Function) -> Function:
    """A kernel that takes functions: its text is inlined, for passing a function to a call defeats the cache."""
    return cast(Function, _compile_inline(function))


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Address as a void pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _pointer(builder, arguments[0], 8)

    return types.voidptr(types.int64), generate


@intrinsic
def carray(typing: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """An array of a shape, a tuple, over a pointer. numba's own asks more, and takes a compiler longer."""
    array, number = types.Array(dtype.dtype, len(shape), "C"), len(shape)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = _arrays.make_array(array)(context, builder)
        item = context.get_abi_sizeof(context.get_data_type(dtype.dtype))
        lengths = [builder.extract_value(arguments[1], i) for i in range(number)]
        strides = [context.get_constant(types.intp, item)]
        for length in lengths[:0:-1]:
            strides.insert(0, builder.mul(length, strides[0]))
        data = builder.bitcast(arguments[0], made.data.type)
        itemsize = context.get_constant(types.intp, item)
        _arrays.populate_array(made, data=data, shape=lengths, strides=strides, itemsize=itemsize, meminfo=None)
        return made._getvalue()

    return array(address, _types.UniTuple(types.intp, number), dtype), generate


@intrinsic
def load64(typing: Any, address: Any) -> Any:
    """The int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0], 64), align=8)

    return types.int64(types.int64), generate


@intrinsic
def store64(typing: Any, address: Any, value: Any) -> Any:
    """Writes an int64 to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0], 64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def float64_bits(typing: Any, value: Any) -> Any:
    """The bits of a float64, as int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def float64_from_bits(typing: Any, bits: Any) -> Any:
    """The float64 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def float32_bits(typing: Any, value: Any) -> Any:
    """The bits of a float32, as a non-negative int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.bitcast(arguments[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), generate


@intrinsic
def float32_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are the low 32 of an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def float32_from_half(typing: Any, bits: Any) -> Any:
    """The value, exactly, of the float16 whose bits are the low 16 of an int64. No branch, and all in 32 bits: a loop
    then takes as many at a time as registers hold. Right where subnormal float32 count as zero, too."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, real = ir.IntType(32), ir.FloatType()
        low = builder.trunc(arguments[0], word)
        sign = builder.shl(builder.and_(low, word(0x8000)), word(16))
        magnitude = builder.shl(builder.and_(low, word(0x7FFF)), word(13))
        # subnormal: 2^-14 + value - 2^-14
        shifted = builder.bitcast(builder.add(magnitude, word(0x38800000)), real)
        subnormal = builder.bitcast(builder.fsub(shifted, builder.bitcast(word(0x38800000), real)), word)
        finite = builder.select(
            builder.icmp_unsigned("<", magnitude, word(0x00800000)), subnormal, builder.add(magnitude, word(0x38000000))
        )
        none_or_infinite = builder.or_(magnitude, word(0x7F800000))
        found = builder.select(builder.icmp_unsigned("<", magnitude, word(0x0F800000)), finite, none_or_infinite)
        return builder.bitcast(builder.or_(found, sign), real)

    return types.float32(types.int64), generate


@intrinsic
def settled(typing: Any, value: Any) -> Any:
    """A float32; of those that are not a number always the same one, for the reason that `values.canonical` gives. In a
    loop that computes it, while it is in a register."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        magnitude = builder.and_(bits, ir.Constant(word, 0x7FFFFFFF))
        no_number = builder.icmp_unsigned(">", magnitude, ir.Constant(word, 0x7F800000))
        return builder.bitcast(builder.select(no_number, ir.Constant(word, 0x7FC00000), bits), ir.FloatType())

    return types.float32(types.float32), generate


def _prefetch(builder: Any, address: Any, write: int) -> None:
    byte, word = ir.IntType(8), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
    function = builder.module.globals.get("llvm.prefetch.p0")
    if function is None:
        function = ir.Function(builder.module, signature, "llvm.prefetch.p0")
    keep_in_all_caches, data = 3, 1
    builder.call(
        function,
        [
            _pointer(builder, address, 8),
            ir.Constant(word, write),
            ir.Constant(word, keep_in_all_caches),
            ir.Constant(word, data),
        ],
    )


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Starts to load the cache line at an address; any address is allowed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0], 0)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def prefetch_write(typing: Any, address: Any) -> Any:
    """Like `prefetch`, for a line that will be written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate
