// Forward of wide windows along a sequence: queries that follow each other share most of their keys, so that their scores
// are one small matrix product, and what they read is another. Keys that only some of them see are products too many, a
// fifth for a window of 129, at several times the rate.
//
// Keys are rows of the products and queries their columns: sums over keys are sums of vectors, keys and values are read
// where they are, and only the queries, which are few, are turned around.
#pragma once
#include "gemm.h"
#include "near_head.h"

namespace {

constexpr int kWideVectors = 2;
constexpr int kWideQueries = kWideVectors * W;
constexpr int64_t kWideReach = 12;  // narrower windows waste too many products

// Whether queries are taken together: fp32, nothing but a window along a sequence, whole vectors of values.
LOT_INLINE bool is_wide(const Near& c) {
  return !c.bf16 && c.prefix == 0 && c.columns >= c.length && c.reach_columns >= kWideReach && c.value_dim % W == 0;
}

// Scratch for the queries taken together.
struct WideRoom {
  int64_t most_keys;
  float *query, *weight, *value, *out;  // (dim, queries), (keys, queries), (keys, value_dim), (queries, value_dim)

  WideRoom(const Near& c, const Arena& arena)
      : most_keys(least(kWideQueries + 2 * c.reach_columns, c.length)),
        query(arena.take<float>(int64_t(c.dim) * kWideQueries)),
        weight(arena.take<float>(most_keys * kWideQueries)),
        value(c.key_mask.data ? arena.take<float>(most_keys * c.value_dim) : nullptr),
        out(arena.take<float>(int64_t(kWideQueries) * c.value_dim)) {}
};

// Lanes of the queries from `first` on that see the key which lies `apart` from query 0: at most `reach` away.
LOT_INLINE VI lanes_within(int64_t apart, int64_t reach, int first) {
  VI lane;
  for (int t = 0; t < W; t++) lane[t] = first + t;
  return (lane >= int32_t(apart - reach)) & (lane <= int32_t(apart + reach));
}

// Rows with padding set to zero: zero times anything may be not a number. Copied to `room` if there may be padding.
static Strip<const float> clean_rows(const Strip<const float>& rows, const RealTokens& real, int64_t from, int count,
                                     int width, float* room) {
  if (!real.data) return {rows.at(from), rows.stride};
  for (int j = 0; j < count; j++) {
    float* to = room + int64_t(j) * width;
    if (real.has(from + j))
      memcpy(to, rows.at(from + j), sizeof(float) * size_t(width));
    else
      memset(to, 0, sizeof(float) * size_t(width));
  }
  return {room, width};
}

// `count` rows from i on as columns (width, kWideQueries); what is left over repeats the last.
static void turn_rows(const Strip<const float>& rows, int64_t i, int count, int width, float* to) {
  for (int t = 0; t < kWideQueries; t++) {
    const float* row = rows.at(i + least(t, count - 1));
    for (int d = 0; d < width; d++) to[d * kWideQueries + t] = row[d];
  }
}

// Softmax of at most kWideQueries queries from i on over their windows.
static void near_wide_queries(const NearHead<float>& head, const WideRoom& room, int64_t i, int queries,
                              const Strip<float>& out, float* peak, float* sum, float* rest) {
  const Near& c = head.c;
  const int64_t reach = c.reach_columns, from = most<int64_t>(i - reach, 0);
  const int keys = int(least(i + queries + reach, c.length) - from);
  turn_rows(head.q, i, queries, c.dim, room.query);
  multiply_nn(head.k.at(from), head.k.stride, keys, c.dim, room.query, kWideQueries, kWideVectors, room.weight,
              kWideQueries, nullptr, kInput);

  const V nothing = splat(kNothing);
  V largest[kWideVectors], total[kWideVectors];
  for (int v = 0; v < kWideVectors; v++) largest[v] = nothing, total[v] = V{};
  for (int j = 0; j < keys; j++) {
    const int64_t apart = from + j - i;
    const bool all = apart + reach >= kWideQueries - 1 && apart <= reach, real = head.keys.has(from + j);
    for (int v = 0; v < kWideVectors; v++) {
      float* at = room.weight + j * kWideQueries + v * W;
      V score = real ? load(at) : nothing;
      if (!all) score = lanes_within(apart, reach, v * W) ? score : nothing;
      if (!all || !real) store(at, score);
      largest[v] = vmax(largest[v], score);
    }
  }
  for (int j = 0; j < keys; j++)
    for (int v = 0; v < kWideVectors; v++) {
      float* at = room.weight + j * kWideQueries + v * W;
      const V score = load(at), weight = score > nothing ? vexp((score - largest[v]) * c.scale) : V{};
      store(at, weight);
      total[v] += weight;
    }

  const Strip<const float> values = clean_rows(head.v, head.keys, from, keys, c.value_dim, room.value);
  memset(room.out, 0, sizeof(float) * size_t(kWideQueries) * size_t(c.value_dim));
  multiply_tn(room.weight, kWideQueries, kWideQueries, keys, values.data, values.stride, c.value_dim / W, room.out,
              c.value_dim);
  for (int t = 0; t < queries; t++) {
    float* to = out.at(i + t);
    const float all = total[t / W][t % W];
    const bool any = head.queries.has(i + t) && all > 0;
    peak[t] = any ? largest[t / W][t % W] * c.scale : kNothing;
    sum[t] = any ? all : 1;
    rest[t] = any ? dot(head.q.at(i + t), head.direction, c.dim) + head.offset : 0;
    for (int d = 0; d < c.value_dim; d += W)
      store(to + d, any ? load(room.out + t * c.value_dim + d) * (1 / all) : V{});
  }
}

// A block of queries of a head.
static void near_wide_block(const NearHead<float>& head, int64_t first, int64_t last, const Strip<float>& out,
                            Sums& sums) {
  const WideRoom room(head.c, head.arena);
  for (int64_t i = first; i < last; i += kWideQueries) {
    const int64_t t = i - first;
    near_wide_queries(head, room, i, int(least<int64_t>(kWideQueries, last - i)), out, sums.peak + t, sums.sum + t,
                      sums.rest + t);
  }
}
static void near_wide_block(const NearHead<uint16_t>&, int64_t, int64_t, const Strip<uint16_t>&, Sums&) {}

}  // namespace
