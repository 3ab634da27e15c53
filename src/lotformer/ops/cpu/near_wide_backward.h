// Backward of wide windows along a sequence, by the products of near_wide.h: once for queries that follow each other, with
// the keys they see as rows, and once for keys, with the queries that see them.
#pragma once
#include "near_wide.h"

namespace {

LOT_INLINE bool is_wide_backward(const Near& c) { return is_wide(c) && c.dim % W == 0; }

// Tokens by two rows of each, q and the gradient of out, or k and v.
struct WidePair {
  Strip<const float> one, other;
  RealTokens real;
};

// Tokens taken together, `own`, and all that one of them meets, with their products.
struct WideMeeting {
  const Near& c;
  int64_t most_rows = least(kWideQueries + 2 * c.reach_columns, c.length);
  const Arena& arena;
  float *own_one = columns(c.dim), *own_other = columns(c.value_dim);
  float *room_one = arena.take<float>(most_rows * c.dim), *room_other = arena.take<float>(most_rows * c.value_dim);
  float *weight = columns(most_rows), *product = columns(most_rows);  // (rows, tokens): scores first; gradients with values
  float *grad_one = columns(c.dim), *grad_other = columns(c.value_dim);  // (tokens, width)
  int64_t first = 0, from = 0;
  int rows = 0;
  Strip<const float> met_one{}, met_other{};

  WideMeeting(const Near& call, const Arena& scratch) : c(call), arena(scratch) {}

  float* columns(int64_t count) const { return arena.take<float>(count * kWideQueries); }

  void meet(const WidePair& own, int64_t i, int count, const WidePair& met) {
    first = i;
    from = most<int64_t>(i - c.reach_columns, 0);
    rows = int(least(i + count + c.reach_columns, c.length) - from);
    turn_rows(own.one, i, count, c.dim, own_one);
    turn_rows(own.other, i, count, c.value_dim, own_other);
    met_one = clean_rows(met.one, met.real, from, rows, c.dim, room_one);
    met_other = clean_rows(met.other, met.real, from, rows, c.value_dim, room_other);
    multiply_nn(met_one.data, met_one.stride, rows, c.dim, own_one, kWideQueries, kWideVectors, weight, kWideQueries);
    multiply_nn(met_other.data, met_other.stride, rows, c.value_dim, own_other, kWideQueries, kWideVectors, product,
                kWideQueries);
  }

  // Which tokens, of vector v, row j is in the window of.
  VI within(int j, int v) const { return lanes_within(from + j - first, c.reach_columns, v * W); }

  // Σ_j factor[j, token] row_j for every token.
  void gather(const float* factor, const Strip<const float>& met, int width, float* to) const {
    memset(to, 0, sizeof(float) * size_t(width) * kWideQueries);
    multiply_tn(factor, kWideQueries, kWideQueries, rows, met.data, met.stride, width / W, to, width);
  }
};

LOT_INLINE WidePair queries_of(const NearHead<float>& head) { return {head.q, head.grad, head.queries}; }
LOT_INLINE WidePair keys_of(const NearHead<float>& head) { return {head.k, head.v, head.keys}; }

// The gradients of a block of queries, and their slopes.
static void near_wide_query_gradients(const NearHead<float>& head, int64_t first, int64_t last, float* slope,
                                      const Strip<float>& grad_q) {
  const Near& c = head.c;
  WideMeeting m(c, head.arena);
  for (int64_t i = first; i < last; i += kWideQueries) {
    const int count = int(least<int64_t>(kWideQueries, last - i));
    m.meet(queries_of(head), i, count, keys_of(head));
    bool any[kWideQueries];
    float of_total[kWideQueries] = {}, total[kWideQueries] = {}, slopes[kWideQueries] = {};
    for (int t = 0; t < count; t++) {
      any[t] = head.queries.has(i + t) && head.total[i + t] > kNothing;
      if (any[t]) total[t] = head.total[i + t], of_total[t] = head.slope_of_total(i + t);
    }
    for (int v = 0; v < kWideVectors; v++) {
      V mean{};
      for (int j = 0; j < m.rows; j++) {
        float* at = m.weight + j * kWideQueries + v * W;
        const V score = load(at) * c.scale - load(total + v * W);
        const V weight = head.keys.has(m.from + j) && m.within(j, v) ? vexp(score) : V{};
        store(at, weight);
        mean += weight * load(m.product + j * kWideQueries + v * W);
      }
      store(slopes + v * W, load(of_total + v * W) - mean);
      for (int j = 0; j < m.rows; j++) {
        float* at = m.weight + j * kWideQueries + v * W;
        store(at, load(at) * (load(m.product + j * kWideQueries + v * W) + load(slopes + v * W)));
      }
    }
    m.gather(m.weight, m.met_one, c.dim, m.grad_one);
    for (int t = 0; t < count; t++) {
      float* to = grad_q.at(i + t);
      slope[i + t] = any[t] ? slopes[t] : 0;
      for (int d = 0; d < c.dim; d += W) {
        const V whole = load(m.grad_one + t * c.dim + d) * c.scale - load(head.direction + d) * of_total[t];
        store(to + d, any[t] ? whole : V{});
      }
    }
  }
}

// The gradients of a block of keys and of their values.
static void near_wide_key_gradients(const NearHead<float>& head, int64_t first, int64_t last, const float* slope,
                                    const Strip<float>& grad_k, const Strip<float>& grad_v) {
  const Near& c = head.c;
  WideMeeting m(c, head.arena);
  for (int64_t i = first; i < last; i += kWideQueries) {
    const int count = int(least<int64_t>(kWideQueries, last - i));
    m.meet(keys_of(head), i, count, queries_of(head));
    for (int j = 0; j < m.rows; j++) {
      const int64_t query = m.from + j;
      for (int v = 0; v < kWideVectors; v++) {
        float *at = m.weight + j * kWideQueries + v * W, *product = m.product + j * kWideQueries + v * W;
        V weight{};
        if (head.queries.has(query)) weight = m.within(j, v) ? vexp(load(at) * c.scale - head.total[query]) : V{};
        store(at, weight);
        store(product, weight * (load(product) + slope[query]));
      }
    }
    m.gather(m.product, m.met_one, c.dim, m.grad_one);
    m.gather(m.weight, m.met_other, c.value_dim, m.grad_other);
    for (int t = 0; t < count; t++) {
      const bool real = head.keys.has(i + t);
      for (int d = 0; d < c.dim; d += W)
        store(grad_k.at(i + t) + d, real ? load(m.grad_one + t * c.dim + d) * c.scale : V{});
      for (int d = 0; d < c.value_dim; d += W)
        store(grad_v.at(i + t) + d, real ? load(m.grad_other + t * c.value_dim + d) : V{});
    }
  }
}

static void near_wide_query_gradients(const NearHead<uint16_t>&, int64_t, int64_t, float*, const Strip<uint16_t>&) {}
static void near_wide_key_gradients(const NearHead<uint16_t>&, int64_t, int64_t, const float*, const Strip<uint16_t>&,
                                    const Strip<uint16_t>&) {}

}  // namespace
