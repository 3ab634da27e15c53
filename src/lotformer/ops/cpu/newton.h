// The exact solver: Newton's method on the semi-dual along a path that switches the scores on, as in `newton.py`.
//
// One pass over the scores gives b = Pᵀa, its derivative along the path, and the edges Pᵀ Diag(a) P of the graph whose
// Laplacian is the Hessian. Everything of size r is in double. Many tokens: the path is walked on a small systematic
// sample, each larger sample starts from the potential of the one before, and only the last few steps see all tokens.
#pragma once
#include "sinkhorn.h"
#include "system.h"

namespace {

constexpr double kQuiet = 1e-6, kNoise = 2e-7;  // errors that rounding decides, that of potentials too
constexpr double kFloor = 2e-7;                 // fp32 sums cannot show a smaller residual
constexpr double kSampleTolerance = 0.05;       // a sample is not worth more
constexpr int kSampleGrowth = 8;
constexpr double kRidge = 1e-8, kBackwardRidge = 1e-10;
constexpr double kCoarse = 32;             // exponents beyond are not rounded: see Exponent::kExact
constexpr double kStarved = 1e-30;         // a column this light has lost entries to underflow
constexpr int kRescues = 4;

// Adds Σ_i a_i P_ij P_ik to the matrix of a worker and Σ_i a_i P_ij to its second columns; P = u e.
struct HessianSink {
  const Head* head;
  float* matrices;  // (workers, padded, padded), upper tiles

