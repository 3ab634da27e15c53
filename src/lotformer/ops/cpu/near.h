// Softmax of every query over the prefix and its window of keys, and the share of its row that they deserve:
//
//   out_i = Σ_j w_ij v_j,   w_ij = exp(s_ij − total_i),   total_i = log Σ_j exp s_ij,   s_ij = scale · q_i·k_j
//   share_i = σ(total_i − q_i·direction − offset)
//
// One token at a time, but for few keys (near_few.h) and for many along a sequence (near_wide.h): all it meets but a
// column of its window is in the first-level cache, where its neighbour left it.
// Backward forms the scores anew, once for every query and, since windows are symmetric, once for every key. That is two
// products of seven too many, but nothing of the size of the windows is kept, and every gradient is written once and in
// one order, whatever the number of threads.
#pragma once
#include "near_few.h"
#include "near_head.h"
#include "near_wide.h"
#include "near_wide_backward.h"

namespace {

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
    const int few = few_keys(c);
    const bool wide = is_wide(c);
    if (wide) near_wide_block(head, first, last, out, sums);
    for (int64_t i = first, t = 0; !wide && i < last;) {
      int run = few ? real_run(head, i, last) : 0;
      if (run >= few && few) {
        near_few_queries(head, i, run, prefix, out, sums.peak + t, sums.sum + t, sums.rest + t);
      } else {  // fewer queries than keys: a vector of keys is fuller
        run = 1;
        near_query(head, i, prefix, out.at(i), sums.peak[t], sums.sum[t], sums.rest[t]);
      }
      i += run;
      t += run;
    }
    sums.write(int(last - first), head.total + first, head.share + first);
  });
}

template <class T>
static void near_backward_of(const Near& c) {
  const auto slope = [&](const NearHead<T>& head) { return c.slope + (head.total - c.total); };
  const bool wide = is_wide_backward(c);
  each_near_block<T>(c, 0, [&](NearHead<T>& head, int64_t first, int64_t last) {
    const Strip<T> grad_q = strip<T>(c.grad_q, head.b, head.h);
    if (wide) return near_wide_query_gradients(head, first, last, slope(head), grad_q);
    const int64_t prefix = head.list_prefix();
    for (int64_t i = first; i < last; i++) near_query_gradient(head, i, prefix, slope(head), grad_q.at(i));
  });
  each_near_block<T>(c, 1, [&](NearHead<T>& head, int64_t first, int64_t last) {
    if (first == c.length) return near_shared_gradients(head, slope(head));
    const Strip<T> grad_k = strip<T>(c.grad_k, head.b, head.h, c.prefix);
    const Strip<T> grad_v = strip<T>(c.grad_v, head.b, head.h, c.prefix);
    if (wide) return near_wide_key_gradients(head, first, last, slope(head), grad_k, grad_v);
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
