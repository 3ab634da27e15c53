// Polarised rows of a prefix: keys and values are read once, in chunks whose softmax is put together afterwards.
#pragma once
#include "head.h"
#include "pooling_call.h"

namespace {

constexpr int64_t kChunk = 128;  // keys; the same for any number of threads, so that sums do not change

// x^p for x > 0, and its derivative.
LOT_INLINE V power(V x, float p) {
  if (p == 1.f) return x;
  if (p != 0.5f) return vexp(vlog(x) * p);
  V root;
  for (int i = 0; i < W; i++) root[i] = std::sqrt(x[i]);
  return root;
}

LOT_INLINE V slope(V x, float p) { return p == 1.f ? splat(1.f) : power(x, p) * p / x; }

// A chunk of the keys of a head of a sample.
struct Chunk {
  const Pool* call;
  int64_t b, h, first;
  int count;

  bool is_real(int j) const {
    const Mask& m = call->mask;
    return !m.data || m.data[b * m.batch + (first + j) * m.token];
  }
  float* at(const Rows& rows, int64_t i) const {
    return static_cast<float*>(rows.data) + b * rows.batch + h * rows.head + i * rows.token;
  }
  float* key(const Rows& rows, int j) const { return at(rows, first + j); }
  float* plan(int64_t row) const {
    return call->plan + ((b * call->heads + h) * call->rows + row) * call->length + first;
  }
};

struct Chunks {
  int64_t each, count;

