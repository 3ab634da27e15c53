// Softmax of every query over the prefix and its window of keys, and the share of its row that they deserve:
//
//   out_i = Σ_j w_ij v_j,   w_ij = exp(s_ij − total_i),   total_i = log Σ_j exp s_ij,   s_ij = scale · q_i·k_j
//   share_i = σ(total_i − q_i·direction − offset)
//
// One token at a time: all it meets but a column of its window is in the first-level cache, where its neighbour left it.
// Backward forms the scores anew, once for every query and, since windows are symmetric, once for every key. That is two
// products of seven too many, but nothing of the size of the windows is kept, and every gradient is written once and in
// one order, whatever the number of threads.
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

template <class T>
static void near_query(NearHead<T>& head, int64_t i, int64_t prefix, T* out, float& peak, float& sum, float& rest) {
  const Near& c = head.c;
  const Met<T>& met = head.met;
  peak = kNothing;
  sum = 1;
  rest = 0;
  if (!head.list_keys(i, prefix)) {
    memset(out, 0, sizeof(T) * size_t(c.value_dim));
    return;
  }
  const T* q = head.q.at(i);
  dot_all(q, met.one, int(met.count), c.dim, met.score);
  V largest = load(met.score), total{};
  for (int64_t t = W; t < met.count; t += W) largest = vmax(largest, load(met.score + t));
  largest = reduce_spread<Max>(largest);  // what fills up the last vector repeats a score
  for (int64_t t = 0; t < met.count; t += W) {
    const V weight = lanes_below(met.count, t) ? vexp((load(met.score + t) - largest) * c.scale) : V{};
    store(met.score + t, weight);
    total += weight;
  }
  total = reduce_spread<Add>(total);
  peak = largest[0] * c.scale;
  sum = total[0];
  rest = dot(q, head.direction, c.dim) + head.offset;
  weigh_all(met.score, met.other, int(met.count), c.value_dim, 1 / sum, out);
}

// The gradient of a query, and its slope: what its scores gain beside `grad · v`, ds_ij = w_ij (grad_i·v_j + slope_i).
template <class T>
static void near_query_gradient(NearHead<T>& head, int64_t i, int64_t prefix, float* slope, T* grad_q) {
  const Near& c = head.c;
  const Met<T>& met = head.met;
  slope[i] = 0;
  if (!head.list_keys(i, prefix)) {
    memset(grad_q, 0, sizeof(T) * size_t(c.dim));
    return;
  }
  dot_all(head.q.at(i), met.one, int(met.count), c.dim, met.score);
  dot_all(head.grad.at(i), met.other, int(met.count), c.value_dim, met.product);
  V mean{};
  for (int64_t t = 0; t < met.count; t += W) {
    const V score = load(met.score + t) * c.scale - head.total[i];
    const V weight = lanes_below(met.count, t) ? vexp(score) : V{};
    store(met.score + t, weight);
    mean += weight * load(met.product + t);
  }
  const float of_total = head.slope_of_total(i);
  slope[i] = of_total - reduce_spread<Add>(mean)[0];
  for (int64_t t = 0; t < met.count; t += W)
    store(met.score + t, load(met.score + t) * (load(met.product + t) + slope[i]));
  weigh_all(met.score, met.one, int(met.count), c.dim, c.scale, head.row);
  weigh_all<true>(&of_total, &head.direction, 1, c.dim, -1.f, head.row);
  write_row(head.row, c.dim, grad_q);
}

// Adds what the listed queries make of the gradients of one key and its value to head.row and head.value.
template <class T>
static void near_key_gradient(NearHead<T>& head, const T* k, const T* v, const float* slope) {
  const Near& c = head.c;
  const Met<T>& met = head.met;
  dot_all(k, met.one, int(met.count), c.dim, met.score);
  dot_all(v, met.other, int(met.count), c.value_dim, met.product);
  for (int64_t t = 0; t < met.count; t++) {
    met.score[t] = met.score[t] * c.scale - head.total[met.index[t]];
    met.product[t] += slope[met.index[t]];
  }
  for (int64_t t = 0; t < met.count; t += W) {
    const V weight = vexp(load(met.score + t));
    store(met.score + t, weight);
    store(met.product + t, load(met.product + t) * weight);
  }
  weigh_all<true>(met.product, met.one, int(met.count), c.dim, c.scale, head.row);
  weigh_all<true>(met.score, met.other, int(met.count), c.value_dim, 1.f, head.value);
}

template <class T>
static void clear_key_gradient(NearHead<T>& head) {
  memset(head.row, 0, sizeof(float) * size_t(head.c.dim));
  memset(head.value, 0, sizeof(float) * size_t(head.c.value_dim));
}

