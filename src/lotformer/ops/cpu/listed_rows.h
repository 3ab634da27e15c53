// Products of one row with rows that lie anywhere, in fp32 or bf16, of any width.
#pragma once
#include <type_traits>

#include "simd.h"

namespace {

constexpr int kPanel = 4;  // vectors of a row that are kept in registers

LOT_INLINE V load(const uint16_t* p) {
  typedef uint16_t Halves __attribute__((vector_size(LOT_WIDTH * 2), aligned(2), may_alias));
  const VI bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), VI) << 16;
  V x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

LOT_INLINE void load_part(const float* p, int count, V& x) { memcpy(&x, p, sizeof(float) * size_t(count)); }
LOT_INLINE void load_part(const uint16_t* p, int count, V& x) {
  for (int i = 0; i < count; i++) x[i] = from_bf16(p[i]);
}

LOT_INLINE void store(uint16_t* p, V x) {
  for (int i = 0; i < W; i++) p[i] = to_bf16(x[i]);
}
LOT_INLINE void store_part(float* p, int count, V x) { memcpy(p, &x, sizeof(float) * size_t(count)); }
LOT_INLINE void store_part(uint16_t* p, int count, V x) {
  for (int i = 0; i < count; i++) p[i] = to_bf16(x[i]);
}

// Calls step(first float, N) for panels of N = kPanel and then 1 whole vectors, and tail(first float, floats) for the rest.
template <class Step, class Tail>
LOT_INLINE void each_panel(int width, const Step& step, const Tail& tail) {
  int d = 0;
  for (; d + kPanel * W <= width; d += kPanel * W) step(d, std::integral_constant<int, kPanel>());
  for (; d + W <= width; d += W) step(d, std::integral_constant<int, 1>());
  if (d < width) tail(d, width - d);
}

// products[t] = x · row_t in whole vectors: `rows` has valid pointers up to there.
template <class T>
static void dot_all(const T* x, const T* const* rows, int count, int width, float* products) {
  for (int t = 0; t < count; t += W) {
    const T* const* group = rows + t;
    V sum[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sum[i] = V{};
    each_panel(
        width,
        [&](int d, auto n) {
          constexpr int N = decltype(n)::value;
          V a[N];
#pragma GCC unroll 4
          for (int v = 0; v < N; v++) a[v] = load(x + d + v * W);
#pragma GCC unroll 16
          for (int i = 0; i < W; i++)
#pragma GCC unroll 4
            for (int v = 0; v < N; v++) sum[i] += a[v] * load(group[i] + d + v * W);
        },
        [&](int d, int left) {
          V a{};
          load_part(x + d, left, a);
          for (int i = 0; i < W; i++) {
            V b{};
            load_part(group[i] + d, left, b);
            sum[i] += a * b;
          }
        });
    store(products + t, reduce<Add>(sum));
  }
}

// Lane t of the result is x_t · y_t, for W pairs of rows.
template <class X, class Y>
LOT_INLINE V dot_pairs(const X* const* x, const Y* const* y, int width) {
  V sum[W];
#pragma GCC unroll 16
  for (int t = 0; t < W; t++) sum[t] = V{};
  int d = 0;
  for (; d + W <= width; d += W)
#pragma GCC unroll 16
    for (int t = 0; t < W; t++) sum[t] += load(x[t] + d) * load(y[t] + d);
  for (int t = 0; d < width && t < W; t++) {
    V a{}, b{};
    load_part(x[t] + d, width - d, a);
    load_part(y[t] + d, width - d, b);
    sum[t] += a * b;
  }
  return reduce<Add>(sum);
}

// to = scale Σ_t weight_t row_t, after what is there if ADD; weights and rows are `step` places apart.
template <bool ADD = false, class T, class To>
static void weigh_all(const float* weight, const T* const* rows, int count, int width, float scale, To* to,
                      int step = 1) {
  each_panel(
      width,
      [&](int d, auto n) {
        constexpr int N = decltype(n)::value;
        V sum[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) sum[v] = V{};
        for (int t = 0; t < count; t++) {
          const V w = splat(weight[t * step]);
#pragma GCC unroll 4
          for (int v = 0; v < N; v++) sum[v] += w * load(rows[t * step] + d + v * W);
        }
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) store(to + d + v * W, (ADD ? load(to + d + v * W) : V{}) + sum[v] * scale);
      },
      [&](int d, int left) {
        V sum{}, old{};
        for (int t = 0; t < count; t++) {
          V b{};
          load_part(rows[t * step] + d, left, b);
          sum += weight[t * step] * b;
        }
        if (ADD) load_part(to + d, left, old);
        store_part(to + d, left, old + sum * scale);
      });
}

// A row of fp32 in the precision of another.
template <class To>
LOT_INLINE void write_row(const float* from, int width, To* to) {
  int d = 0;
  for (; d + W <= width; d += W) store(to + d, load(from + d));
  for (; d < width; d++) store_part(to + d, 1, splat(from[d]));
}

template <class A, class B>
LOT_INLINE float dot(const A* x, const B* y, int width) {
  V sum{};
  int d = 0;
  for (; d + W <= width; d += W) sum += load(x + d) * load(y + d);
  if (d < width) {
    V a{}, b{};
    load_part(x + d, width - d, a);
    load_part(y + d, width - d, b);
    sum += a * b;
  }
  return reduce_spread<Add>(sum)[0];
}

}  // namespace
