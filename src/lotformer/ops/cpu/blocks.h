// Operations on a block of rows: scores, exponentials, and sums over rows and columns. A block stays in the first-level
// cache between the stages of a pass.
#pragma once
#include "head.h"

namespace {

LOT_INLINE void scale_block(const View& from, int count, float factor, int vectors, const Block& to) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) store(to.data + i * to.ld + v * W, load(from.data + i * from.ld + v * W) * factor);
}

// s[i, :] = temperature · x_i zᵀ, or of given scores x_i
LOT_INLINE void score_block(const Head& head, const Tokens& t, Worker& k, int64_t first, int count,
                            const Block& scores) {
  const Measure& p = head.pivots;
  if (!p.scaled) {
    const View x = read_rows(t, t.rows, first, count, p.rank, true, k.input);
    return scale_block(x, count, p.temperature, p.vectors, scores);
  }
  const View x = read_rows(t, t.rows, first, count, p.dim, false, k.input);
  multiply_nn(x.data, x.ld, count, p.dim, p.scaled_transposed, p.padded, p.vectors, scores.data,
              scores.ld, nullptr, kInput);
}

// Potentials of the pivots (padded): `high`, or where that is too coarse the sum of `high` and `low`. Both may be
// missing, which means zero.
struct Potential {
  const float* high;
  const float* low = nullptr;
};

enum class Exponent { kPlain, kShifted, kExact };  // s;  β s + g.high;  s + g.high + g.low without a rounding

// e = exp(β s + g − shift) with the row's maximum as shift, and the row sums; rows up to a whole vector are zeroed.
template <int NV, Exponent KIND>
static void exp_panel(const View& s, int count, float beta, const Potential& g, int any, const Block& e, float* shift,
                      float* sum) {
  constexpr bool PLAIN = KIND == Exponent::kPlain;
  const int vectors = NV ? NV : any;
  auto exponent = [&](const float* row, int v) {
    if (PLAIN) return load(row + v * W);
    if (KIND == Exponent::kExact) return load(row + v * W) + load(g.high + v * W);
    return load(row + v * W) * beta + load(g.high + v * W);
  };
  // What `exponent` has rounded away: scores of thousands leave few digits behind the point.
  auto remainder = [&](const float* row, int v, V sum) {
    const V a = load(row + v * W), b = load(g.high + v * W), taken = sum - a;
    return (a - (sum - taken)) + (b - taken) + load(g.low + v * W);
  };
  for (int i = 0; i < count; i += W) {
    V part[W];
#pragma GCC unroll 16
    for (int t = 0; t < W; t++) {
      const float* row = s.data + least(i + t, count - 1) * s.ld;
      V top = exponent(row, 0);
      for (int v = 1; v < vectors; v++) top = vmax(top, exponent(row, v));
      part[t] = top;
    }
    store(shift + i, reduce<Max>(part));
    const int valid = least(W, count - i);
    for (int t = 0; t < valid; t++) {
      const float* row = s.data + (i + t) * s.ld;
      float* to = e.data + (i + t) * e.ld;
      const V top = splat(shift[i + t]);
      V total = V{};
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        V t = exponent(row, v);
        if (KIND == Exponent::kExact)
          t = (t - top) + remainder(row, v, t);
        else
          t = t - top;
        const V x = vexp<!PLAIN>(t);
        store(to + v * W, x);
        total += x;
      }
      part[t] = total;
    }
    for (int t = valid; t < W; t++) {
      for (int v = 0; v < vectors; v++) store(e.data + (i + t) * e.ld + v * W, V{});
      part[t] = V{};
    }
    store(sum + i, reduce<Add>(part));
  }
}

