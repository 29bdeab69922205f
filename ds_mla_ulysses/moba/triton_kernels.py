"""The kernels of the implementation "triton".

Every sum is in fp32, and its order depends on nothing but the inputs. Products of fp32 inputs and of block means
consist of three TF32 products each, since tensor cores do not multiply fp32.

| kernel            | one program works on          | reads                                  | writes              |
|-------------------|-------------------------------|----------------------------------------|---------------------|
| `pool`            | a complete block of a KV head | its keys                               | its mean            |
| `gate`            | a tile of rows                | all earlier means                      | the picked blocks   |
| `routed_forward`  | a tile of pairs of one block  | that block                             | partial out and lse |
| `current_forward` | a tile of rows of one segment | the segment, the rows' partial results | out, lse            |
| `row_products`    | a tile of rows                | out and its gradient                   | their products      |
| `routed_query`    | a tile of pairs of one block  | that block                             | partial dq          |
| `current_query`   | a tile of rows of one segment | the segment, the rows' partial results | dq                  |
| `key_value`       | a tile of keys of one segment | the segment's rows, then its pairs     | dk, dv              |

A *segment*, which `triton_implementation.py` makes from documents, is a run of consecutive keys with the queries that
attend to them causally. These queries belong to the last keys of the segment, and there may be none. A *row* of a
segment is a query with one of the R query heads that share a KV head, so that one read of the keys serves all of them:
row x is query x // R and head x % R. A *pair* is a row with one of its J places for past blocks. Pairs are numbered in
the memory order of `blocks_THJ`. Tables are int32. Everything else that grows with the tokens is addressed in 64 bits.

Widths that are not powers of two are padded. K is divided into K0 + K1 if that saves work, as in 192 = 128 + 64.

Letters: T queries · S keys · H query heads of the call (ALL_H: of the tensors) · G KV heads · R = H/G · K query and key
width · V value width · J places for past blocks · N segments · X rows or pairs of a tile · Y keys of a tile · P pairs.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
#: Columns of the tables: first query, number of queries, number of keys before the key at the first query's position,
#: first key, number of keys.
_QUERY, _QUERIES, _PAST, _KEY, _KEYS = (tl.constexpr(i) for i in range(5))
_COLUMNS = tl.constexpr(5)


@triton.jit
def _load(x, at_X, mask_X, FIRST: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Loads columns FIRST to FIRST + PADDED of rows that begin at `at`; zeros beyond WIDTH and outside of `mask`."""
    d = FIRST + tl.arange(0, PADDED)
    mask = mask_X[:, None]
    if FIRST + PADDED > WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(x + at_X[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, at_X, mask_X, value, FIRST: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Stores the columns that `_load` loads."""
    d = FIRST + tl.arange(0, PADDED)
    mask = mask_X[:, None]
    if FIRST + PADDED > WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    tl.store(x + at_X[:, None] + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_key_width(x, at_X, mask_X, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr):
    """Loads the columns of K0 and of K1."""
    x0 = _load(x, at_X, mask_X, 0, K0, K)
    x1 = x0
    if K1 > 0:
        x1 = _load(x, at_X, mask_X, K0, K1, K)
    return x0, x1


@triton.jit
def _product(a0, a1, b0, b1, K1: tl.constexpr):
    """Returns the products of the rows of a and b over the key width."""
    c = tl.dot(a0, tl.trans(b0), input_precision="tf32x3")
    if K1 > 0:
        c = tl.dot(a1, tl.trans(b1), c, input_precision="tf32x3")
    return c


@triton.jit
def _segment_rows(tiles, segments, R: tl.constexpr, ROWS: tl.constexpr):
    """Returns this program's segment, and for its rows: the query, the head, the number of visible keys, validity."""
    tile = tiles + 2 * tl.program_id(0)
    segment = segments + tl.load(tile) * _COLUMNS
    x = tl.load(tile + 1) + tl.arange(0, ROWS)
    valid_X = x < tl.load(segment + _QUERIES) * R
    token_X = x // R
    seen_X = tl.load(segment + _PAST) + token_X + 1
    return segment, (tl.load(segment + _QUERY) + token_X).to(tl.int64), x % R, seen_X, valid_X


@triton.jit
def _segment_range(tiles, segment, R: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Returns how many keys all rows of the tile see, in whole steps, and how many keys the last row sees."""
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    last = tl.minimum((first + ROWS - 1) // R, tl.load(segment + _QUERIES) - 1)
    past = tl.load(segment + _PAST)
    return (past + first // R + 1) // STEP * STEP, past + last + 1


@triton.jit
def _routed_rows(tiles, starts, order, H, J: tl.constexpr, ROWS: tl.constexpr):
    """Returns for the pairs of this program's tile: the pair, the query, the query head, validity."""
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
    """Adds keys begin to end to the running maximum, sum and weighted values: whole steps only, unless MASKED."""
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
    q, k, v, part_PV, part_lse_P, segments, tiles, starts, order,
    q_t, q_h, k_s, k_g, v_s, v_g, scale, H, N,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes the attention of pairs to their block. The lse of partial results has base 2."""
    bucket = tl.load(tiles + 2 * tl.program_id(0))
    if bucket >= N * (H // R):
        return
    segment, g = segments + bucket % N * _COLUMNS, (bucket // N).to(tl.int64)
    pair_X, t_X, h_X, valid_X = _routed_rows(tiles, starts, order, H, J, ROWS)
    first, keys = tl.load(segment + _KEY).to(tl.int64), tl.load(segment + _KEYS)
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
def current_forward(
    q, k, v, blocks, part_PV, part_lse_P, out, lse, segments, tiles,
    q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes causal attention within segments and merges the partial results of the rows' pairs. lse has base e."""
    segment, t_X, r_X, seen_X, valid_X = _segment_rows(tiles, segments, R, ROWS)
    whole, end = _segment_range(tiles, segment, R, ROWS, STEP)
    g, first = tl.program_id(1).to(tl.int64), tl.load(segment + _KEY).to(tl.int64)
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


# Backward. Weights are recomputed from scores and the merged lse. `delta` is the product of a row's output with its
# gradient: d(score) = weight * (<gradient, value> - delta), multiplied by scale once at the end.


@triton.jit(do_not_specialize=["rows"])
def row_products(grad, out, delta, grad_t, grad_h, H, rows, V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr):
    """Computes `delta`."""
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
    """Adds the contribution of keys begin to end to dq, without `scale`. Unless MASKED, they must be whole steps."""
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
    grad, q, k, v, lse, delta, part_PK, segments, tiles, starts, order,
    grad_t, grad_h, q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H, N,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes the partial dq of pairs, without `scale`."""
    bucket = tl.load(tiles + 2 * tl.program_id(0))
    if bucket >= N * (H // R):
        return
    segment, g = segments + bucket % N * _COLUMNS, (bucket // N).to(tl.int64)
    pair_X, t_X, h_X, valid_X = _routed_rows(tiles, starts, order, H, J, ROWS)
    first, keys = tl.load(segment + _KEY).to(tl.int64), tl.load(segment + _KEYS)
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
def current_query(
    grad, q, k, v, lse, delta, blocks, part_PK, dq, segments, tiles,
    grad_t, grad_h, q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes dq from the rows' segment and from the partial results of their pairs."""
    segment, t_X, r_X, seen_X, valid_X = _segment_rows(tiles, segments, R, ROWS)
    whole, end = _segment_range(tiles, segment, R, ROWS, STEP)
    g, first = tl.program_id(1).to(tl.int64), tl.load(segment + _KEY).to(tl.int64)
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
    """Adds the contribution of a tile of rows to dk, without `scale`, and to dv. Invalid rows have zero q and grad."""
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
    grad, q, k, v, lse, delta, dk, dv, segments, tiles, starts, order,
    grad_t, grad_h, q_t, q_h, k_s, k_g, v_s, v_g, scale, H, ALL_H, N,
    R: tl.constexpr, J: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a tile of keys over all rows that see it. With ADD, adds them to the values in memory."""
    tile = tiles + 2 * tl.program_id(0)
    index = tl.load(tile)
    segment, g = segments + index * _COLUMNS, tl.program_id(1).to(tl.int64)
    begin, past, queries = tl.load(tile + 1), tl.load(segment + _PAST), tl.load(segment + _QUERIES)
    y = begin + tl.arange(0, KEYS)
    inside_Y = y < tl.load(segment + _KEYS)
    at_Y = tl.load(segment + _KEY).to(tl.int64) + y
    k0, k1 = _load_key_width(k, at_Y * k_s + g * k_g, inside_Y, K, K0, K1)
    values = _load(v, at_Y * v_s + g * v_g, inside_Y, 0, V0, V)
    dk0 = tl.full([KEYS, K0], 0.0, tl.float32)
    dk1 = dk0
    if K1 > 0:
        dk1 = tl.full([KEYS, K1], 0.0, tl.float32)
    acc = tl.full([KEYS, V0], 0.0, tl.float32)
    query = tl.load(segment + _QUERY)
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
def pool(
    k, means_NGK, segments, members, k_s, k_g, G, block_size,
    K: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes the means of complete blocks in fp32."""
    index, g = tl.load(members + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    k += tl.load(segments + index * _COLUMNS + _KEY).to(tl.int64) * k_s + g * k_g
    acc = tl.full([STEP, WIDTH], 0.0, tl.float32)
    for start in range(0, block_size, STEP):
        y = start + tl.arange(0, STEP)
        acc += _load(k, y.to(tl.int64) * k_s, y < block_size, 0, WIDTH, K).to(tl.float32)
    d = tl.arange(0, WIDTH)
    tl.store(means_NGK + (index * G + g) * K + d, tl.sum(acc, 0) / block_size, mask=d < K)


@triton.jit
def gate(
    q, means_NGK, blocks, documents, firsts, tiles, q_t, q_h, G, block_size,
    R: tl.constexpr, J: tl.constexpr, J0: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the J best past blocks of every row, best first, then -1. Of equal scores, the earlier block wins.

    The best blocks are kept in registers as 64-bit numbers, with the score in the high half and the block in the low
    half, so that their order includes the rule for ties.
    """
    document, t_X, r_X, seen_X, valid_X = _segment_rows(tiles, documents, R, ROWS)
    end = _segment_range(tiles, document, R, ROWS, STEP)[1]
    g = tl.program_id(1).to(tl.int64)
    means_NGK += (tl.load(firsts + tl.load(tiles + 2 * tl.program_id(0))).to(tl.int64) * G + g) * K
    current_X = (seen_X - 1) // block_size
    h_X = g * R + r_X
    q0, q1 = _load_key_width(q, t_X * q_t + h_X * q_h, valid_X, K, K0, K1)
    q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    j = tl.arange(0, J0).to(tl.int64)
    # Empty places are below every score, differ from each other, and are above blocks that do not compete.
    none = tl.full([1, 1], -(2**63), tl.int64)
    best = tl.where(j < J, -(2**63) + 1 + j, 2**63 - 1)[None, :] + tl.full([ROWS, 1], 0, tl.int64)
    last = (end - 1) // block_size
    for start in range(0, last, STEP):
        n = start + tl.arange(0, STEP)
        m0, m1 = _load_key_width(means_NGK, n.to(tl.int64) * G * K, n < last, K, K0, K1)
        s = tl.dot(q0, tl.trans(m0), input_precision="tf32x3")
        if K1 > 0:
            s = tl.dot(q1, tl.trans(m1), s, input_precision="tf32x3")
        bits = s.to(tl.int32, bitcast=True)  # never -0.0, since sums begin at 0.0
        ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        keys = ranks * 2**32 + (0x7FFFFFFF - n)[None, :].to(tl.int64)
        keys = tl.where(n[None, :] < current_X[:, None], keys, none)
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


#: Whether TRITON_INTERPRET=1 was set when this module was imported, which is when Triton decides.
INTERPRETED = not isinstance(gate, triton.JITFunction)
