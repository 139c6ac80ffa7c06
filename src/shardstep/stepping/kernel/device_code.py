"""The kernels, in Triton.

`prepare` is one small launch over the pieces: it advances the step counts and works out, in float64, what the elements
of a piece have in common. `step_blocks` is one pass over the elements, a block of them for each program.

[Note: two launches] All programs of a piece read its step count, and one of them would have to advance it after the
last has read it; none can know when that is. So it is advanced before, by a launch of a few microseconds.

[Note: vectors] Memory is read sixteen bytes at a time only where Triton knows that addresses are multiples of that, and
that none of the elements in them is masked. An address from a table tells it nothing, so `ALIGNED` says so
(`tl.multiple_of`; for a pointer it counts bytes), and blocks that lie inside their piece are not masked at all.

[Note: latency] A load behind a store, or behind the first use of another, waits for it: the compiler cannot know that
they are not the same memory. So each block asks for all of its memory at once.

[Note: rounding] Operations and their order are those of torch's optimizers without fused. Where torch's kernels on a
GPU round a product and a sum once (`add` with alpha, `lerp`, `addcmul`, `addcdiv`), this says `fma`; roots and
quotients are rounded to the nearest, as theirs are. What is left: the compiler may round a root times its correction
plus eps once where torch rounds twice, scale and clip factor are one number, and fused kernels divide where others
multiply by the reciprocal. So in a step, both from the same numbers, a weight should differ by no more than one
rounding of its own, 2^-23 of it, and eight of what is added, 2^-20 of the largest addend of its tensor; it is
"largest" because moments may cancel out. test_kernel.py holds the kernel to that; it is not proved. Lion has a
sign in it: where its two terms cancel to the last bit it may go the other way, by twice the rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardstep.stepping.kernel import rules, stochastic, table

ADAM: tl.constexpr = tl.constexpr(int(rules.Rule.ADAM))
SGD: tl.constexpr = tl.constexpr(int(rules.Rule.SGD))
# Columns of the three tables.
VALUES: tl.constexpr = tl.constexpr(table.VALUES)
MASTER: tl.constexpr = tl.constexpr(table.MASTER)
FIRST: tl.constexpr = tl.constexpr(table.FIRST)
SECOND: tl.constexpr = tl.constexpr(table.SECOND)
LARGEST: tl.constexpr = tl.constexpr(table.LARGEST)
STEP: tl.constexpr = tl.constexpr(table.STEP)
NUMEL: tl.constexpr = tl.constexpr(table.NUMEL)
GROUP: tl.constexpr = tl.constexpr(table.GROUP)
PARAM: tl.constexpr = tl.constexpr(table.PARAM)
START: tl.constexpr = tl.constexpr(table.START)
ROW: tl.constexpr = tl.constexpr(table.ROW)

LR: tl.constexpr = tl.constexpr(rules.LR)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(rules.WEIGHT_DECAY)
BETA1: tl.constexpr = tl.constexpr(rules.BETA1)
BETA2: tl.constexpr = tl.constexpr(rules.BETA2)
EPS: tl.constexpr = tl.constexpr(rules.EPS)
MOMENTUM: tl.constexpr = tl.constexpr(rules.MOMENTUM)
DAMPENING: tl.constexpr = tl.constexpr(rules.DAMPENING)
SIGN: tl.constexpr = tl.constexpr(rules.SIGN)
DECOUPLED: tl.constexpr = tl.constexpr(rules.DECOUPLED)
SCALARS: tl.constexpr = tl.constexpr(rules.SCALARS)

# What a piece's elements have in common. KEEP and TAKE are the weights of the old and of the new in a moment.
STEPPED: tl.constexpr = tl.constexpr(0)
GRADIENT: tl.constexpr = tl.constexpr(1)
DECAY: tl.constexpr = tl.constexpr(2)
KEEP1: tl.constexpr = tl.constexpr(3)
TAKE1: tl.constexpr = tl.constexpr(4)
KEEP2: tl.constexpr = tl.constexpr(5)
TAKE2: tl.constexpr = tl.constexpr(6)
RATE: tl.constexpr = tl.constexpr(7)
ROOT: tl.constexpr = tl.constexpr(8)
TINY: tl.constexpr = tl.constexpr(9)
COMMON: tl.constexpr = tl.constexpr(table.COMMON)

MULTIPLIER1: tl.constexpr = tl.constexpr(stochastic.MULTIPLIERS[0])
MULTIPLIER2: tl.constexpr = tl.constexpr(stochastic.MULTIPLIERS[1])
SALT1: tl.constexpr = tl.constexpr(stochastic.SALTS[0])
SALT2: tl.constexpr = tl.constexpr(stochastic.SALTS[1])


# -- noise: the same as stochastic.py's --------------------------------------------------------------------------------


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 15)) * MULTIPLIER1
    bits = (bits ^ (bits >> 12)) * MULTIPLIER2
    return bits ^ (bits >> 15)


@triton.jit
def _key(salt, seed, step, param):
    key = _mix(salt ^ seed.to(tl.uint32))
    key = _mix(key + (seed >> 32).to(tl.uint32))
    key = _mix(key + step.to(tl.int32).to(tl.uint32))
    return _mix(key + param.to(tl.uint32))


@triton.jit
def _by_chance(values, index, key1, key2):
    """In bfloat16; `index` are the elements' places in their parameter."""
    noise = _mix(_mix(index.to(tl.uint32) + key1) ^ ((index >> 32).to(tl.uint32) + key2)) >> 16
    bits = values.to(tl.uint32, bitcast=True)
    rounded = ((bits + noise) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, values.to(tl.bfloat16))


