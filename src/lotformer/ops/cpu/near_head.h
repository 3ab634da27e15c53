// What the passes over near keys share: the rows of a head, the tokens that one token meets, and log-sums of a block.
#pragma once
#include "head.h"
#include "listed_rows.h"
#include "near_call.h"

namespace {

constexpr int64_t kNearTokens = 256;  // of a head: what a thread takes at a time
constexpr int64_t kNearMost = 64;     // queries that a key of the prefix meets at a time
constexpr int64_t kNearAhead = 6;     // tokens: how far ahead rows are asked for

// The rows of one head.
template <class T>
struct Strip {
  T* data;
  int64_t stride;

  T* at(int64_t i) const { return data + i * stride; }
  void ask(int64_t i, int width) const {
    for (int d = 0; d < width; d += kLine) __builtin_prefetch(at(i) + d);
  }
};

template <class T>
LOT_INLINE Strip<T> strip(const Rows& rows, int64_t b, int64_t h, int64_t first = 0) {
  return {static_cast<T*>(rows.data) + b * rows.batch + h * rows.head + first * rows.token, rows.token};
}

struct RealTokens {
  const uint8_t* data;
  int64_t stride;

  bool has(int64_t i) const { return !data || data[i * stride]; }
};

LOT_INLINE RealTokens real_tokens(const Mask& mask, int64_t b, int64_t first = 0) {
  return {mask.data ? mask.data + b * mask.batch + first * mask.token : nullptr, mask.token};
}

// Tokens that one token meets: where they are, two rows of each (q and the gradient of out, or k and v), and room for the
// products with them. Lists are filled up to whole vectors.
template <class T>
struct Met {
  struct Pair {
    Strip<const T> one, other;
  };

  int64_t count, *index;
  const T **one, **other;
  float *score, *product;

  Met(const Near& c, const Arena& arena) : count(0) {
    const int64_t rows = least(2 * c.reach_rows + 1, (c.length + c.columns - 1) / c.columns);
    const int64_t window = rows * least(2 * c.reach_columns + 1, c.columns);
    const int64_t room = round_up(most(c.prefix + window, kNearMost), W);
    index = arena.take<int64_t>(room);
    one = arena.take<const T*>(room);
    other = arena.take<const T*>(room);
    score = arena.take<float>(room);
    product = arena.take<float>(room);
  }

  // Lists the real tokens of the window of token i after the first `kept`.
  void list_window(const Near& c, const RealTokens& real, const Pair& rows, int64_t i, int64_t kept) {
    const int64_t row = i / c.columns, column = i % c.columns;
    const int64_t left = most<int64_t>(column - c.reach_columns, 0);
    const int64_t right = least(column + c.reach_columns, c.columns - 1);
    const int64_t last = least(row + c.reach_rows, (c.length - 1) / c.columns);
    count = kept;
    for (int64_t r = most<int64_t>(row - c.reach_rows, 0); r <= last; r++)
      list_range(real, rows, r * c.columns + left, least(r * c.columns + right + 1, c.length));
    fill_up();
  }

  // Lists the real ones of `kNearMost` tokens from i on.
  void list_next(const Near& c, const RealTokens& real, const Pair& rows, int64_t i) {
    count = 0;
    list_range(real, rows, i, least(i + kNearMost, c.length));
    fill_up();
  }

 private:
  void list_range(const RealTokens& real, const Pair& rows, int64_t i, int64_t end) {
    const T *x = rows.one.at(i), *y = rows.other.at(i);
    for (; i < end; i++, x += rows.one.stride, y += rows.other.stride) {
      index[count] = i;
      one[count] = x;
      other[count] = y;
      count += real.has(i);
    }
  }

  void fill_up() {
    for (int64_t t = count; count && t < round_up(count, W); t++) {
      one[t] = one[count - 1];
      other[t] = other[count - 1];
    }
  }
};

// One head of a call, with the scratch of a thread.
template <class T>
struct NearHead {
  const Near& c;
  int64_t b, h;
  Strip<const T> q = strip<const T>(c.q, b, h), k = strip<const T>(c.k, b, h, c.prefix);
  Strip<const T> v = strip<const T>(c.v, b, h, c.prefix), grad = strip<const T>(c.grad_out, b, h);
  RealTokens queries = real_tokens(c.query_mask, b), keys = real_tokens(c.key_mask, b, c.prefix);
  const float* direction = c.direction + (b * c.heads + h) * c.dim;
  float offset = c.offset[b * c.heads + h];
  float* total = c.total + (b * c.heads + h) * c.length;
  float* share = c.share + (b * c.heads + h) * c.length;
  Arena arena{&c.host};
  Met<T> met{c, arena};
  float *row = arena.take<float>(c.dim), *value = arena.take<float>(c.value_dim);  // to be written

  // The real keys of the prefix, which every query meets first. Returns how many they are.
  int64_t list_prefix() {
    const RealTokens real = real_tokens(c.key_mask, b);
    const Strip<const T> all_k = strip<const T>(c.k, b, h), all_v = strip<const T>(c.v, b, h);
    int64_t count = 0;
    for (int64_t p = 0; p < c.prefix; p++) {
      if (!real.has(p)) continue;
      met.one[count] = all_k.at(p);
      met.other[count++] = all_v.at(p);
    }
    return count;
  }

  // What query i meets, if it is real; whether that is anything.
  bool list_keys(int64_t i, int64_t prefix) {
    if (!queries.has(i)) return false;
    met.list_window(c, keys, {k, v}, i, prefix);
    const int64_t next = i + kNearAhead, corner = next + c.reach_rows * c.columns + c.reach_columns;
    if (next < c.length) q.ask(next, c.dim);
    if (corner < c.length) {
      k.ask(corner, c.dim);
      v.ask(corner, c.value_dim);
    }
    return met.count > 0;
  }

  float slope_of_total(int64_t i) const { return c.grad_share[total - c.total + i] * share[i] * (1 - share[i]); }
};

// Whether a lane of the vector from t on is below `count`.
LOT_INLINE VI lanes_below(int64_t count, int64_t t) {
  VI lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return lane < int32_t(least<int64_t>(count - t, W));
}

// What is known of the log-sums of a block of queries before logarithms are taken, of a whole vector at a time.
struct Sums {
  float peak[kNearTokens], sum[kNearTokens], rest[kNearTokens];  // total = peak + log(sum), share = σ(total − rest)

  void write(int count, float* total, float* share) const {
    for (int t = 0; t < count; t += W) {
      const V most = load(peak + t), log_sum = most + vlog(load(sum + t)), below = load(rest + t) - log_sum;
      const V part = 1.f / (1.f + vexp(below < 80.f ? below : splat(80.f)));
      store_part(total + t, least(count - t, W), log_sum);
      store_part(share + t, least(count - t, W), most > kNothing ? part : V{});
    }
  }
};

}  // namespace
