// The two small matrix products of the operator, with one operand resident in the first-level cache.
#pragma once
#include "simd.h"

namespace {

constexpr int kTileRows = 6;  // 6 × 2 accumulators, two vectors of B and one of A fill sixteen registers
constexpr int kTileVectors = 2;

constexpr int kLine = 16;   // floats of a cache line
constexpr int kAhead = 18;  // rows: how far a product that streams rows asks for them in advance

template <int MR, int NV>
LOT_INLINE void tile_nn(const float* const* a, int inner, const float* b, int64_t ldb, V (&acc)[MR][NV]) {
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
      const V av = splat(a[t][k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[t][v] += av * bv[v];
    }
  }
}

template <int NV>
static void panel_nn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, float* c,
                     int64_t ldc, const float* row_scale, const float* fetch, int64_t stride, int lines) {
  for (int i = 0; i < rows; i += kTileRows) {
    const int valid = least(kTileRows, rows - i);
    const float* pa[kTileRows];
    for (int t = 0; t < kTileRows; t++) pa[t] = a + (i + least(t, valid - 1)) * lda;
    if (fetch)
      for (int t = 0; t < kTileRows; t++)
        for (int k = 0; k < lines; k++) __builtin_prefetch(fetch + (i + t + kAhead) * stride + k * kLine);
    V acc[kTileRows][NV];
    tile_nn<kTileRows, NV>(pa, inner, b, ldb, acc);
    if (row_scale) {
#pragma GCC unroll 8
      for (int t = 0; t < kTileRows; t++) {
        const V scale = splat(row_scale[i + least(t, valid - 1)]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[t][v] *= scale;
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTileRows; t++)
      if (t < valid)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(c + (i + t) * ldc + v * W, acc[t][v]);
  }
}

// C[i, :] = row_scale[i] · Σ_k A[i, k] B[k, :] for `rows` rows and `vectors` vectors of columns. The rows of A
// (kInput) or of C (kOutput) may be streamed from memory: then they are asked for in advance.
enum Streamed { kNeither, kInput, kOutput };
static void multiply_nn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, int vectors,
                        float* c, int64_t ldc, const float* row_scale = nullptr,
                        Streamed streamed = kNeither) {
  const float* fetch = streamed == kInput ? a : streamed == kOutput ? c : nullptr;
  const int64_t stride = streamed == kInput ? lda : ldc;
  const int lines = ((streamed == kInput ? inner : vectors * W) + kLine - 1) / kLine;
  int v = 0;
  for (; v + kTileVectors <= vectors; v += kTileVectors)
    panel_nn<kTileVectors>(a, lda, rows, inner, b + v * W, ldb, c + v * W, ldc, row_scale, v ? nullptr : fetch, stride,
                           lines);
  if (v < vectors)
    panel_nn<1>(a, lda, rows, inner, b + v * W, ldb, c + v * W, ldc, row_scale, v ? nullptr : fetch, stride, lines);
}

template <int MR, int NV>
LOT_INLINE void tile_tn(const float* a, int64_t lda, int inner, const float* b, int64_t ldb, float* c, int64_t ldc,
                        const float* fetch) {
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int t = 0; t < MR; t++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[t][v] = V{};
  for (int k = 0; k < inner; k++) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) bv[v] = load(b + k * ldb + v * W);
    __builtin_prefetch(fetch + k * ldb);
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

template <int NV>
static void panel_tn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, float* c,
                     int64_t ldc, const float* fetch) {
  int j = 0;
  while (j < rows) {  // rows is a multiple of four
    const int left = rows - j;
    if (left == 4 || left == 8) {
      tile_tn<4, NV>(a + j, lda, inner, b, ldb, c + j * ldc, ldc, j ? b : fetch);
      j += 4;
    } else {
      tile_tn<6, NV>(a + j, lda, inner, b, ldb, c + j * ldc, ldc, j ? b : fetch);
      j += 6;
    }
  }
}

// C[j, :] += Σ_i A[i, j] B[i, :] for `rows` columns j of A (a multiple of four) and `vectors` vectors of columns of B.
// Each panel of B asks for the next one, the last panel for the rows that follow B.
static void multiply_tn(const float* a, int64_t lda, int rows, int inner, const float* b, int64_t ldb, int vectors,
                        float* c, int64_t ldc) {
  int v = 0;
  for (; v + kTileVectors <= vectors; v += kTileVectors)
    panel_tn<kTileVectors>(a, lda, rows, inner, b + v * W, ldb, c + v * W, ldc,
                           v + kTileVectors < vectors ? b + (v + kTileVectors) * W : b + inner * ldb);
  if (v < vectors) panel_tn<1>(a, lda, rows, inner, b + v * W, ldb, c + v * W, ldc, b + inner * ldb);
}

// The tiles of C += AᵀA that touch the upper triangle.
static void multiply_symmetric(const float* a, int64_t lda, int vectors, int inner, float* c, int64_t ldc) {
  int v = 0;
  for (; v + kTileVectors <= vectors; v += kTileVectors)
    panel_tn<kTileVectors>(a, lda, (v + kTileVectors) * W, inner, a + v * W, lda, c + v * W, ldc, a + v * W);
  if (v < vectors) panel_tn<1>(a, lda, (v + 1) * W, inner, a + v * W, lda, c + v * W, ldc, a + v * W);
}

}  // namespace