  void add(Worker& k, const View& e, const float* u, const float* mass, int count) const {
    const Measure& p = head->pivots;
    float weight[kBlock];
    for (int i = 0; i < count; i++) weight[i] = mass[i] * u[i];
    weigh_columns(e, count, weight, p.vectors, k.column, k.columns2);
    for (int i = 0; i < count; i++) weight[i] = __builtin_sqrtf(mass[i]) * u[i];
    scale_rows(e, count, weight, p.vectors, k.other);
    float* matrix = matrices + (&k - head->worker) * int64_t(p.padded) * p.padded;
    multiply_symmetric(k.other.data, k.other.ld, p.vectors, count, matrix, p.padded);
  }
};

static double range_of(const double* x, int n) {
  double low = x[0], high = x[0];
  for (int i = 1; i < n; i++) {
    low = least(low, x[i]);
    high = most(high, x[i]);
  }
  return high - low;
}

// Scores of some tokens with their masses.
struct Cloud {
  View scores;
  TokenMasses mass;
  int64_t count;
};

struct Newton {
  const Head* head;
  System system;
  HessianSink sink;
  float *high, *low;  // (padded) the potential that is looked at
  bool exact;         // whether `low` counts, at β = 1
  // what one pass tells, (rank) each
  double *plain, *corrector, *tangent;
  double error, length, reach;
  bool newton;  // whether the steps are Newton's and not the fallback
};

static Newton open_newton(const Head& head) {
  const int64_t rank = head.pivots.rank, padded = head.pivots.padded;
  Newton n;
  n.head = &head;
  n.system = open_system(head);
  n.sink = {&head, head.arena.take<float>(head.workers * padded * padded)};
  n.high = head.arena.take<float>(padded);
  n.low = head.arena.take<float>(padded);
  n.exact = false;
  n.plain = head.arena.take<double>(rank);
  n.corrector = head.arena.take<double>(rank);
  n.tangent = head.arena.take<double>(rank);
  return n;
}

static void to_potential(const Measure& p, const double* g, float* high, float* low) {
  double mean = 0;
  for (int j = 0; j < p.rank; j++) mean += g[j] / p.rank;
  for (int j = 0; j < p.padded; j++) {
    high[j] = j < p.rank ? float(g[j] - mean) : kNothing;
    low[j] = j < p.rank ? float(g[j] - mean - high[j]) : 0.f;
  }
}

// to = e ∘ (t − mean_i), t = β s + g − shift the exponents of e and mean_i their mean under P_i = u_i e_i.
static void weigh_deviation(const View& e, const View& s, float beta, const float* g, const float* shift,
                            const float* u, int count, int vectors, const Block& to) {
  for (int i = 0; i < count; i++) {
    const float* row = s.data + i * s.ld;
    auto exponent = [&](int v) {  // what is smaller weighs nothing, and columns beyond the rank are
      return vmax(load(row + v * W) * beta + load(g + v * W) - shift[i], splat(-100.f));
    };
    V total = V{};
    for (int v = 0; v < vectors; v++) total += load(e.data + i * e.ld + v * W) * exponent(v);
    const V mean = reduce_spread<Add>(total) * u[i];
    for (int v = 0; v < vectors; v++)
      store(to.data + i * to.ld + v * W, load(e.data + i * e.ld + v * W) * (exponent(v) - mean));
  }
}

// dots[i] = x_i · y_i, or x_i · (y_i − center)
static void dot_blocks(const View& x, const View& y, int count, int vectors, float* dots,
                       const float* center = nullptr) {
  for (int i = 0; i < count; i += W) {
    V part[W];
    for (int t = 0; t < W; t++) {
      part[t] = V{};
      if (i + t >= count) continue;
      const float *p = x.data + (i + t) * x.ld, *q = y.data + (i + t) * y.ld;
      for (int v = 0; v < vectors; v++)
        part[t] += load(p + v * W) * (center ? load(q + v * W) - load(center + v * W) : load(q + v * W));
    }
    store(dots + i, reduce<Add>(part));
  }
}

static double largest_magnitude(const float* x, int count) {
  float largest = 0;
  for (int i = 0; i < count; i++) largest = most(largest, fabsf(x[i]));
  return largest;
}

// One pass over the cloud at potential g and scores β s: fills b, its derivative along the path, and the edges.
static void gather(Newton& n, const Cloud& cloud, double beta) {
  const Head& head = *n.head;
  const Measure& p = head.pivots;
  const bool moving = beta < 1;
  start_columns(head);
  memset(n.sink.matrices, 0, sizeof(float) * size_t(head.workers) * size_t(p.padded) * size_t(p.padded));
  const Potential potential{n.high, n.exact && !moving ? n.low : nullptr};
  head.each_range(cloud.count, [&](Worker& k, int64_t first, int64_t last) {
    k.top = 0;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = cloud.scores.at(i);
      exp_block(s, count, float(beta), potential, p.vectors, k.plan, k.shift, k.sum);
      divide_masses(cloud.mass.at(i), k.sum, count, k.extra, k.weight);
      n.sink.add(k, k.plan, k.extra, cloud.mass.at(i), count);
      if (moving) {
        weigh_deviation(k.plan, s, float(beta), n.high, k.shift, k.extra, count, p.vectors, k.other);
        weigh_columns(k.other, count, k.weight, p.vectors, k.column, k.columns);
      } else {
        k.top = most(k.top, largest_magnitude(k.shift, count));
      }
    }
  });
  collect_columns(head);
}

// log x; most are near 1, where a few terms will do.
static double log_ratio(double x) {
  const double d = x - 1;
  return fabs(d) < 1e-3 ? d * (1 - d * (1.0 / 2 - d * (1.0 / 3 - d * (1.0 / 4)))) : log(most(x, 1e-300));
}

