"""Kernels of the implementation "triton". Every sum is in fp32 and in an order that the inputs alone decide; products
of fp32 inputs, and of means, are made of three TF32 products each, which is what tensor cores have.

| kernel            | one program                                | reads                             | writes                   |
|-------------------|--------------------------------------------|-----------------------------------|--------------------------|
| `pool`            | a complete block, a key/value head         | its keys                          | its mean                 |
| `gate`            | a tile of rows                             | all earlier means                 | the picked blocks        |
| `routed_forward`  | a tile of pairs of one block               | that block                        | a part per pair, its lse |
| `own_forward`     | a tile of rows of one group                | the group so far, the rows' parts | out, lse                 |
| `row_products`    | tokens x heads                             | out and its gradient              | their products           |
| `routed_query`    | a tile of pairs of one block               | that block                        | a part of dq per pair    |
| `own_query`       | a tile of rows of one group                | the group so far, the rows' parts | dq                       |
| `key_value`       | a tile of keys of one group                | own rows, then the group's pairs  | dk, dv                   |

A *group* is what `triton.py` makes of documents: consecutive keys, and the queries that see them causally: those
of its end, maybe none. A *row* of a group is a query and one of the R query heads that share a key/value head, so
that one read of keys serves them all: row x is query x // R and head x % R. A *pair* is a row with one of its J places
for past blocks; pairs are numbered as `blocks_THJ` lies in memory. Tables are int32; everything else that grows
with the tokens is addressed in 64 bits.

Widths that are no power of two are filled up; K is cut into K0 + K1 where that saves work, as in 192 = 128 + 64.

Letters: T queries · S keys · H query heads · G key/value heads · R = H/G · K query/key width · V value width ·
J places for past blocks · N groups · X rows or pairs of a tile · Y keys of a tile · P pairs.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
#: Columns of the tables.
_QUERY, _QUERIES, _PAST, _KEY, _KEYS = (tl.constexpr(i) for i in range(5))
_COLUMNS = tl.constexpr(5)


@triton.jit
def _load(x, at_X, mask_X, FIRST: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Columns FIRST to FIRST + PADDED of rows that begin at `at`; zeros beyond WIDTH and where not `mask`."""
    d = FIRST + tl.arange(0, PADDED)
    mask = mask_X[:, None]
    if FIRST + PADDED > WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(x + at_X[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, at_X, mask_X, value, FIRST: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    d = FIRST + tl.arange(0, PADDED)
    mask = mask_X[:, None]
    if FIRST + PADDED > WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    tl.store(x + at_X[:, None] + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_key_width(x, at_X, mask_X, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr):
    x0 = _load(x, at_X, mask_X, 0, K0, K)
    x1 = x0
    if K1 > 0:
        x1 = _load(x, at_X, mask_X, K0, K1, K)
    return x0, x1


@triton.jit
def _product(a0, a1, b0, b1, K1: tl.constexpr):
    """[A, B], products over the key width."""
    c = tl.dot(a0, tl.trans(b0), input_precision="tf32x3")
    if K1 > 0:
        c = tl.dot(a1, tl.trans(b1), c, input_precision="tf32x3")
    return c


@triton.jit
def _own_rows(tiles, groups, R: tl.constexpr, ROWS: tl.constexpr):
    """This program's group, and of its rows: query, head of its key/value head, how many keys it sees, is it one."""
    tile = tiles + 2 * tl.program_id(0)
    group = groups + tl.load(tile) * _COLUMNS
    x = tl.load(tile + 1) + tl.arange(0, ROWS)
    valid_X = x < tl.load(group + _QUERIES) * R
    token_X = x // R
    seen_X = tl.load(group + _PAST) + token_X + 1
    return group, (tl.load(group + _QUERY) + token_X).to(tl.int64), x % R, seen_X, valid_X


@triton.jit
def _own_range(tiles, group, R: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """How many keys every row of the tile sees, in whole steps, and how many the last one sees."""
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    last = tl.minimum((first + ROWS - 1) // R, tl.load(group + _QUERIES) - 1)
    past = tl.load(group + _PAST)
    return (past + first // R + 1) // STEP * STEP, past + last + 1


@triton.jit
def _routed_rows(tiles, starts, order, H, J: tl.constexpr, ROWS: tl.constexpr):
    """Pairs of this program's tile: pair, query, query head, is it one."""
    tile = tiles + 2 * tl.program_id(0)
    i = tl.load(tile + 1) + tl.arange(0, ROWS)
    valid_X = i < tl.load(starts + tl.load(tile) + 1)
    pair_X = tl.load(order + i, mask=valid_X, other=0)
    row_X = pair_X // J
    return pair_X, row_X // H, row_X % H, valid_X


# Forward.


@triton.jit
def _attend(
    m_X, l_X, acc, q0, q1, k, v, k_s, v_s, seen_X, begin, end, scale,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr,
    STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys begin to end, in whole steps unless MASKED, to the running maximum, sum and weighted values."""
    for start in range(begin, end, STEP):
        y = start + tl.arange(0, STEP)
        inside_Y = y < end if MASKED else y >= 0
        at_Y = y.to(tl.int64)
        k0, k1 = _load_key_width(k, at_Y * k_s, inside_Y, K, K0, K1)
        s = _product(q0, q1, k0, k1, K1) * (scale * _LOG2E)
        if MASKED:
            s = tl.where(y[None, :] < seen_X[:, None], s, float("-inf"))
        top_X = tl.maximum(m_X, tl.max(s, 1))
        p = tl.exp2(s - top_X[:, None])
        shrink_X = tl.exp2(m_X - top_X)
        l_X = l_X * shrink_X + tl.sum(p, 1)
        values = _load(v, at_Y * v_s, inside_Y, 0, V0, V)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink_X[:, None], input_precision="tf32x3")
        m_X = top_X
    return m_X, l_X, acc


@triton.jit(do_not_specialize=["N"])
def routed_forward(
    q, k, v, part_PV, part_lse_P, groups, tiles, starts, order,
    q_t, q_h, k_s, k_g, v_s, v_g, scale, H, N,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Attention of pairs to their block. lse of parts is in powers of two."""
    bucket = tl.load(tiles + 2 * tl.program_id(0))
    if bucket >= N * (H // R):
        return
    group, g = groups + bucket % N * _COLUMNS, (bucket // N).to(tl.int64)
    pair_X, t_X, h_X, valid_X = _routed_rows(tiles, starts, order, H, J, ROWS)
    first, keys = tl.load(group + _KEY).to(tl.int64), tl.load(group + _KEYS)
    k += first * k_s + g * k_g
    v += first * v_s + g * v_g
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    m_X = tl.full([ROWS], float("-inf"), tl.float32)
    l_X = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, V0], 0.0, tl.float32)
    seen_X = tl.full([ROWS], 0, tl.int32) + keys
    whole = keys // STEP * STEP
    m_X, l_X, acc = _attend(
        m_X, l_X, acc, q0, q1, k, v, k_s, v_s, seen_X, 0, whole, scale, K, K0, K1, V, V0, STEP, False
    )
    m_X, l_X, acc = _attend(
        m_X, l_X, acc, q0, q1, k, v, k_s, v_s, seen_X, whole, keys, scale, K, K0, K1, V, V0, STEP, True
    )
    _store(part_PV, pair_X * V, valid_X, acc / l_X[:, None], 0, V0, V)
    tl.store(part_lse_P + pair_X, m_X + tl.log2(l_X), mask=valid_X)


@triton.jit
def own_forward(
    q, k, v, blocks, part_PV, part_lse_P, out, lse, groups, tiles,
    q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Causal attention within groups, merged with the parts of the rows' pairs. lse is in powers of e."""
    group, t_X, r_X, seen_X, valid_X = _own_rows(tiles, groups, R, ROWS)
    whole, end = _own_range(tiles, group, R, ROWS, STEP)
    g, first = tl.program_id(1).to(tl.int64), tl.load(group + _KEY).to(tl.int64)
    k += first * k_s + g * k_g
    v += first * v_s + g * v_g
    h_X = g * R + r_X
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    m_X = tl.full([ROWS], float("-inf"), tl.float32)
    l_X = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, V0], 0.0, tl.float32)
    m_X, l_X, acc = _attend(
        m_X, l_X, acc, q0, q1, k, v, k_s, v_s, seen_X, 0, whole, scale, K, K0, K1, V, V0, STEP, False
    )
    m_X, l_X, acc = _attend(
        m_X, l_X, acc, q0, q1, k, v, k_s, v_s, seen_X, whole, end, scale, K, K0, K1, V, V0, STEP, True
    )
    for j in range(J):
        picked_X = valid_X & (tl.load(blocks + (t_X * ALL_H + h_X) * J + j, mask=valid_X, other=-1) >= 0)
        pair_X = (t_X * H + h_X) * J + j
        part_lse_X = tl.load(part_lse_P + pair_X, mask=picked_X, other=float("-inf"))
        top_X = tl.maximum(m_X, part_lse_X)
        shrink_X, weight_X = tl.exp2(m_X - top_X), tl.exp2(part_lse_X - top_X)
        l_X = l_X * shrink_X + weight_X
        acc = acc * shrink_X[:, None] + _load(part_PV, pair_X * V, picked_X, 0, V0, V) * weight_X[:, None]
        m_X = top_X
    at_X = t_X * ALL_H + h_X
    _store(out, at_X * V, valid_X, acc / l_X[:, None], 0, V0, V)
    tl.store(lse + at_X, (m_X + tl.log2(l_X)) / _LOG2E, mask=valid_X)


# Backward. Weights are made again from scores and the merged lse, and `delta` is <out, its gradient> of a row:
# d(score) = weight * (<gradient, value> - delta), times scale once at the end.


@triton.jit(do_not_specialize=["rows"])
def row_products(grad, out, delta, grad_t, grad_h, H, rows, V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr):
    x = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid_X = x < rows
    a = _load(grad, x // H * grad_t + x % H * grad_h, valid_X, 0, V0, V).to(tl.float32)
    b = _load(out, x * V, valid_X, 0, V0, V).to(tl.float32)
    tl.store(delta + x, tl.sum(a * b, 1), mask=valid_X)


@triton.jit
def _query_gradient(
    acc0, acc1, q0, q1, dout, lse_X, delta_X, k, v, k_s, v_s, seen_X, begin, end, scale,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr,
    STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what keys begin to end, in whole steps unless MASKED, give to dq, before `scale`."""
    for start in range(begin, end, STEP):
        y = start + tl.arange(0, STEP)
        inside_Y = y < end if MASKED else y >= 0
        at_Y = y.to(tl.int64)
        k0, k1 = _load_key_width(k, at_Y * k_s, inside_Y, K, K0, K1)
        p = tl.exp2(_product(q0, q1, k0, k1, K1) * (scale * _LOG2E) - lse_X[:, None])
        if MASKED:
            p = tl.where(y[None, :] < seen_X[:, None], p, 0.0)
        values = _load(v, at_Y * v_s, inside_Y, 0, V0, V)
        dp = tl.dot(dout, tl.trans(values), input_precision="tf32x3")
        ds = (p * (dp - delta_X[:, None])).to(k0.dtype)
        acc0 = tl.dot(ds, k0, acc0, input_precision="tf32x3")
        if K1 > 0:
            acc1 = tl.dot(ds, k1, acc1, input_precision="tf32x3")
    return acc0, acc1


@triton.jit(do_not_specialize=["N"])
def routed_query(
    grad, q, k, v, lse, delta, part_PK, groups, tiles, starts, order,
    grad_t, grad_h, q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H, N,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dq of pairs, before `scale`."""
    bucket = tl.load(tiles + 2 * tl.program_id(0))
    if bucket >= N * (H // R):
        return
    group, g = groups + bucket % N * _COLUMNS, (bucket // N).to(tl.int64)
    pair_X, t_X, h_X, valid_X = _routed_rows(tiles, starts, order, H, J, ROWS)
    first, keys = tl.load(group + _KEY).to(tl.int64), tl.load(group + _KEYS)
    k += first * k_s + g * k_g
    v += first * v_s + g * v_g
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    dout = _load(grad, t_X * grad_t + h_X * grad_h, valid_X, 0, V0, V)
    lse_X = tl.load(lse + t_X * ALL_H + h_X, mask=valid_X, other=0.0) * _LOG2E
    delta_X = tl.load(delta + t_X * ALL_H + h_X, mask=valid_X, other=0.0)
    acc0 = tl.full([ROWS, K0], 0.0, tl.float32)
    acc1 = acc0
    if K1 > 0:
        acc1 = tl.full([ROWS, K1], 0.0, tl.float32)
    seen_X = tl.full([ROWS], 0, tl.int32) + keys
    whole = keys // STEP * STEP
    acc0, acc1 = _query_gradient(
        acc0, acc1, q0, q1, dout, lse_X, delta_X, k, v, k_s, v_s, seen_X, 0, whole, scale,
        K, K0, K1, V, V0, STEP, False,
    )  # fmt: skip
    acc0, acc1 = _query_gradient(
        acc0, acc1, q0, q1, dout, lse_X, delta_X, k, v, k_s, v_s, seen_X, whole, keys, scale,
        K, K0, K1, V, V0, STEP, True,
    )  # fmt: skip
    _store(part_PK, pair_X * K, valid_X, acc0, 0, K0, K)
    if K1 > 0:
        _store(part_PK, pair_X * K, valid_X, acc1, K0, K1, K)


@triton.jit
def own_query(
    grad, q, k, v, lse, delta, blocks, part_PK, dq, groups, tiles,
    grad_t, grad_h, q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dq: of the own group, and the sum of the pairs' parts."""
    group, t_X, r_X, seen_X, valid_X = _own_rows(tiles, groups, R, ROWS)
    whole, end = _own_range(tiles, group, R, ROWS, STEP)
    g, first = tl.program_id(1).to(tl.int64), tl.load(group + _KEY).to(tl.int64)
    k += first * k_s + g * k_g
    v += first * v_s + g * v_g
    h_X = g * R + r_X
    at_X = t_X * ALL_H + h_X
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    dout = _load(grad, t_X * grad_t + h_X * grad_h, valid_X, 0, V0, V)
    lse_X = tl.load(lse + at_X, mask=valid_X, other=0.0) * _LOG2E
    delta_X = tl.load(delta + at_X, mask=valid_X, other=0.0)
    acc0 = tl.full([ROWS, K0], 0.0, tl.float32)
    acc1 = acc0
    if K1 > 0:
        acc1 = tl.full([ROWS, K1], 0.0, tl.float32)
    acc0, acc1 = _query_gradient(
        acc0, acc1, q0, q1, dout, lse_X, delta_X, k, v, k_s, v_s, seen_X, 0, whole, scale,
        K, K0, K1, V, V0, STEP, False,
    )  # fmt: skip
    acc0, acc1 = _query_gradient(
        acc0, acc1, q0, q1, dout, lse_X, delta_X, k, v, k_s, v_s, seen_X, whole, end, scale,
        K, K0, K1, V, V0, STEP, True,
    )  # fmt: skip
    for j in range(J):
        picked_X = valid_X & (tl.load(blocks + at_X * J + j, mask=valid_X, other=-1) >= 0)
        pair_X = (t_X * H + h_X) * J + j
        part0, part1 = _load_key_width(part_PK, pair_X * K, picked_X, K, K0, K1)
        acc0 += part0
        if K1 > 0:
            acc1 += part1
    _store(dq, at_X * K, valid_X, acc0 * scale, 0, K0, K)
    if K1 > 0:
        _store(dq, at_X * K, valid_X, acc1 * scale, K0, K1, K)


@triton.jit
def _key_value_gradient(
    dk0, dk1, dv, k0, k1, values, y, seen_X, valid_X, t_X, h_X,
    grad, q, lse, delta, grad_t, grad_h, q_t, q_h, scale, ALL_H,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what a tile of rows gives to dk, before `scale`, and to dv. Rows that are none have q and grad zero."""
    at_X = t_X * ALL_H + h_X
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    dout = _load(grad, t_X * grad_t + h_X * grad_h, valid_X, 0, V0, V)
    lse_X = tl.load(lse + at_X, mask=valid_X, other=0.0) * _LOG2E
    delta_X = tl.load(delta + at_X, mask=valid_X, other=0.0)
    p = tl.exp2(_product(k0, k1, q0, q1, K1) * (scale * _LOG2E) - lse_X[None, :])
    if MASKED:
        p = tl.where(y[:, None] < seen_X[None, :], p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="tf32x3")
    dp = tl.dot(values, tl.trans(dout), input_precision="tf32x3")
    ds = (p * (dp - delta_X[None, :])).to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0, input_precision="tf32x3")
    if K1 > 0:
        dk1 = tl.dot(ds, q1, dk1, input_precision="tf32x3")
    return dk0, dk1, dv


@triton.jit(do_not_specialize=["N"])
def key_value(
    grad, q, k, v, lse, delta, dk, dv, groups, tiles, starts, order,
    grad_t, grad_h, q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H, N,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, over all rows that see it: nobody else writes them. ADD: to what is there."""
    tile = tiles + 2 * tl.program_id(0)
    index = tl.load(tile)
    group, g = groups + index * _COLUMNS, tl.program_id(1).to(tl.int64)
    begin, past, queries = tl.load(tile + 1), tl.load(group + _PAST), tl.load(group + _QUERIES)
    y = begin + tl.arange(0, KEYS)
    inside_Y = y < tl.load(group + _KEYS)
    at_Y = tl.load(group + _KEY).to(tl.int64) + y
    k0, k1 = _load_key_width(k, at_Y * k_s + g * k_g, inside_Y, K, K0, K1)
    values = _load(v, at_Y * v_s + g * v_g, inside_Y, 0, V0, V)
    dk0 = tl.full([KEYS, K0], 0.0, tl.float32)
    dk1 = dk0
    if K1 > 0:
        dk1 = tl.full([KEYS, K1], 0.0, tl.float32)
    acc = tl.full([KEYS, V0], 0.0, tl.float32)
    query = tl.load(group + _QUERY)
    for start in range(tl.maximum(begin - past, 0) * R, queries * R, STEP):
        x = start + tl.arange(0, STEP)
        t_X = (query + x // R).to(tl.int64)
        dk0, dk1, acc = _key_value_gradient(
            dk0, dk1, acc, k0, k1, values, y, past + x // R + 1, x < queries * R, t_X, g * R + x % R,
            grad, q, lse, delta, grad_t, grad_h, q_t, q_h, scale, ALL_H, K, K0, K1, V, V0, True,
        )  # fmt: skip
    if J > 0:
        bucket = starts + g * N + index
        end = tl.load(bucket + 1)
        for start in range(tl.load(bucket), end, STEP):
            i = start + tl.arange(0, STEP)
            row_X = tl.load(order + i, mask=i < end, other=0) // J
            dk0, dk1, acc = _key_value_gradient(
                dk0, dk1, acc, k0, k1, values, y, i, i < end, row_X // H, row_X % H,
                grad, q, lse, delta, grad_t, grad_h, q_t, q_h, scale, ALL_H, K, K0, K1, V, V0, False,
            )  # fmt: skip
    dk0, dk1 = dk0 * scale, dk1 * scale
    at_Y = at_Y * (ALL_H // R) + g
    if ADD:
        old0, old1 = _load_key_width(dk, at_Y * K, inside_Y, K, K0, K1)
        dk0, dk1, acc = dk0 + old0, dk1 + old1, acc + _load(dv, at_Y * V, inside_Y, 0, V0, V)
    _store(dk, at_Y * K, inside_Y, dk0, 0, K0, K)
    if K1 > 0:
        _store(dk, at_Y * K, inside_Y, dk1, K0, K1, K)
    _store(dv, at_Y * V, inside_Y, acc, 0, V0, V)


# The gate.


@triton.jit
def pool(k, means_NGK, groups, members, k_s, k_g, G, block, K: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Means of complete blocks, in fp32."""
    index, g = tl.load(members + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    k += tl.load(groups + index * _COLUMNS + _KEY).to(tl.int64) * k_s + g * k_g
    acc = tl.full([STEP, WIDTH], 0.0, tl.float32)
    for start in range(0, block, STEP):
        y = start + tl.arange(0, STEP)
        acc += _load(k, y.to(tl.int64) * k_s, y < block, 0, WIDTH, K).to(tl.float32)
    d = tl.arange(0, WIDTH)
    tl.store(means_NGK + (index * G + g) * K + d, tl.sum(acc, 0) / block, mask=d < K)


@triton.jit
def gate(
    q, means_NGK, blocks, documents, firsts, tiles, q_t, q_h, G, block,
    R: tl.constexpr, J: tl.constexpr, J0: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The J best past blocks of every row, best first, of equal ones the earlier; -1 where fewer compete.

    They are kept in registers as 64-bit numbers, the score above the block, which order as the tie rule does.
    """
    document, t_X, r_X, seen_X, valid_X = _own_rows(tiles, documents, R, ROWS)
    end = _own_range(tiles, document, R, ROWS, STEP)[1]
    g = tl.program_id(1).to(tl.int64)
    means_NGK += (tl.load(firsts + tl.load(tiles + 2 * tl.program_id(0))).to(tl.int64) * G + g) * K
    own_X = (seen_X - 1) // block
    h_X = g * R + r_X
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    j = tl.arange(0, J0).to(tl.int64)
    # Places that hold nothing are below every score, all different, and above what does not compete.
    none = tl.full([1, 1], -(2**63), tl.int64)
    best = tl.where(j < J, -(2**63) + 1 + j, 2**63 - 1)[None, :] + tl.full([ROWS, 1], 0, tl.int64)
    last = (end - 1) // block
    for start in range(0, last, STEP):
        n = start + tl.arange(0, STEP)
        m0, m1 = _load_key_width(means_NGK, n.to(tl.int64) * G * K, n < last, K, K0, K1)
        s = tl.dot(q0, tl.trans(m0), input_precision="tf32x3")
        if K1 > 0:
            s = tl.dot(q1, tl.trans(m1), s, input_precision="tf32x3")
        bits = s.to(tl.int32, bitcast=True)  # never of -0.0: sums begin at 0.0
        ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        keys = ranks * 2**32 + (0x7FFFFFFF - n)[None, :].to(tl.int64)
        keys = tl.where(n[None, :] < own_X[:, None], keys, none)
        top_X, low_X = tl.max(keys, 1), tl.min(best, 1)
        while tl.max((top_X > low_X).to(tl.int32), 0) > 0:
            better = (top_X > low_X)[:, None]
            best = tl.where(better & (best == low_X[:, None]), top_X[:, None], best)
            keys = tl.where(keys == top_X[:, None], none, keys)
            top_X, low_X = tl.max(keys, 1), tl.min(best, 1)
    best = tl.where((j < J)[None, :], best, none)
    for place in range(J):
        top_X = tl.max(best, 1)
        best = tl.where(best == top_X[:, None], none, best)
        block_X = tl.where(top_X > -(2**63) + 2**32, 0x7FFFFFFF - (top_X & 0x7FFFFFFF), -1)
        tl.store(blocks + (t_X * G * R + h_X) * J + place, block_X.to(tl.int32), mask=valid_X)


#: Whether TRITON_INTERPRET=1 was set when this module was imported, which is when triton decides.
INTERPRETED = not isinstance(gate, triton.JITFunction)
