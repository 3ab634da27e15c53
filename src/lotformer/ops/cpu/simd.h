// Vectors of LOT_WIDTH floats with the compiler's own vector types: one source for every instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int W = LOT_WIDTH;
typedef float V __attribute__((vector_size(LOT_WIDTH * 4)));
typedef int32_t VI __attribute__((vector_size(LOT_WIDTH * 4)));
typedef float VU __attribute__((vector_size(LOT_WIDTH * 4), aligned(4), may_alias));

#define LOT_INLINE static inline __attribute__((always_inline))

LOT_INLINE V load(const float* p) { return *reinterpret_cast<const VU*>(p); }
LOT_INLINE void store(float* p, V v) { *reinterpret_cast<VU*>(p) = v; }
// Of the first `count` lanes, at most all; the others are zero, or not written.
LOT_INLINE V load_first(const float* p, int count) {
  if (count >= W) return load(p);
  V v{};
  memcpy(&v, p, sizeof(float) * size_t(count));
  return v;
}
LOT_INLINE void store_first(float* p, int count, V v) {
  if (count >= W)
    store(p, v);
  else
    memcpy(p, &v, sizeof(float) * size_t(count));
}
// The same where all of them may be known to be WHOLE: asking is dearer than loading.
template <bool WHOLE>
LOT_INLINE V load_some(const float* p, int count) {
  return WHOLE ? load(p) : load_first(p, count);
}
template <bool WHOLE>
LOT_INLINE void store_some(float* p, int count, V v) {
  if (WHOLE)
    store(p, v);
  else
    store_first(p, count, v);
}
#if LOT_WIDTH == 4
LOT_INLINE V splat(float x) { return V{x, x, x, x}; }
#elif LOT_WIDTH == 8
LOT_INLINE V splat(float x) { return V{x, x, x, x, x, x, x, x}; }
#else
LOT_INLINE V splat(float x) { return V{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#endif
LOT_INLINE V vmax(V a, V b) { return a > b ? a : b; }
template <class T>
LOT_INLINE T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
LOT_INLINE T most(T a, T b) {
  return a > b ? a : b;
}

// exp to about one unit in the last place for x ≤ 88. Below -86 it is zero, or without VANISHES, which is cheaper,
// exp(-86) ≈ 4e-38. What is not a number stays so.
template <bool VANISHES = true>
LOT_INLINE V vexp(V x) {
  if (!VANISHES) x = x < -86.f ? splat(-86.f) : x;
  const V shifter = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer kept in the low bits
  V shifted = x * 1.44269504088896341f + shifter;
  V n = shifted - shifter;
#ifdef __FMA__
  V r = x - n * 0.693147180559945f;  // the product is not rounded: what is lost of log 2 is below 2e-9 n
#else
  V r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
#endif
  V p = r * 1.3814532257e-3f + 8.3687459217e-3f;  // minimax for |r| ≤ ½ log 2: 3e-9
  p = p * r + 4.1668390952e-2f;
  p = p * r + 1.6666520390e-1f;
  p = p * r + 4.9999993431e-1f;
  p = p * r + 1.f;
  V y = p * r + 1.f;
  VI bits;
  V result;
  memcpy(&bits, &shifted, sizeof bits);
  VI value;
  memcpy(&value, &y, sizeof value);
  value += bits << 23;
  memcpy(&result, &value, sizeof result);
  if (!VANISHES) return result;
  return x < -86.f ? V{} : result;
}

// Natural logarithm of normal positive numbers, about one unit in the last place.
LOT_INLINE V vlog(V x) {
  VI bits;
  memcpy(&bits, &x, sizeof bits);
  VI exponent = (bits - 0x3f3504f3) >> 23;  // so that the mantissa lies in [√½, √2)
  bits -= exponent << 23;
  V mantissa;
  memcpy(&mantissa, &bits, sizeof mantissa);
  V e = __builtin_convertvector(exponent, V);
  V f = mantissa - 1.f;
  V z = f * f;
  V p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  V y = f * z * p + e * -2.12194440e-4f - z * 0.5f;
  return f + y + e * 0.693359375f;
}

struct Add {
  LOT_INLINE V apply(V a, V b) { return a + b; }
};
struct Max {
  LOT_INLINE V apply(V a, V b) { return vmax(a, b); }
};
struct Min {
  LOT_INLINE V apply(V a, V b) { return a < b ? a : b; }
};

// The reduction of all lanes of x, in every lane.
template <class Op>
LOT_INLINE V reduce_spread(V x) {
#if LOT_WIDTH == 16
  x = Op::apply(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = Op::apply(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = Op::apply(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return Op::apply(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif LOT_WIDTH == 8
  x = Op::apply(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = Op::apply(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return Op::apply(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  x = Op::apply(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
  return Op::apply(x, __builtin_shufflevector(x, x, 1, 0, 3, 2));
#endif
}

#if LOT_WIDTH == 4
#define LOT_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define LOT_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LOT_LOW2(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define LOT_HIGH2(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)
#elif LOT_WIDTH == 8
#define LOT_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define LOT_HIGH(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOT_LOW2(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define LOT_HIGH2(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define LOT_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define LOT_HIGH(a, b) __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOT_LOW2(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define LOT_HIGH2(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#endif

// Lane t of the result is the reduction of all lanes of x[t], for W vectors: a transposition that adds as it goes.
template <class Op>
LOT_INLINE V reduce(const V* x) {
  V quads[W / 4];
#pragma GCC unroll 4
  for (int i = 0; i < W / 4; i++) {
    V ab = Op::apply(LOT_LOW(x[4 * i], x[4 * i + 1]), LOT_HIGH(x[4 * i], x[4 * i + 1]));
    V cd = Op::apply(LOT_LOW(x[4 * i + 2], x[4 * i + 3]), LOT_HIGH(x[4 * i + 2], x[4 * i + 3]));
    quads[i] = Op::apply(LOT_LOW2(ab, cd), LOT_HIGH2(ab, cd));  // abcd in every group of four lanes
  }
#if LOT_WIDTH == 4
  return quads[0];
#elif LOT_WIDTH == 8
  return Op::apply(__builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11),
                   __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15));
#else
#define LOT_EVEN(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define LOT_ODD(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
  V low = Op::apply(LOT_EVEN(quads[0], quads[1]), LOT_ODD(quads[0], quads[1]));
  V high = Op::apply(LOT_EVEN(quads[2], quads[3]), LOT_ODD(quads[2], quads[3]));
  return Op::apply(LOT_EVEN(low, high), LOT_ODD(low, high));
#endif
}

LOT_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

LOT_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return x != x ? uint16_t(0x7fc0) : rounded;
}

}  // namespace