// What a pass has told about the steps from potential g and scores β s.
static void conclude(Newton& n, const double* g, double beta) {
  const Head& head = *n.head;
  const Measure& p = head.pivots;
  const bool moving = beta < 1;
  const double *b = head.worker[0].columns2, *drift = head.worker[0].columns;
  n.newton = factorise(n.system, n.sink.matrices, head.workers, b, kRidge);
  n.error = 0;
  for (int j = 0; j < p.rank; j++) {
    const double ratio = b[j] == b[j] ? log_ratio(b[j] / p.mass[j]) : b[j];
    n.error = ratio == ratio ? most(n.error, fabs(ratio)) : 1e300;
    n.plain[j] = b[j] - p.mass[j];
    n.corrector[j] = b[j] * ratio;
    n.tangent[j] = drift[j];
  }
  auto slope_along = [&](const double* x) {
    double slope = 0;
    for (int j = 0; j < p.rank; j++) slope += x[j] * (b[j] - p.mass[j]);
    return slope;
  };
  // Newton on log b = log m is faster from afar, where it is a descent direction. From near its terms of second order
  // would be taken for currents between pivots that hardly share a token.
  double slope = 0;
  if (n.error > kSettled) {
    apply_inverse(n.system, -1, {n.plain, n.corrector});
    slope = slope_along(n.corrector);
  } else {
    apply_inverse(n.system, -1, {n.plain});
  }
  if (!(slope < 0)) {
    memcpy(n.corrector, n.plain, sizeof(double) * size_t(p.rank));
    slope = slope_along(n.corrector);
  }
  if (moving) {
    // dg/dβ = (g + x) / β, H x = −∂b along (β s + g) → ρ (β s + g): where the graph falls apart and H says nothing,
    // the potential grows with the scores, which keeps every token where it is.
    apply_inverse(n.system, -1, {n.tangent});
    for (int j = 0; j < p.rank; j++) n.tangent[j] = (n.tangent[j] + g[j]) / beta;
  }
  n.reach = range_of(n.corrector, p.rank);
  n.length = 1;
  if (n.reach >= 1) {
    double curvature = 0;
    for (int i = 0; i < p.rank; i++)
      for (int j = i + 1; j < p.rank; j++) {
        const double across = n.corrector[i] - n.corrector[j];
        curvature += n.system.edges[int64_t(i) * p.padded + j] * across * across;
      }
    const double ratio = least(most(-slope / most(curvature, 1e-30), 1.0), 1e6);
    const double scaled = (n.reach < kLargeStep ? kBoldness : 1) * n.reach;
    n.length = least(log1p(ratio * scaled) / scaled, 1.0);
  }
}

// Whether exponents are so large that they must not be rounded; the workers know the rows' shifts.
static bool needs_low(const Newton& n) {
  double largest = largest_magnitude(n.high, n.head->pivots.rank);
  for (int w = 0; w < n.head->workers; w++) largest = most(largest, n.head->worker[w].top);
  return largest > kCoarse;
}

static void look(Newton& n, const Cloud& cloud, const double* g, double beta) {
  to_potential(n.head->pivots, g, n.high, n.low);
  gather(n, cloud, beta);
  if (beta >= 1 && !n.exact) {
    n.exact = needs_low(n);
    if (n.exact) gather(n, cloud, beta);
  }
  conclude(n, g, beta);
}

// Whether the step from here needs no look at where it leads: if the problem is quadratic at that distance it leaves
// |b'' / b| / 2 ≤ 5/8 range², and a little for the rounding of the Hessian.
static bool arrives(const Newton& n, double range, double tol) {
  return n.error < tol || (n.newton && range < 0.5 && 0.7 * range * range + 1e-5 * range < tol);
}

// g exact to first order at β = 0, and the β at which nothing underflows.
static double start_path(const Newton& n, const Cloud& cloud, double* g) {
  const Head& head = *n.head;
  const Measure& p = head.pivots;
  start_columns(head);
  for (int w = 0; w < head.workers; w++) head.worker[w].top = 0;
  head.each_range(cloud.count, [&](Worker& k, int64_t first, int64_t last) {
    double spread = 0;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = cloud.scores.at(i);
      weigh_columns(s, count, cloud.mass.at(i), p.vectors, k.column, k.columns);
      for (int l = 0; l < count; l++) {
        V high = splat(kNothing), low = splat(kNothing);
        for (int v = 0; v < p.vectors; v++) {
          const V x = load(s.data + l * s.ld + v * W), pad = load(p.zero + v * W);
          high = vmax(high, x + pad);
          low = vmax(low, pad - x);
        }
        float top = high[0], bottom = low[0];
        for (int t = 1; t < W; t++) {
          top = most<float>(top, high[t]);
          bottom = most<float>(bottom, low[t]);
        }
        spread += double(cloud.mass.at(i)[l]) * (double(top) + bottom);
      }
    }
    k.top = spread;
  });
  collect_columns(head);
  double spread = 0;
  for (int w = 0; w < head.workers; w++) spread += head.worker[w].top;
  const double beta = least(kStartRange / most(spread, 1e-6), 1.0);
  for (int j = 0; j < p.rank; j++) g[j] = p.log_mass[j] - beta * head.worker[0].columns[j];
  return beta;
}