// β must be one without g, and with g.low.
static void exp_block(const View& s, int count, float beta, const Potential& g, int vectors, const Block& e,
                      float* shift, float* sum) {
  if (g.low)
    exp_panel<0, Exponent::kExact>(s, count, beta, g, vectors, e, shift, sum);
  else if (vectors == 4 && !g.high)
    exp_panel<4, Exponent::kPlain>(s, count, beta, g, vectors, e, shift, sum);
  else if (vectors == 4)
    exp_panel<4, Exponent::kShifted>(s, count, beta, g, vectors, e, shift, sum);
  else if (vectors == 2 && !g.high)
    exp_panel<2, Exponent::kPlain>(s, count, beta, g, vectors, e, shift, sum);
  else if (vectors == 2)
    exp_panel<2, Exponent::kShifted>(s, count, beta, g, vectors, e, shift, sum);
  else if (!g.high)
    exp_panel<0, Exponent::kPlain>(s, count, beta, g, vectors, e, shift, sum);
  else
    exp_panel<0, Exponent::kShifted>(s, count, beta, g, vectors, e, shift, sum);
}

// dots[i] = Σ_j e[i, j] b[j]
LOT_INLINE void dot_rows(const View& e, int count, const float* b, int vectors, float* dots) {
  const int64_t ld = e.ld;
  for (int i = 0; i < count; i += W) {
    V part[W];
    const float* base = e.data + i * ld;
    V bv = load(b);
#pragma GCC unroll 16
    for (int t = 0; t < W; t++) part[t] = load(base + t * ld) * bv;
    for (int v = 1; v < vectors; v++) {
      bv = load(b + v * W);
#pragma GCC unroll 16
      for (int t = 0; t < W; t++) part[t] += load(base + t * ld + v * W) * bv;
    }
    store(dots + i, reduce<Add>(part));
  }
}

template <int NV>
LOT_INLINE void weigh_panel(const float* e, int64_t ld, int count, const float* w, float* column) {
  constexpr int kRows = 8 / NV;  // so many sums that no addition waits for the one before
  V sum[kRows][NV];
#pragma GCC unroll 8
  for (int t = 0; t < kRows; t++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sum[t][v] = V{};
  int i = 0;
  for (; i + kRows <= count; i += kRows)
#pragma GCC unroll 8
    for (int t = 0; t < kRows; t++) {
      const V scale = splat(w[i + t]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sum[t][v] += scale * load(e + (i + t) * ld + v * W);
    }
  for (; i < count; i++) {
    const V scale = splat(w[i]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sum[0][v] += scale * load(e + i * ld + v * W);
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    V total = sum[0][v];
#pragma GCC unroll 8
    for (int t = 1; t < kRows; t++) total += sum[t][v];
    store(column + v * W, total);
  }
}

// column[j] = Σ_i w[i] e[i, j], then added to `columns` in double: a block is short enough for fp32.
LOT_INLINE void weigh_columns(const View& e, int count, const float* w, int vectors, float* column, double* columns) {
  int v = 0;
  for (; v + 4 <= vectors; v += 4) weigh_panel<4>(e.data + v * W, e.ld, count, w, column + v * W);
  for (; v + 2 <= vectors; v += 2) weigh_panel<2>(e.data + v * W, e.ld, count, w, column + v * W);
  for (; v < vectors; v++) weigh_panel<1>(e.data + v * W, e.ld, count, w, column + v * W);
  for (int j = 0; j < vectors * W; j++) columns[j] += double(column[j]);
}

LOT_INLINE void scale_rows(const View& e, int count, const float* w, int vectors, const Block& to) {
  for (int i = 0; i < count; i++) {
    const V scale = splat(w[i]);
    for (int v = 0; v < vectors; v++) store(to.data + i * to.ld + v * W, load(e.data + i * e.ld + v * W) * scale);
  }
}

// to[i, j] = w[i] e[i, j] b[j]
LOT_INLINE void scale_rows_and_columns(const View& e, int count, const float* w, const float* b, int vectors,
                                       const Block& to) {
  for (int i = 0; i < count; i++) {
    const V scale = splat(w[i]);
    for (int v = 0; v < vectors; v++)
      store(to.data + i * to.ld + v * W, load(e.data + i * e.ld + v * W) * scale * load(b + v * W));
  }
}

// weight[i] = mass[i] / sum[i], and the reciprocal of the sum itself in `inverse`.
LOT_INLINE void divide_masses(const float* mass, const float* sum, int count, float* inverse, float* weight) {
  for (int i = 0; i < count; i += W) {
    const V u = 1.f / vmax(load(sum + i), splat(kTiny));
    store(inverse + i, u);
    store(weight + i, load(mass + i) * u);
  }
}

}  // namespace
