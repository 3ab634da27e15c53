// The exact solver in scaling form. Most problems stay in the range of fp32: then K = exp(s − row maximum) is formed once,
// cheap sweeps come near the solution from afar, and passes of Newton's method exponentiate nothing. What leaves the range
// or does not converge is left to the walk along the path.
#pragma once
#include "newton.h"

namespace {

constexpr int kFirstSweeps = 8;
constexpr float kOverrelaxation = 1.8f;  // of sweeps that converge slowly
constexpr float kFast = 0.05f;           // change of log b in the second sweep below which they do not
constexpr double kFarError = 2;          // after the sweeps: the walk along the path is shorter,
constexpr double kFarReach = 30, kFartherReach = 60;  // and for the range of the step: with few tokens, with many
constexpr int kMany = 512;
constexpr int kPatience = 6, kQuickPasses = 30;  // passes to settle, and to arrive
constexpr double kNear = 0.3, kContraction = 0.3;  // steps that the Hessian serves beyond its pass, and how well it must
constexpr int kCoasting = 4;
constexpr double kRounding = 3e-6;               // an error that rounding may keep from falling

// b ← b (m / column sums)^ω, where the sums are those of the plan. False where fp32 products are not to be trusted.
// `change` is the largest change of log b that ω = 1 makes.
static bool relax(const Measure& p, const double* columns, float omega, Scaling& scaling, float& change) {
  V low = splat(kLargest), high = V{}, largest = V{};
  VI sound = low == low;
  for (int v = 0; v < p.vectors; v++) {
    float rounded[W];
    for (int t = 0; t < W; t++) rounded[t] = float(columns[v * W + t]);
    const V column = load(rounded);
    V next = load(p.mass + v * W) / column;
    const VI real = ~(load(p.log_mass + v * W) <= 0.5f * kNothing);
    sound &= ((column * scaling.low > kLost) & (column < 1e30f)) | ~real;
    const V ratio = real ? next / load(scaling.b + v * W) : splat(1.f);
    const V step = vlog(vmax(ratio, splat(kTiny)));
    largest = vmax(largest, vmax(step, -step));
    if (omega != 1) next = next * vexp((omega - 1) * step);
    low = real && next < low ? next : low;
    high = real && next > high ? next : high;
    store(scaling.b + v * W, real ? next : V{});
  }
  scaling.low = reduce_spread<Min>(low)[0];
  change = reduce_spread<Max>(largest)[0];
  const float top = reduce_spread<Max>(high)[0];
  for (int t = 0; t < W; t++)
    if (!sound[t]) return false;
  return scaling.low > kSmallest && top < kLargest && top < kRange * scaling.low;
}

// The tokens of a side with their kernel and the maxima of their rows.
struct Kernels {
  const Tokens* t;
  Block rows;
  float* shift;
};

// The largest |f| of some tokens: what their exponents reach in size.
LOT_INLINE float largest_potential(const float* shift, const float* sum, int count) {
  V largest = V{};
  for (int i = 0; i < count; i += W) {
    const V f = load(shift + i) + vlog(vmax(load(sum + i), splat(kTiny)));
    largest = vmax(largest, vmax(f, -f));
  }
  return reduce_spread<Max>(largest)[0];
}

// Fills the columns of worker 0 with Σ_i a_i e_ij / (e_i·b), from which b gives what the pivots receive. Without b it is one,
// and the kernel is formed.
static void receive(const Head& head, const Kernels& x, const float* b) {
  const Measure& p = head.pivots;
  const Tokens& t = *x.t;
  const Potential base{b ? nullptr : starting_potential(head)};
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    k.top = 0;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = x.rows.at(i);
      if (b) {
        dot_rows(e, count, b, p.vectors, k.sum);
      } else {
        first_scores(head, t, k, i, count, base, e);
        memcpy(x.shift + i, k.shift, sizeof(float) * size_t(round_up(count, W)));
      }
      k.top = most<double>(k.top, largest_potential(x.shift + i, k.sum, count));
      divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
}

// Forms the kernel and comes near the solution by sweeps. Says whether that is in range; `change` is how near.
static bool approach(const Head& head, const Kernels& x, double tol, Scaling& scaling, float& change) {
  const Measure& p = head.pivots;
  float omega = 1;
  for (int sweep = 0; sweep < kFirstSweeps; sweep++) {
    receive(head, x, sweep == 0 ? nullptr : scaling.b);
    if (!relax(p, head.worker[0].columns, omega, scaling, change)) return false;
    if (omega == 1 && change < tol) return true;
    if (sweep == 1 && change > kFast) omega = kOverrelaxation;
    if (sweep == kFirstSweeps / 2 && change > kFarError) return false;
    if (sweep == kFirstSweeps - 2) omega = 1;
  }
  return true;
}

// b = exp g in fp32; false if its range is too large.
static bool to_scaling(const Measure& p, const double* g, Scaling& scaling) {
  double low = g[0], high = g[0];
  for (int j = 1; j < p.rank; j++) {
    low = least(low, g[j]);
    high = most(high, g[j]);
  }
  for (int j = 0; j < p.rank; j++) scaling.b[j] = float(exp(g[j] - 0.5 * (low + high)));
  scaling.low = float(exp(0.5 * (low - high)));
  return high - low < 64;  // log(kRange) and a little less
}

// One pass at β = 1: fills b = Pᵀa and the edges. False where fp32 products are not to be trusted.
static bool gather_scaled(Newton& n, const Kernels& x, const Scaling& scaling) {
  const Head& head = *n.head;
  const Measure& p = head.pivots;
  const Tokens& t = *x.t;
  start_columns(head);
  memset(n.sink.matrices, 0, sizeof(float) * size_t(head.workers) * size_t(p.padded) * size_t(p.padded));
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    k.top = 0;
    float* matrix = n.sink.matrices + (&k - head.worker) * int64_t(p.padded) * p.padded;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = x.rows.at(i);
      dot_rows(e, count, scaling.b, p.vectors, k.sum);
      k.top = most<double>(k.top, largest_potential(x.shift + i, k.sum, count));
      divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns2);
      for (int l = 0; l < count; l++) {
        const V scale = splat(__builtin_sqrtf(t.mass.at(i)[l]) * k.extra[l]);
        for (int v = 0; v < p.vectors; v++)
          store(k.other.data + l * k.other.ld + v * W,
                load(e.data + l * e.ld + v * W) * load(scaling.b + v * W) * scale);
      }
      multiply_symmetric(k.other.data, k.other.ld, p.vectors, count, matrix, p.padded);
    }
  });
  collect_columns(head);
  double* columns = head.worker[0].columns2;
  bool sound = true;
  for (int j = 0; j < p.rank; j++) {
    sound = sound && columns[j] * scaling.low > kLost && columns[j] < 1e30;
    columns[j] *= scaling.b[j];
  }
  return sound;
}