// Solves on a cloud: from the start of the path, or from g when it is a good guess. False if it was not.
static bool solve_cloud(Newton& n, const Cloud& cloud, bool cold, double tol, double* g) {
  const Scope scope(n.head->call->host);
  const int rank = n.head->pivots.rank;
  const size_t size = sizeof(double) * size_t(rank);
  double* best = n.head->arena.take<double>(rank);
  double best_error = 1e300;
  double beta = cold ? start_path(n, cloud, g) : 1, pace = kPace;
  // the last point near the path, from where jumps start
  double *base = n.head->arena.take<double>(rank), *tangent = n.head->arena.take<double>(rank), base_beta = 0;
  bool jumped = false;
  int failures = 0;
  for (int pass = 0; pass < kMaxPasses; pass++) {
    look(n, cloud, g, beta);
    if (!cold && pass == 0 && !(n.error < 2)) return false;
    if (beta >= 1) {
      if (n.error < best_error) {
        best_error = n.error;
        const double range = range_of(n.plain, rank);  // the step from here is known already
        for (int j = 0; j < rank; j++) best[j] = g[j] + (range < 0.5 ? n.plain[j] : 0);
        if (arrives(n, range, tol)) break;
        failures = 0;
      } else if (best_error < 1e-4 && ++failures >= (best_error < 3e-6 ? 1 : 4)) {
        break;  // rounding decides from here on
      }
    }
    const bool missed = jumped && !(n.error < kTooFar);
    if (missed)
      pace = sqrt(pace);
    else
      for (int j = 0; j < rank; j++) g[j] += n.length * n.corrector[j];
    const double quiet = most(kQuiet, kNoise * largest_magnitude(n.high, rank));
    const bool settled = !missed && ((n.error < kSettled && n.reach < kSettledReach) || n.error < quiet);
    if (settled && beta < 1) {
      base_beta = beta;
      memcpy(base, g, size);
      memcpy(tangent, n.tangent, size);
    }
    jumped = beta < 1 ? settled || missed : missed;
    if (!jumped) continue;
    beta = least(pace * base_beta, 1.0);
    for (int j = 0; j < rank; j++) g[j] = base[j] + (beta - base_beta) * tangent[j];
  }
  if (best_error < 1e300)
    memcpy(g, best, size);
  else
    for (int j = 0; j < rank; j++) g[j] /= beta;
  return true;
}

// A systematic sample by mass, one token per stratum at a place that follows no period of the data.
static Cloud sample(const Head& head, const Cloud& all, int64_t size) {
  const int64_t padded = head.pivots.padded;
  float* scores = head.arena.take<float>(round_up(size, kBlock) * padded);
  float* mass = head.arena.zeros<float>(round_up(size, kBlock));
  double reached = 0;
  int64_t taken = 0;
  double place = 0.5;
  for (int64_t i = 0; i < all.count && taken < size; i++) {
    reached += double(all.mass.of(i)) * double(size);
    while (taken < size && (reached > double(taken) + place || i == all.count - 1)) {
      memcpy(scores + taken * padded, all.scores.at(i).data, sizeof(float) * size_t(padded));
      mass[taken++] = float(1.0 / double(size));
      place = place + 0.6180339887498949 < 1 ? place + 0.6180339887498949 : place - 0.3819660112501051;
    }
  }
  return {{scores, padded}, {mass}, size};
}

}  // namespace