// What all queries of a head share: the keys of the prefix, the direction and the offset.
template <class T>
static void near_shared_gradients(NearHead<T>& head, const float* slope) {
  const Near& c = head.c;
  const Strip<const T> k = strip<const T>(c.k, head.b, head.h), v = strip<const T>(c.v, head.b, head.h);
  const Strip<T> grad_k = strip<T>(c.grad_k, head.b, head.h), grad_v = strip<T>(c.grad_v, head.b, head.h);
  const RealTokens real = real_tokens(c.key_mask, head.b);
  Met<T>& met = head.met;
  for (int64_t p = 0; p < c.prefix; p++) {
    clear_key_gradient(head);
    for (int64_t i = 0; real.has(p) && i < c.length; i += kNearMost) {
      met.list_next(c, head.queries, {head.q, head.grad}, i);
      near_key_gradient(head, k.at(p), v.at(p), slope);
    }
    write_row(head.row, c.dim, grad_k.at(p));
    write_row(head.value, c.value_dim, grad_v.at(p));
  }
  clear_key_gradient(head);
  float of_offset = 0;
  for (int64_t i = 0; i < c.length; i += kNearMost) {
    met.list_next(c, head.queries, {head.q, head.grad}, i);
    float part = 0;
    for (int64_t t = 0; t < met.count; t++) part += met.score[t] = head.slope_of_total(met.index[t]);
    of_offset -= part;
    weigh_all<true>(met.score, met.one, int(met.count), c.dim, -1.f, head.row);
  }
  const int64_t which = head.b * c.heads + head.h;
  write_row(head.row, c.dim, c.grad_direction + which * c.dim);
  c.grad_offset[which] = of_offset;
}

// Runs body(head, first token, last) in parallel for blocks of the tokens of every head, and for `extra` more that are
// empty and begin at the end.
template <class T, class F>
static void each_near_block(const Near& c, int64_t extra, const F& body) {
  struct Job {
    const Near* call;
    const F* body;
    int64_t blocks;
  } job{&c, &body, (c.length + kNearTokens - 1) / kNearTokens + extra};
  c.host.parallel(
      c.batch * c.heads * job.blocks,
      [](int64_t begin, int64_t end, void* context) {
        const Job& j = *static_cast<const Job*>(context);
        const Near& call = *j.call;
        const Scope scope(call.host);
        call.host.scratch(1);  // keeps the stack, and with it the memory, from block to block
        for (int64_t task = begin; task < end; task++) {
          const Scope own(call.host);
          const int64_t which = task / j.blocks, first = least(task % j.blocks * kNearTokens, call.length);
          NearHead<T> head{call, which / call.heads, which % call.heads};
          (*j.body)(head, first, least(first + kNearTokens, call.length));
        }
      },
      &job);
}

template <class T>
static void near_forward_of(const Near& c) {
  each_near_block<T>(c, 0, [&](NearHead<T>& head, int64_t first, int64_t last) {
    const Strip<T> out = strip<T>(c.out, head.b, head.h);
    const int64_t prefix = head.list_prefix();
    Sums sums;
    for (int64_t i = first, t = 0; i < last; i++, t++)
      near_query(head, i, prefix, out.at(i), sums.peak[t], sums.sum[t], sums.rest[t]);
    sums.write(int(last - first), head.total + first, head.share + first);
  });
}

template <class T>
static void near_backward_of(const Near& c) {
  const auto slope = [&](const NearHead<T>& head) { return c.slope + (head.total - c.total); };
  each_near_block<T>(c, 0, [&](NearHead<T>& head, int64_t first, int64_t last) {
    const Strip<T> grad_q = strip<T>(c.grad_q, head.b, head.h);
    const int64_t prefix = head.list_prefix();
    for (int64_t i = first; i < last; i++) near_query_gradient(head, i, prefix, slope(head), grad_q.at(i));
  });
  each_near_block<T>(c, 1, [&](NearHead<T>& head, int64_t first, int64_t last) {
    if (first == c.length) return near_shared_gradients(head, slope(head));
    const Strip<T> grad_k = strip<T>(c.grad_k, head.b, head.h, c.prefix);
    const Strip<T> grad_v = strip<T>(c.grad_v, head.b, head.h, c.prefix);
    for (int64_t j = first; j < last; j++) {
      clear_key_gradient(head);
      if (head.keys.has(j)) {
        head.met.list_window(c, head.queries, {head.q, head.grad}, j, 0);
        near_key_gradient(head, head.k.at(j), head.v.at(j), slope(head));
      }
      write_row(head.row, c.dim, grad_k.at(j));
      write_row(head.value, c.value_dim, grad_v.at(j));
    }
  });
}

static void near_forward(const Near& c) { c.bf16 ? near_forward_of<uint16_t>(c) : near_forward_of<float>(c); }

static void near_backward(const Near& c) { c.bf16 ? near_backward_of<uint16_t>(c) : near_backward_of<float>(c); }

}  // namespace