// Goes on from g with the Hessian of the last full pass, which is `moved` away in range: each look costs as little as a
// sweep, and leaves of the error what the Hessian has changed by since, at most e^moved − 1. True if that arrives; if not,
// g is a better point for a full pass.
static bool coast(Newton& n, const Kernels& x, double tol, double moved, double* g, Scaling& scaling) {
  const Measure& p = n.head->pivots;
  const double* columns = n.head->worker[0].columns;
  double before = n.error;
  for (int look = 0; look < kCoasting; look++) {
    if (!to_scaling(p, g, scaling)) return false;
    receive(*n.head, x, scaling.b);
    double error = 0;
    for (int j = 0; j < p.rank; j++) {
      const double b = columns[j] * scaling.b[j], off = b - p.mass[j];
      error = most(error, fabs(off) / p.mass[j]);
      n.plain[j] = off;
    }
    if (!(error < kContraction * before)) return false;
    apply_inverse(n.system, -1, {n.plain});
    for (int j = 0; j < p.rank; j++) g[j] += n.plain[j];
    moved += range_of(n.plain, p.rank);
    if (error < tol || 2 * expm1(moved) * error < tol) return true;
    before = error;
  }
  return false;
}

// Solves for g and the scaling b that belongs to it; rows then hold the kernel. False if that is beyond this form.
static bool solve_scaled(Newton& n, const Tokens& t, const Block& rows, double tol, double* g, float* b) {
  const Head& head = *n.head;
  const int rank = head.pivots.rank;
  const Kernels x{&t, rows, head.arena.take<float>(round_up(t.count, kBlock))};
  Scaling scaling{b, 1};
  for (int j = 0; j < head.pivots.padded; j++) b[j] = j < rank ? 1.f : 0.f;
  float change = 0;
  if (!approach(head, x, tol, scaling, change)) return false;
  for (int j = 0; j < rank; j++) g[j] = log(double(b[j]));
  double* best = head.arena.take<double>(rank);
  double best_error = 1e300;
  int failures = 0;
  for (int pass = 0; change >= tol; pass++) {
    if (pass == kQuickPasses || !to_scaling(head.pivots, g, scaling) || !gather_scaled(n, x, scaling)) return false;
    conclude(n, g, 1);
    if (pass == 0 && !(n.error < kFarError && n.reach < (t.count < kMany ? kFarReach : kFartherReach))) return false;
    if (pass >= kPatience && !(n.error < kSettled)) return false;
    if (n.error < best_error) {
      best_error = n.error;
      failures = 0;
      const double range = range_of(n.plain, rank);
      for (int j = 0; j < rank; j++) best[j] = g[j] + (range < 0.5 ? n.plain[j] : 0);
      if (arrives(n, range, tol)) break;
    } else if (best_error < kRounding || ++failures == 3) {
      if (best_error > most(kRounding, tol)) return false;
      break;
    }
    for (int j = 0; j < rank; j++) g[j] += n.length * n.corrector[j];
    if (n.newton && n.length == 1 && n.reach < kNear && coast(n, x, tol, n.reach, g, scaling)) {
      memcpy(best, g, sizeof(double) * size_t(rank));
      break;
    }
  }
  if (best_error < 1e300) memcpy(g, best, sizeof(double) * size_t(rank));
  to_potential(head.pivots, g, n.high, n.low);
  n.exact = needs_low(n);
  return to_scaling(head.pivots, g, scaling);
}

}  // namespace
