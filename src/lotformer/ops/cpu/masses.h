// Masses of keys that are learned: p_j ∝ exp(k_j·u), u = w + α q̄ / √D with q̄ the mean of the real queries.
#pragma once
#include "head.h"
#include "mass_call.h"

namespace {

constexpr int kSummed = 64;  // rows that are added up in fp32 before the sum goes on in double

LOT_INLINE bool is_real(const Mask& mask, int64_t b, int64_t i) {
  return !mask.data || mask.data[b * mask.batch + i * mask.token];
}

LOT_INLINE const float* row_of(const Rows& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<const float*>(x.data) + b * x.batch + h * x.head + i * x.token;
}

// sum[d] += weight · x[d]
LOT_INLINE void add_row(float weight, const float* x, int dim, float* sum) {
  int d = 0;
  for (; d + W <= dim; d += W) store(sum + d, load(sum + d) + splat(weight) * load(x + d));
  for (; d < dim; d++) sum[d] += weight * x[d];
}

LOT_INLINE float dot(const float* x, const float* y, int dim) {
  V total = V{};
  float rest = 0;
  int d = 0;
  for (; d + W <= dim; d += W) total += load(x + d) * load(y + d);
  for (; d < dim; d++) rest += x[d] * y[d];
  return reduce_spread<Add>(total)[0] + rest;
}

// sum[d] = Σ_i weight(i) x_i[d] over real tokens; returns how many these are.
template <class F>
static int64_t sum_rows(const KeyMasses& c, const Rows& rows, const Mask& mask, int64_t length, int64_t b, int64_t h,
                        const F& weight, double* sum) {
  float part[kMaxWidth];
  int64_t count = 0;
  for (int d = 0; d < c.dim; d++) sum[d] = 0;
  for (int64_t first = 0; first < length; first += kSummed) {
    for (int d = 0; d < c.dim; d++) part[d] = 0;
    for (int64_t i = first; i < least(first + kSummed, length); i++) {
      if (!is_real(mask, b, i)) continue;
      count++;
      add_row(weight(i), row_of(rows, b, h, i), c.dim, part);
    }
    for (int d = 0; d < c.dim; d++) sum[d] += part[d];
  }
  return count;
}

static float query_factor(const KeyMasses& c, int64_t h) { return c.query_weight[h] / __builtin_sqrtf(float(c.dim)); }

static void direction_of(const KeyMasses& c, int64_t b, int64_t h, float* direction) {
  memcpy(direction, c.direction + h * c.dim, sizeof(float) * size_t(c.dim));
  if (c.query_weight) add_row(query_factor(c, h), c.mean_query + (b * c.heads + h) * c.dim, c.dim, direction);
}

static void weigh_keys(const KeyMasses& c, int64_t b, int64_t h) {
  double sum[kMaxWidth];
  float direction[kMaxWidth];
  if (c.query_weight) {
    const auto one = [](int64_t) { return 1.f; };
    const int64_t count = sum_rows(c, c.tokens[kQuery], c.masks[kQuery], c.length[kQuery], b, h, one, sum);
    float* mean = c.mean_query + (b * c.heads + h) * c.dim;
    for (int d = 0; d < c.dim; d++) mean[d] = float(sum[d] / double(most<int64_t>(count, 1)));
  }
  direction_of(c, b, h, direction);
  const int64_t length = c.length[kKey];
  float* masses = c.masses + (b * c.heads + h) * length;
  float top = -INFINITY;
  for (int64_t j = 0; j < length; j++) {
    const bool real = is_real(c.masks[kKey], b, j);
    masses[j] = real ? dot(direction, row_of(c.tokens[kKey], b, h, j), c.dim) : -INFINITY;
    top = most(top, masses[j]);
  }
  if (top == -INFINITY) {  // padding alone, or not a number
    const float share = 1 / float(length);
    for (int64_t j = 0; j < length; j++) masses[j] = masses[j] == masses[j] ? share : masses[j];
    return;
  }
  double total = 0;
  for (int64_t first = 0; first < length; first += W) {
    float x[W];
    const int64_t count = least<int64_t>(W, length - first);
    for (int t = 0; t < W; t++) x[t] = t < count ? masses[first + t] - top : -INFINITY;
    store(x, vexp(load(x)));
    for (int64_t t = 0; t < count; t++) total += double(masses[first + t] = x[t]);
  }
  const float inverse = float(1 / total);
  for (int64_t j = 0; j < length; j++) masses[j] *= inverse;
}

// Gradients of the tokens of a head, and of w and α for this sample alone.
static void weigh_keys_back(const KeyMasses& c, int64_t b, int64_t h) {
  double sum[kMaxWidth];
  float direction[kMaxWidth];
  direction_of(c, b, h, direction);
  const int64_t which = b * c.heads + h, length = c.length[kKey];
  const float *masses = c.masses + which * length, *grad = c.grad_masses + which * length;
  double mean = 0;
  for (int64_t j = 0; j < length; j++)
    if (masses[j] != 0) mean += double(masses[j]) * grad[j];
  const auto slope = [&](int64_t j) { return masses[j] != 0 ? masses[j] * float(grad[j] - mean) : 0.f; };
  sum_rows(c, c.tokens[kKey], c.masks[kKey], length, b, h, slope, sum);
  float* grad_direction = c.grad_direction + which * c.dim;
  for (int d = 0; d < c.dim; d++) grad_direction[d] = float(sum[d]);
  for (int64_t j = 0; j < length; j++) {
    float* to = const_cast<float*>(row_of(c.grad_tokens[kKey], b, h, j));
    const float weight = is_real(c.masks[kKey], b, j) ? slope(j) : 0.f;
    for (int d = 0; d < c.dim; d++) to[d] = weight * direction[d];
  }
  if (!c.query_weight) return;
  c.grad_query_weight[which] =
      dot(grad_direction, c.mean_query + which * c.dim, c.dim) / __builtin_sqrtf(float(c.dim));
  int64_t real = 0;
  for (int64_t i = 0; i < c.length[kQuery]; i++) real += is_real(c.masks[kQuery], b, i);
  const float factor = query_factor(c, h) / float(most<int64_t>(real, 1));
  for (int64_t i = 0; i < c.length[kQuery]; i++) {
    float* to = const_cast<float*>(row_of(c.grad_tokens[kQuery], b, h, i));
    const float weight = is_real(c.masks[kQuery], b, i) ? factor : 0.f;
    for (int d = 0; d < c.dim; d++) to[d] = weight * grad_direction[d];
  }
}

static void key_masses(const KeyMasses& c) {
  in_parallel(c.host, c.batch * c.heads, [&](int64_t i) { weigh_keys(c, i / c.heads, i % c.heads); });
}

static void key_masses_backward(const KeyMasses& c) {
  in_parallel(c.host, c.batch * c.heads, [&](int64_t i) { weigh_keys_back(c, i / c.heads, i % c.heads); });
}

}  // namespace
