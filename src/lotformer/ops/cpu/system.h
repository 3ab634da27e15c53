// The Hessian of the semi-dual as a small linear system, in double.
#pragma once
#include "head.h"

namespace {

constexpr int kLanes = W / 2;
typedef double VD __attribute__((vector_size(LOT_WIDTH * 4), aligned(8), may_alias));

LOT_INLINE VD load_doubles(const double* p) { return *reinterpret_cast<const VD*>(p); }
LOT_INLINE void store_doubles(double* p, VD x) { *reinterpret_cast<VD*>(p) = x; }

// Edges of the graph whose Laplacian is the Hessian, and solves with it: the scaled and filled Hessian is L D Lᵀ. Rows of
// upper triangles are read from the whole vector that holds their diagonal on; what is left of it in there, and beyond the
// rank, is zero.
struct System {
  int rank, ld;
  double* edges;            // (rank, ld), strictly upper
  double *upper, *lower;    // (rank, ld), strictly triangular: D Lᵀ, and L
  double* inverse;          // (ld): 1 / D
  double *weight, *degree;  // (ld)
};

static System open_system(const Head& head) {
  const int64_t rank = head.pivots.rank, ld = head.pivots.padded;
  double* numbers = head.arena.zeros<double>(3 * ld);
  return {int(rank), int(ld), head.arena.take<double>(rank * ld), head.arena.take<double>(rank * ld),
          head.arena.zeros<double>(rank * ld), numbers, numbers + ld, numbers + 2 * ld};
}

LOT_INLINE int vector_of(int i) { return i / kLanes * kLanes; }

template <int N>
LOT_INLINE void subtract(double factor, const double* from, VD (&x)[N]) {
#pragma GCC unroll 8
  for (int v = 0; v < N; v++) x[v] -= factor * load_doubles(from + v * kLanes);
}

// row[from …) −= Σ_{k < i} L[i, k] U[k, from …), for N vectors that stay in registers. Every second k has a sum of its
// own, because few vectors would wait for each other.
template <int N>
LOT_INLINE void eliminate(const System& s, int i, int from, double* row) {
  const double* factors = s.lower + int64_t(i) * s.ld;
  VD even[N], odd[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; v++) {
    even[v] = load_doubles(row + from + v * kLanes);
    odd[v] = VD{};
  }
  int k = 0;
  for (; k + 2 <= i; k += 2) {
    const double *first = s.upper + k * int64_t(s.ld) + from, *second = first + s.ld;
    subtract<N>(factors[k], first, even);
    subtract<N>(factors[k + 1], second, odd);
  }
  if (k < i) subtract<N>(factors[k], s.upper + k * int64_t(s.ld) + from, even);
#pragma GCC unroll 8
  for (int v = 0; v < N; v++) store_doubles(row + from + v * kLanes, even[v] + odd[v]);
}

// The same for the whole rest of the row.
static void eliminate_row(const System& s, int i, int from, double* row) {
  for (; from + 6 * kLanes <= s.ld; from += 6 * kLanes) eliminate<6>(s, i, from, row);
  switch ((s.ld - from) / kLanes) {
    case 5: return eliminate<5>(s, i, from, row);
    case 4: return eliminate<4>(s, i, from, row);
    case 3: return eliminate<3>(s, i, from, row);
    case 2: return eliminate<2>(s, i, from, row);
    case 1: return eliminate<1>(s, i, from, row);
  }
}

// H = Diag(C 1) − C from the edges C, then the factors of B^-½ (H + b bᵀ) B^-½ + ridge, B = Diag(b).
// A matrix that is not positive definite to rounding is replaced by the identity, a Sinkhorn step: then false.
static bool factorise(const System& s, const float* edges, int workers, const double* b, double ridge) {
  const int r = s.rank, ld = s.ld;
  const int64_t stride = int64_t(ld) * ld;
  for (int i = 0; i < r; i++) s.weight[i] = 1 / sqrt(most(b[i], 1e-30));
  memset(s.degree, 0, sizeof(double) * size_t(r));
  for (int i = 0; i < r; i++) {
    double* edge = s.edges + int64_t(i) * ld;
    const int start = vector_of(i);
    for (int j = start; j < ld; j++) edge[j] = edges[i * ld + j];
    for (int w = 1; w < workers; w++)
      for (int j = start; j < ld; j++) edge[j] += edges[w * stride + i * ld + j];
    for (int j = start; j <= i; j++) edge[j] = 0;
    double* row = s.upper + int64_t(i) * ld;
    VD total = VD{};
    for (int j = start; j < ld; j += kLanes) {
      const VD x = load_doubles(edge + j);
      total += x;
      store_doubles(s.degree + j, load_doubles(s.degree + j) + x);
      store_doubles(row + j, (b[i] * load_doubles(b + j) - x) * (s.weight[i] * load_doubles(s.weight + j)));
    }
    for (int t = 0; t < kLanes; t++) s.degree[i] += total[t];
    row[i] = (s.degree[i] + b[i] * b[i]) * s.weight[i] * s.weight[i] + ridge;
  }
  for (int i = 0; i < r; i++) {
    double *row = s.upper + int64_t(i) * ld, *factors = s.lower + int64_t(i) * ld;
    const int start = vector_of(i);
    for (int k = 0; k < i; k++) factors[k] = s.upper[int64_t(k) * ld + i] * s.inverse[k];
    eliminate_row(s, i, start, row);
    if (!(row[i] > 1e-14)) {
      memset(s.upper, 0, sizeof(double) * size_t(r) * size_t(ld));
      memset(s.lower, 0, sizeof(double) * size_t(r) * size_t(ld));
      for (int j = 0; j < r; j++) s.inverse[j] = 1;
      return false;
    }
    s.inverse[i] = 1 / row[i];
    for (int j = start; j <= i; j++) row[j] = 0;
  }
  return true;
}

// x ← sign · H⁺ x for each of N right-hand sides (rank): side by side, since every solve is one long chain. Both halves add
// columns, because a sum over a row would make that chain longer.
template <int N>
static void apply_inverse(const System& s, double sign, double* const (&x)[N]) {
  double work[N][kMaxWidth];
  const int r = s.rank;
  for (int n = 0; n < N; n++)
    for (int i = 0; i < s.ld; i++) work[n][i] = i < r ? x[n][i] * s.weight[i] * sign : 0;
  for (int k = 0; k < r; k++) {
    const double* row = s.upper + int64_t(k) * s.ld;
    double y[N];
    for (int n = 0; n < N; n++) y[n] = work[n][k] *= s.inverse[k];
    for (int j = vector_of(k); j < s.ld; j += kLanes)
      for (int n = 0; n < N; n++)
        store_doubles(work[n] + j, load_doubles(work[n] + j) - y[n] * load_doubles(row + j));
  }
  for (int k = r - 1; k > 0; k--) {
    const double* row = s.lower + int64_t(k) * s.ld;
    double y[N];
    for (int n = 0; n < N; n++) y[n] = work[n][k];
    for (int j = 0; j < k; j += kLanes)
      for (int n = 0; n < N; n++)
        store_doubles(work[n] + j, load_doubles(work[n] + j) - y[n] * load_doubles(row + j));
  }
  for (int n = 0; n < N; n++)
    for (int i = 0; i < r; i++) x[n][i] = work[n][i] * s.weight[i];
}

}  // namespace