# -- once for a piece --------------------------------------------------------------------------------------------------


@triton.jit
def _power(base, exponent):
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def _put(common, at, inside, column: tl.constexpr, values):
    tl.store(common + at * COMMON + column, values.to(tl.float32), mask=inside)


@triton.jit(
    do_not_specialize=["seed", "count"],
    do_not_specialize_on_alignment=["grad_scale", "clip", "found_inf"],
)
def prepare(
    rows, gradients, scalars, common, keys, grad_scale, clip, found_inf, seed, count,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Every piece that has a gradient is a step further, if all gradients are finite; what `STEPPED` and so on name."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = at < count
    row = rows + at * ROW
    found = tl.full([LANES], 0.0, tl.float32) + tl.load(found_inf).to(tl.float32)
    # It may be a sum over ranks, or not a number.
    stepped = inside & (tl.load(gradients + at, mask=inside, other=0) != 0) & (found == 0)
    counter = tl.load(row + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(counter, mask=stepped, other=0.0) + 1.0
    tl.store(counter, step, mask=stepped)
    _put(common, at, inside, STEPPED, stepped)

    group = scalars + tl.load(row + GROUP, mask=inside, other=0) * SCALARS
    lr = tl.load(group + LR)
    decay = tl.load(group + WEIGHT_DECAY)
    factor = tl.load(group + SIGN) * tl.load(clip).to(tl.float64) / tl.load(grad_scale).to(tl.float64)
    _put(common, at, inside, GRADIENT, factor)
    _put(common, at, inside, DECAY, tl.where(tl.load(group + DECOUPLED) != 0, 1.0 - lr * decay, decay))
    if RULE == SGD:
        first = step == 1.0  # the buffer is not there yet: it becomes the gradient
        momentum = tl.load(group + MOMENTUM)
        _put(common, at, inside, KEEP1, tl.where(first, 0.0, momentum))
        _put(common, at, inside, TAKE1, tl.where(first, 1.0, 1.0 - tl.load(group + DAMPENING)))
        _put(common, at, inside, TAKE2, momentum)
        _put(common, at, inside, RATE, -lr)
    else:
        beta1, beta2 = tl.load(group + BETA1), tl.load(group + BETA2)
        _put(common, at, inside, KEEP1, beta1)
        _put(common, at, inside, TAKE1, 1.0 - beta1)
        _put(common, at, inside, KEEP2, beta2)
        _put(common, at, inside, TAKE2, 1.0 - beta2)
        if RULE == ADAM:
            passed = step.to(tl.float64)
            _put(common, at, inside, RATE, -lr / (1.0 - _power(beta1, passed)))
            # torch takes the reciprocal of the rounded root, and multiplies.
            root = tl.sqrt(1.0 - _power(beta2, passed)).to(tl.float32)
            _put(common, at, inside, ROOT, tl.div_rn(tl.full([LANES], 1.0, tl.float32), root))
            _put(common, at, inside, TINY, tl.load(group + EPS))
        else:
            _put(common, at, inside, RATE, -lr)
    if STOCHASTIC:
        seeds = tl.full([LANES], 0, tl.int64) + seed
        param = tl.load(row + PARAM, mask=inside, other=0)
        salt = tl.full([LANES], 0, tl.uint32)
        tl.store(keys + at * 2, _key(salt + SALT1, seeds, step, param).to(tl.int32, bitcast=True), mask=inside)
        tl.store(keys + at * 2 + 1, _key(salt + SALT2, seeds, step, param).to(tl.int32, bitcast=True), mask=inside)


# -- once for every element --------------------------------------------------------------------------------------------


@triton.jit
def _at(row, column: tl.constexpr, start, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the block begins in the tensor that a column of the table names."""
    pointer = tl.load(row + column).to(tl.pointer_type(kind))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _read(pointer, lanes, inside, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(pointer + lanes, mask=inside, other=0.0)
    else:
        values = tl.load(pointer + lanes)
    return values.to(tl.float32)


@triton.jit
def _write(pointer, lanes, values, inside, MASKED: tl.constexpr):
    """Rounded to the nearest, where the tensor has fewer bits."""
    rounded = values.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + lanes, rounded, mask=inside)
    else:
        tl.store(pointer + lanes, rounded)


@triton.jit
def _lerp(old, new, keep, take):
    """As torch's: from the nearer end."""
    return tl.where(take < 0.5, tl.fma(take, new - old, old), tl.fma(-keep, new - old, new))


@triton.jit
def _adam(weights, gradient, first, second, largest, shared, AMSGRAD: tl.constexpr):
    rate, root, tiny = tl.load(shared + RATE), tl.load(shared + ROOT), tl.load(shared + TINY)
    first = _lerp(first, gradient, tl.load(shared + KEEP1), tl.load(shared + TAKE1))
    second = tl.fma(tl.load(shared + TAKE2) * gradient, gradient, second * tl.load(shared + KEEP2))
    if AMSGRAD:
        largest = tl.maximum(largest, second, propagate_nan=tl.PropagateNan.ALL)
        denominator = tl.sqrt_rn(largest) * root + tiny
    else:
        denominator = tl.sqrt_rn(second) * root + tiny
    return tl.fma(rate, tl.div_rn(first, denominator), weights), first, second, largest


@triton.jit
def _sgd(weights, gradient, first, shared, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    rate = tl.load(shared + RATE)
    if HAS_MOMENTUM:
        first = tl.fma(gradient, tl.load(shared + TAKE1), first * tl.load(shared + KEEP1))
        if NESTEROV:
            gradient = tl.fma(first, tl.load(shared + TAKE2), gradient)
        else:
            gradient = first
    return tl.fma(gradient, rate, weights), first


@triton.jit
def _lion(weights, gradient, first, shared):
    way = tl.fma(gradient, tl.load(shared + TAKE1), first * tl.load(shared + KEEP1))
    # What is not a number has no sign: it stays what it is.
    sign = tl.where(way > 0, 1.0, tl.where(way < 0, -1.0, way))
    first = tl.fma(gradient, tl.load(shared + TAKE2), first * tl.load(shared + KEEP2))
    return tl.fma(sign, tl.load(shared + RATE), weights), first


@triton.jit
def _step_block(
    row, gradient_address, shared, key, start, numel,
    RULE: tl.constexpr, VALUE: tl.constexpr, GRADIENTS: tl.constexpr, MOMENT: tl.constexpr, HAS_MASTER: tl.constexpr,
    IS_DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All that is read is asked for before anything is done with it, and written at the end: see [Note: latency]."""
    HAS_FIRST: tl.constexpr = RULE != SGD or HAS_MOMENTUM
    lanes = tl.arange(0, BLOCK)
    inside = lanes < numel - start
    values_at = _at(row, VALUES, start, VALUE, ALIGNED)
    weights_at = values_at
    if HAS_MASTER:
        weights_at = _at(row, MASTER, start, tl.float32, ALIGNED)
    gradient = _read(_at(gradient_address, 0, start, GRADIENTS, ALIGNED), lanes, inside, MASKED)
    weights = _read(weights_at, lanes, inside, MASKED)
    first, second, largest = weights, weights, weights  # those that the rule does not have stay unused
    if HAS_FIRST:
        first_at = _at(row, FIRST, start, MOMENT, ALIGNED)
        first = _read(first_at, lanes, inside, MASKED)
    if RULE == ADAM:
        second_at = _at(row, SECOND, start, MOMENT, ALIGNED)
        second = _read(second_at, lanes, inside, MASKED)
    if AMSGRAD:
        largest_at = _at(row, LARGEST, start, MOMENT, ALIGNED)
        largest = _read(largest_at, lanes, inside, MASKED)

    gradient = gradient * tl.load(shared + GRADIENT)
    decay = tl.load(shared + DECAY)
    if IS_DECOUPLED:
        weights = weights * decay
    else:
        gradient = tl.fma(weights, decay, gradient)
    if RULE == ADAM:
        weights, first, second, largest = _adam(weights, gradient, first, second, largest, shared, AMSGRAD)
    elif RULE == SGD:
        weights, first = _sgd(weights, gradient, first, shared, HAS_MOMENTUM, NESTEROV)
    else:
        weights, first = _lion(weights, gradient, first, shared)

    if STOCHASTIC:
        index = tl.load(row + START) + start + lanes
        key1, key2 = tl.load(key).to(tl.uint32, bitcast=True), tl.load(key + 1).to(tl.uint32, bitcast=True)
        _write(values_at, lanes, _by_chance(weights, index, key1, key2), inside, MASKED)
    else:
        _write(values_at, lanes, weights, inside, MASKED)
    if HAS_MASTER:
        _write(weights_at, lanes, weights, inside, MASKED)
    if HAS_FIRST:
        _write(first_at, lanes, first, inside, MASKED)
    if RULE == ADAM:
        _write(second_at, lanes, second, inside, MASKED)
    if AMSGRAD:
        _write(largest_at, lanes, largest, inside, MASKED)


@triton.jit
def step_blocks(
    blocks, rows, gradients, common, keys,
    RULE: tl.constexpr, VALUE: tl.constexpr, GRADIENTS: tl.constexpr, MOMENT: tl.constexpr, HAS_MASTER: tl.constexpr,
    IS_DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program steps one block. `blocks` has a number for each: the piece in its upper half, and which of its
    blocks.
    """
    block = tl.load(blocks + tl.program_id(0))
    piece = block >> 32
    start = (block & 0xFFFFFFFF) * BLOCK
    row = rows + piece * ROW
    numel = tl.load(row + NUMEL)
    shared = common + piece * COMMON
    if tl.load(shared + STEPPED) != 0:
        if start + BLOCK <= numel:
            _step_block(
                row, gradients + piece, shared, keys + piece * 2, start, numel,
                RULE, VALUE, GRADIENTS, MOMENT, HAS_MASTER, IS_DECOUPLED, AMSGRAD, HAS_MOMENTUM, NESTEROV,
                STOCHASTIC, BLOCK, ALIGNED, False,
            )  # fmt: skip
        else:
            _step_block(
                row, gradients + piece, shared, keys + piece * 2, start, numel,
                RULE, VALUE, GRADIENTS, MOMENT, HAS_MASTER, IS_DECOUPLED, AMSGRAD, HAS_MOMENTUM, NESTEROV,
                STOCHASTIC, BLOCK, ALIGNED, True,
            )  # fmt: skip
