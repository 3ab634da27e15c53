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
  void list_window(const Near& c, const RealTokens& real, int64_t i, int64_t kept) {
    const int64_t row = i / c.columns, column = i % c.columns;
    const int64_t left = most<int64_t>(column - c.reach_columns, 0);
    const int64_t right = least(column + c.reach_columns, c.columns - 1);
    const int64_t last = least(row + c.reach_rows, (c.length - 1) / c.columns);
    count = kept;
    for (int64_t r = most<int64_t>(row - c.reach_rows, 0); r <= last; r++) {
      const int64_t end = least(r * c.columns + right + 1, c.length);
      for (int64_t j = r * c.columns + left; j < end; j++)
        if (real.has(j)) index[count++] = j;
    }
  }

  // Lists the real ones of all tokens from i on, as many as fit; returns the first that it did not look at.
  int64_t list_all(const Near& c, const RealTokens& real, int64_t i) {
    for (count = 0; i < c.length && count < kNearMost; i++)
      if (real.has(i)) index[count++] = i;
    return i;
  }

  void point(const Strip<const T>& x, const Strip<const T>& y, int64_t kept = 0) {
    for (int64_t t = kept; t < count; t++) {
      one[t] = x.at(index[t]);
      other[t] = y.at(index[t]);
    }
    for (int64_t t = count; t < round_up(count, W); t++) {
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
  float *row = arena.take<float>(round_up(c.dim, W)), *value = arena.take<float>(round_up(c.value_dim, W));

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

  void list_keys(int64_t i, int64_t prefix) {
    met.list_window(c, keys, i, prefix);
    if (met.count) met.point(k, v, prefix);
    const int64_t next = i + kNearAhead, corner = next + c.reach_rows * c.columns + c.reach_columns;
    if (next < c.length) q.ask(next, c.dim);
    if (corner < c.length) {
      k.ask(corner, c.dim);
      v.ask(corner, c.value_dim);
    }
  }

  float slope_of_total(int64_t i) const {
    return c.grad_share[total - c.total + i] * share[i] * (1 - share[i]);
  }
};

template <class T>
static void near_query(NearHead<T>& head, int64_t i, int64_t prefix, T* out) {
  const Near& c = head.c;
  Met<T>& met = head.met;
  head.total[i] = kNothing;
  head.share[i] = 0;
  if (head.queries.has(i)) head.list_keys(i, prefix);
  if (!head.queries.has(i) || !met.count) {
    memset(out, 0, sizeof(T) * size_t(c.value_dim));
    return;
  }
  const T* q = head.q.at(i);
  dot_all(q, met.one, met.count, c.dim, met.score);
  V largest = splat(kNothing);
  for (int64_t t = 0; t < met.count; t += W) {  // what fills up the last vector repeats a score
    const V s = load(met.score + t) * c.scale;
    store(met.score + t, s);
    largest = vmax(largest, s);
  }
  largest = reduce_spread<Max>(largest);
  for (int64_t t = 0; t < met.count; t += W) store(met.score + t, vexp(load(met.score + t) - largest));
  for (int64_t t = met.count; t < round_up(met.count, W); t++) met.score[t] = 0;
  V sum{};
  for (int64_t t = 0; t < met.count; t += W) sum += load(met.score + t);
  sum = reduce_spread<Add>(sum);
  head.total[i] = largest[0] + vlog(sum)[0];
  const float rest = dot(q, head.direction, c.dim) + head.offset;
  head.share[i] = 1 / (1 + vexp(splat(least(rest - head.total[i], 80.f)))[0]);
  for (int64_t t = 0; t < met.count; t += W) store(met.score + t, load(met.score + t) / sum);
  weigh_all(met.score, met.other, met.count, c.value_dim, head.value);
  write_row(out, head.value, c.value_dim);
}

// The gradient of a query, and its slope: what its scores gain beside `grad · v`, ds_ij = w_ij (grad_i·v_j + slope_i).
template <class T>
static void near_query_gradient(NearHead<T>& head, int64_t i, int64_t prefix, float* slope, T* grad_q) {
  const Near& c = head.c;
  Met<T>& met = head.met;
  slope[i] = 0;
  if (head.queries.has(i)) head.list_keys(i, prefix);
  if (!head.queries.has(i) || !met.count) {
    memset(grad_q, 0, sizeof(T) * size_t(c.dim));
    return;
  }
  dot_all(head.q.at(i), met.one, met.count, c.dim, met.score);
  dot_all(head.grad.at(i), met.other, met.count, c.value_dim, met.product);
  V mean{};
  for (int64_t t = 0; t < met.count; t += W)
    store(met.score + t, vexp(load(met.score + t) * c.scale - head.total[i]));
  for (int64_t t = met.count; t < round_up(met.count, W); t++) met.score[t] = 0;
  for (int64_t t = 0; t < met.count; t += W) mean += load(met.score + t) * load(met.product + t);
  const float of_total = head.slope_of_total(i);
  slope[i] = of_total - reduce_spread<Add>(mean)[0];
  for (int64_t t = 0; t < met.count; t += W)
    store(met.score + t, load(met.score + t) * (load(met.product + t) + slope[i]) * c.scale);
  weigh_all(met.score, met.one, met.count, c.dim, head.row);
  for (int d = 0; d < c.dim; d++) head.row[d] -= of_total * head.direction[d];
  write_row(grad_q, head.row, c.dim);
}

// Adds what the listed queries make of the gradients of one key and its value to head.row and head.value.
template <class T>
static void near_key_gradient(NearHead<T>& head, const T* k, const T* v, const float* slope) {
  const Near& c = head.c;
  Met<T>& met = head.met;
  if (!met.count) return;
  met.point(head.q, head.grad);
  dot_all(k, met.one, met.count, c.dim, met.score);
  dot_all(v, met.other, met.count, c.value_dim, met.product);
  for (int64_t t = 0; t < met.count; t++) {
    met.score[t] = met.score[t] * c.scale - head.total[met.index[t]];
    met.product[t] += slope[met.index[t]];
  }
  for (int64_t t = 0; t < met.count; t += W) {
    const V weight = vexp(load(met.score + t));
    store(met.score + t, weight);
    store(met.product + t, load(met.product + t) * weight * c.scale);
  }
  weigh_all<true>(met.product, met.one, met.count, c.dim, head.row);
  weigh_all<true>(met.score, met.other, met.count, c.value_dim, head.value);
}

template <class T>
static void clear_key_gradient(NearHead<T>& head) {
  memset(head.row, 0, sizeof(float) * size_t(round_up(head.c.dim, W)));
  memset(head.value, 0, sizeof(float) * size_t(round_up(head.c.value_dim, W)));
}

// What all queries of a head share: the keys of the prefix, the direction and the offset.
template <class T>
static void near_shared_gradients(NearHead<T>& head, const float* slope) {
  const Near& c = head.c;
  const Strip<const T> k = strip<const T>(c.k, head.b, head.h), v = strip<const T>(c.v, head.b, head.h);
  const Strip<T> grad_k = strip<T>(c.grad_k, head.b, head.h), grad_v = strip<T>(c.grad_v, head.b, head.h);
  const RealTokens real = real_tokens(c.key_mask, head.b);
  for (int64_t p = 0; p < c.prefix; p++) {
    clear_key_gradient(head);
    for (int64_t i = 0; real.has(p) && i < c.length;) {
      i = head.met.list_all(c, head.queries, i);
      near_key_gradient(head, k.at(p), v.at(p), slope);
    }
    write_row(grad_k.at(p), head.row, c.dim);
    write_row(grad_v.at(p), head.value, c.value_dim);
  }
  clear_key_gradient(head);
  Met<T>& met = head.met;
  float of_offset = 0;
  for (int64_t i = 0; i < c.length;) {
    i = met.list_all(c, head.queries, i);
    float part = 0;
    for (int64_t t = 0; t < met.count; t++) {
      met.one[t] = head.q.at(met.index[t]);
      met.score[t] = -head.slope_of_total(met.index[t]);
      part += met.score[t];
    }
    of_offset += part;
    weigh_all<true>(met.score, met.one, met.count, c.dim, head.row);
  }
  const int64_t which = head.b * c.heads + head.h;
  write_row(c.grad_direction + which * c.dim, head.row, c.dim);
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
    for (int64_t i = first; i < last; i++) near_query(head, i, prefix, out.at(i));
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
        head.met.list_window(c, head.queries, j, 0);
        near_key_gradient(head, head.k.at(j), head.v.at(j), slope(head));
      }
      write_row(grad_k.at(j), head.row, c.dim);
      write_row(grad_v.at(j), head.value, c.value_dim);
    }
  });
}

static void near_forward(const Near& c) { c.bf16 ? near_forward_of<uint16_t>(c) : near_forward_of<float>(c); }

static void near_backward(const Near& c) { c.bf16 ? near_backward_of<uint16_t>(c) : near_backward_of<float>(c); }

}  // namespace
