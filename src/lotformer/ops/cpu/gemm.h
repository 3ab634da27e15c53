// The two small matrix products of the operator, with one operand resident in the first-level cache.
#pragma once
#include "simd.h"

namespace {

// Keeps a vector in its register where the compiler would rather load it again for every use.
#if defined(__x86_64__)
#define LOT_KEEP(x) asm("" : "+x"(x))
#else
#define LOT_KEEP(x)
#endif

constexpr int kTileVectors = 2;
constexpr int kGroup = 6;  // rows of C that are finished together: 6 × 2 or twice 3 × 4 accumulators

constexpr int kLine = 16;   // floats of a cache line
constexpr int kAhead = 18;  // rows: how far a product that streams rows asks for them in advance

// Adds A B to MR rows and NV vectors. Twelve accumulators hide the latency of the multiply-add and leave registers for the
// operands: all MR of A and one of B, or all NV of B and one of A.
template <int MR, int NV>
LOT_INLINE void tile_nn(const float* const* a, int inner, const float* b, int64_t ldb, V (&acc)[MR][NV]) {
  for (int k = 0; k < inner; k++) {
    if (MR < NV) {
      V av[MR];
#pragma GCC unroll 8
      for (int t = 0; t < MR; t++) av[t] = splat(a[t][k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        V bv = load(b + k * ldb + v * W);
        LOT_KEEP(bv);
#pragma GCC unroll 8
        for (int t = 0; t < MR; t++) acc[t][v] += av[t] * bv;
      }
    } else {
      V bv[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) bv[v] = load(b + k * ldb + v * W);
#pragma GCC unroll 8
      for (int t = 0; t < MR; t++) {
        const V av = splat(a[t][k]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[t][v] += av * bv[v];
      }
    }
  }
}

template <int MR, int NV, bool ADD>
LOT_INLINE void finish_nn(const float* const* a, int valid, int inner, const float* b, int64_t ldb, float* c,
                          int64_t ldc, const float* row_scale) {
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int t = 0; t < MR; t++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[t][v] = V{};
  tile_nn<MR, NV>(a, inner, b, ldb, acc);
#pragma GCC unroll 8
  for (int t = 0; t < MR; t++) {
    if (t >= valid) return;
    if (row_scale) {
      const V scale = splat(row_scale[t]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[t][v] *= scale;
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + t * ldc + v * W, ADD ? load(c + t * ldc + v * W) + acc[t][v] : acc[t][v]);
  }
}

// Rows beyond the valid ones repeat the last.
LOT_INLINE void point_at_rows(const float* a, int64_t lda, int valid, const float** rows) {
  for (int t = 0; t < kGroup; t++) rows[t] = a + least(t, valid - 1) * lda;
}

LOT_INLINE void ask_for_group(const float* rows, int64_t stride, int lines) {
  for (int t = 0; t < kGroup; t++)
    for (int k = 0; k < lines; k++) __builtin_prefetch(rows + (t + kAhead) * stride + k * kLine);
}

// C[i, :] = row_scale[i] · Σ_k A[i, k] B[k, :] for `rows` rows and `vectors` vectors of columns. The rows of A
// (kInput) or of C (kOutput) may be streamed from memory: then they are asked for in advance. With ADD, C gains that.
enum Streamed { kNeither, kInput, kOutput };
template <bool ADD = false>
static void multiply_nn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, int vectors,
                        float* c, int64_t ldc, const float* row_scale = nullptr,
                        Streamed streamed = kNeither) {
  const float* fetch = streamed == kInput ? a : streamed == kOutput ? c : nullptr;
  const int64_t stride = streamed == kInput ? lda : ldc;
  const int lines = ((streamed == kInput ? inner : vectors * W) + kLine - 1) / kLine;
  for (int i = 0; i < rows; i += kGroup) {
    const int valid = least(kGroup, rows - i);
    const float* pa[kGroup];
    point_at_rows(a + i * lda, lda, valid, pa);
    if (fetch) ask_for_group(fetch + i * stride, stride, lines);
    const float* scale = row_scale ? row_scale + i : nullptr;
    float* to = c + i * ldc;
    int v = 0;
    for (; v + 4 <= vectors; v += 4) {
      finish_nn<3, 4, ADD>(pa, valid, inner, b + v * W, ldb, to + v * W, ldc, scale);
      finish_nn<3, 4, ADD>(pa + 3, valid - 3, inner, b + v * W, ldb, to + 3 * ldc + v * W, ldc, scale ? scale + 3 : nullptr);
    }
    if (v + 2 <= vectors) {
      finish_nn<6, 2, ADD>(pa, valid, inner, b + v * W, ldb, to + v * W, ldc, scale);
      v += 2;
    }
    if (v < vectors) finish_nn<6, 1, ADD>(pa, valid, inner, b + v * W, ldb, to + v * W, ldc, scale);
  }
}

template <int MR, int NV>
LOT_INLINE void tile_tn(const float* a, int64_t lda, int inner, const float* b, int64_t ldb, float* c, int64_t ldc) {
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int t = 0; t < MR; t++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[t][v] = V{};
  for (int k = 0; k < inner; k++) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) bv[v] = load(b + k * ldb + v * W);
#pragma GCC unroll 8
    for (int t = 0; t < MR; t++) {
      const V av = splat(a[k * lda + t]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[t][v] += av * bv[v];
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < MR; t++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + t * ldc + v * W, load(c + t * ldc + v * W) + acc[t][v]);
}

// Rows that will be read soon, asked for a few at a time so that the requests do not queue up.
struct Ahead {
  const float* row;
  int64_t stride;
  int rows, lines;

  void ask(int count) {
    for (; count > 0 && rows > 0; count--, rows--, row += stride)
      for (int l = 0; l < lines; l++) __builtin_prefetch(row + l * kLine, 0, 2);
  }
};

template <int NV>
static void panel_tn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, float* c,
                     int64_t ldc, Ahead& ahead) {
  int j = 0;
  while (j < rows) {  // rows is a multiple of four
    const int left = rows - j;
    ahead.ask(4);
    if (left == 4 || left == 8) {
      tile_tn<4, NV>(a + j, lda, inner, b, ldb, c + j * ldc, ldc);
      j += 4;
    } else {
      tile_tn<6, NV>(a + j, lda, inner, b, ldb, c + j * ldc, ldc);
      j += 6;
    }
  }
}

// C[j, :] += Σ_i A[i, j] B[i, :] for `rows` columns j of A (a multiple of four) and `vectors` vectors of columns of B.
// B is streamed: the rows that follow it are asked for on the way.
static void multiply_tn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, int vectors,
                        float* c, int64_t ldc) {
  Ahead ahead{b + inner * ldb, ldb, inner, (vectors * W + kLine - 1) / kLine};
  int v = 0;
  for (; v + kTileVectors <= vectors; v += kTileVectors)
    panel_tn<kTileVectors>(a, lda, rows, inner, b + v * W, ldb, c + v * W, ldc, ahead);
  if (v < vectors) panel_tn<1>(a, lda, rows, inner, b + v * W, ldb, c + v * W, ldc, ahead);
}

// The tiles of C += AᵀA that touch the upper triangle.
static void multiply_symmetric(const float* a, int64_t lda, int vectors, int inner, float* c, int64_t ldc) {
  Ahead nothing{nullptr, 0, 0, 0};
  int v = 0;
  for (; v + 2 <= vectors; v += 2) {
    panel_tn<2>(a, lda, (v + 1) * W, inner, a + v * W, lda, c + v * W, ldc, nothing);
    const int low = (v + 1) * W;  // below the diagonal of the first vector only the second is left
    panel_tn<1>(a + low, lda, W, inner, a + low, lda, c + low * ldc + low, ldc, nothing);
  }
  if (v < vectors) panel_tn<1>(a, lda, (v + 1) * W, inner, a + v * W, lda, c + v * W, ldc, nothing);
}

}  // namespace