  explicit Chunks(const Pool& c)
      : each((c.length + kChunk - 1) / kChunk), count(c.batch * c.heads * each) {}
  Chunk at(const Pool& c, int64_t i) const {
    const int64_t head = i / each, first = i % each * kChunk;
    return {&c, head / c.heads, head % c.heads, first, int(least(kChunk, c.length - first))};
  }
};

// Rows of a head as whole vectors, with zeros behind the last channel.
static float* read_padded(const Chunk& k, const Rows& rows, int width, const Arena& arena) {
  const int64_t padded = round_up(width, W);
  float* to = arena.zeros<float>(k.call->rows * padded);
  for (int64_t p = 0; p < k.call->rows; p++) memcpy(to + p * padded, k.at(rows, p), sizeof(float) * size_t(width));
  return to;
}

// Asks for the row that is read W keys later: rows of one head lie far apart, where no prefetcher looks for them.
LOT_INLINE void ask_for_row(const float* row, int64_t token, int width) {
  for (int d = 0; d < width; d += kLine) __builtin_prefetch(row + W * token + d);
}

// Like and opposite scores of one query with W keys from j on, before they are clamped; padding gives zeros.
template <bool WHOLE>
LOT_INLINE void polarised(const Chunk& k, const float* q, int j, V* like, V* opposite) {
  const Pool& c = *k.call;
  V positive[W], negative[W];
  for (int t = 0; t < W; t++) {
    positive[t] = negative[t] = V{};
    if (j + t >= k.count || !k.is_real(j + t)) continue;
    const float* x = k.key(c.keys, j + t);
    ask_for_row(x, c.keys.token, c.dim);
    for (int d = 0; d < c.dim; d += W) {
      const V product = load(q + d) * load_some<WHOLE>(x + d, c.dim - d);
      // written so that what is not a number stays so
      positive[t] += product < V{} ? V{} : product;
      negative[t] -= product > V{} ? V{} : product;
    }
  }
  *like = reduce<Add>(positive) * c.beta;
  *opposite = reduce<Add>(negative) * c.beta;
}

LOT_INLINE V at_least(V x, float least) { return x < splat(least) ? splat(least) : x; }

// The softmax of a chunk for one query: weights go to the plan, up to `sum`, and the values they pool to `pooled`.
struct Part {
  float top, sum;
};

template <bool WHOLE>
static Part pool_chunk(const Chunk& k, const float* q, float* plan, float* pooled) {
  const Pool& c = *k.call;
  float scores[kChunk];
  float top = kNothing;
  for (int j = 0; j < k.count; j += W) {
    V like, opposite;
    polarised<WHOLE>(k, q, j, &like, &opposite);
    store(scores + j, power(at_least(like, kLeastScore), c.powers[0]) +
                          power(at_least(opposite, kLeastScore), c.powers[1]));
    for (int t = j; t < least(j + W, k.count); t++)
      if (k.is_real(t) && !(scores[t] <= top)) top = scores[t];
  }
  Part part{top, 0};
  for (int j = 0; j < k.count; j += W) {
    store(scores + j, vexp(load(scores + j) - top));
    for (int t = j; t < least(j + W, k.count); t++) {
      if (!k.is_real(t)) scores[t] = 0;
      part.sum += scores[t];
    }
  }
  memcpy(plan, scores, sizeof(float) * size_t(k.count));
  memset(pooled, 0, sizeof(float) * size_t(round_up(c.value_dim, W)));
  for (int j = 0; j < k.count; j++) {  // row by row, as they lie in memory
    if (!k.is_real(j)) continue;
    const float* x = k.key(c.values, j);
    ask_for_row(x, c.values.token, c.value_dim);
    for (int d = 0; d < c.value_dim; d += W)
      store(pooled + d, load(pooled + d) + load_some<WHOLE>(x + d, c.value_dim - d) * scores[j]);
  }
  return part;
}

// From the parts of all chunks to a row, and to a plan that sums to one.
static void put_together(const Chunk& k, int64_t row, int64_t chunks, const Part* parts, const float* pooled,
                         int64_t part_step, int64_t pooled_step) {
  const Pool& c = *k.call;
  float top = kNothing;
  for (int64_t i = 0; i < chunks; i++)
    if (!(parts[i * part_step].top <= top)) top = parts[i * part_step].top;
  double total = 0;
  for (int64_t i = 0; i < chunks; i++) total += std::exp(double(parts[i * part_step].top) - top) * parts[i * part_step].sum;
  float* out = k.at(c.out, row);
  memset(out, 0, sizeof(float) * size_t(c.value_dim));
  for (int64_t i = 0; i < chunks; i++) {
    const float scale = total == 0 ? 0.f : float(std::exp(double(parts[i * part_step].top) - top) / total);
    for (int d = 0; d < c.value_dim; d++) out[d] += scale * pooled[i * pooled_step + d];
    float* plan = k.plan(row) + i * kChunk;
    for (int64_t j = 0; j < least(kChunk, c.length - i * kChunk); j++) plan[j] *= scale;
  }
}

template <bool WHOLE>
static void pool_rows(const Pool& c) {
  const Scope scope(c.host);
  const Arena arena{&c.host};
  const Chunks chunks(c);
  const int64_t width = round_up(c.value_dim, W);
  Part* parts = arena.take<Part>(chunks.count * c.rows);
  float* pooled = arena.take<float>(chunks.count * c.rows * width);
  in_parallel(c.host, chunks.count, [&](int64_t i) {
    const Scope own(c.host);
    const Chunk k = chunks.at(c, i);
    const float* q = read_padded(k, c.queries, c.dim, arena);
    for (int64_t p = 0; p < c.rows; p++)
      parts[i * c.rows + p] = pool_chunk<WHOLE>(k, q + p * round_up(c.dim, W), k.plan(p), pooled + (i * c.rows + p) * width);
  });
  in_parallel(c.host, c.batch * c.heads, [&](int64_t head) {
    const int64_t i = head * chunks.each;
    for (int64_t p = 0; p < c.rows; p++)
      put_together(chunks.at(c, i), p, chunks.each, parts + i * c.rows + p, pooled + (i * c.rows + p) * width, c.rows,
                   c.rows * width);
  });
}

// Gradients of W keys and values from j on, and what they add to that of the queries.
template <bool WHOLE>
static void reverse_keys(const Chunk& k, const float* q, const float* grad, const float* inner, int j, V* factors,
                         float* dq) {
  const Pool& c = *k.call;
  const int64_t width = round_up(c.dim, W), value_width = round_up(c.value_dim, W);
  const int count = least(W, k.count - j);
  for (int64_t p = 0; p < c.rows; p++) {
    V part[W], like, opposite;
    for (int t = 0; t < W; t++) {
      part[t] = V{};
      if (t >= count || !k.is_real(j + t)) continue;
      const float* v = k.key(c.values, j + t);
      ask_for_row(v, c.values.token, c.value_dim);
      for (int d = 0; d < c.value_dim; d += W) part[t] += load(grad + p * value_width + d) * load_some<WHOLE>(v + d, c.value_dim - d);
    }
    const V score = load_first(k.plan(p) + j, count) * (reduce<Add>(part) - inner[p]) * c.beta;
    polarised<WHOLE>(k, q + p * width, j, &like, &opposite);
    const V none = V{};
    factors[2 * p] = like < splat(kLeastScore) ? none : score * slope(at_least(like, kLeastScore), c.powers[0]);
    factors[2 * p + 1] =
        opposite < splat(kLeastScore) ? none : -score * slope(at_least(opposite, kLeastScore), c.powers[1]);
  }
  for (int t = 0; t < count; t++) {
    float *dk = k.key(c.grad_keys, j + t), *dv = k.key(c.grad_values, j + t);
    if (!k.is_real(j + t)) {
      memset(dk, 0, sizeof(float) * size_t(c.dim));
      memset(dv, 0, sizeof(float) * size_t(c.value_dim));
      continue;
    }
    const float* x = k.key(c.keys, j + t);
    for (int d = 0; d < c.dim; d += W) {
      const V key = load_some<WHOLE>(x + d, c.dim - d);
      V sum = V{};
      for (int64_t p = 0; p < c.rows; p++) {
        const V query = load(q + p * width + d), product = query * key;
        const V factor = product > V{} ? splat(factors[2 * p][t]) : product < V{} ? splat(factors[2 * p + 1][t]) : V{};
        sum += query * factor;
        store(dq + p * width + d, load(dq + p * width + d) + key * factor);
      }
      store_some<WHOLE>(dk + d, c.dim - d, sum);
    }
    for (int d = 0; d < c.value_dim; d += W) {
      V sum = V{};
      for (int64_t p = 0; p < c.rows; p++) sum += load(grad + p * value_width + d) * k.plan(p)[j + t];
      store_some<WHOLE>(dv + d, c.value_dim - d, sum);
    }
  }
}

template <bool WHOLE>
static void reverse_rows(const Pool& c) {
  const Scope scope(c.host);
  const Arena arena{&c.host};
  const Chunks chunks(c);
  const int64_t width = round_up(c.dim, W), value_width = round_up(c.value_dim, W);
  float* partial = arena.zeros<float>(chunks.count * c.rows * width);
  in_parallel(c.host, chunks.count, [&](int64_t i) {
    const Scope own(c.host);
    const Chunk k = chunks.at(c, i);
    const float* q = read_padded(k, c.queries, c.dim, arena);
    const float* grad = read_padded(k, c.grad, c.value_dim, arena);
    const float* rows = read_padded(k, c.out, c.value_dim, arena);
    float* inner = arena.take<float>(c.rows);
    for (int64_t p = 0; p < c.rows; p++) {
      double sum = 0;
      for (int d = 0; d < c.value_dim; d++) sum += double(grad[p * value_width + d]) * rows[p * value_width + d];
      inner[p] = float(sum);
    }
    V* factors = arena.take<V>(2 * c.rows);
    for (int j = 0; j < k.count; j += W)
      reverse_keys<WHOLE>(k, q, grad, inner, j, factors, partial + i * c.rows * width);
  });
  for (int64_t head = 0; head < c.batch * c.heads; head++)
    for (int64_t p = 0; p < c.rows; p++)
      for (int d = 0; d < c.dim; d++) {
        float sum = 0;
        for (int64_t i = head * chunks.each; i < (head + 1) * chunks.each; i++) sum += partial[(i * c.rows + p) * width + d];
        c.grad_queries[(head * c.rows + p) * c.dim + d] = sum;
      }
}

static bool is_whole(const Pool& c) { return c.dim % W == 0 && c.value_dim % W == 0; }
static void pool(const Pool& c) { (is_whole(c) ? pool_rows<true> : pool_rows<false>)(c); }
static void pool_backward(const Pool& c) { (is_whole(c) ? reverse_rows<true> : reverse_rows<false>)(c); }

}  // namespace
