// The exact solver: Newton's method on the semi-dual along a path that switches the scores on, as in `newton.py`.
//
// One pass over the scores gives b = Pᵀa, its derivative along the path, and the edges Pᵀ Diag(a) P of the graph whose
// Laplacian is the Hessian. Everything of size r is in double. Many tokens: the path is walked on a small systematic
// sample, each larger sample starts from the potential of the one before, and only the last few steps see all tokens.
#pragma once
#include "sinkhorn.h"
#include "system.h"

namespace {

constexpr int kMaxPasses = 80;
constexpr double kStartRange = 4, kPace = 1.8, kSettled = 0.25, kLargeStep = 10, kBoldness = 0.25;
constexpr double kFloor = 2e-7;            // fp32 sums cannot show a smaller residual
constexpr double kSampleTolerance = 0.05;  // a sample is not worth more
constexpr int kSampleGrowth = 8;
constexpr double kRidge = 1e-8, kBackwardRidge = 1e-10;

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
  const float* mass;
  int64_t count;
};

struct Newton {
  const Head* head;
  System system;
  HessianSink sink;
  float* potential;  // (padded)
  // what one pass tells, (rank) each; `plain` only at β = 1, where the last step is taken with it
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
  n.potential = head.arena.take<float>(padded);
  n.plain = head.arena.take<double>(rank);
  n.corrector = head.arena.take<double>(rank);
  n.tangent = head.arena.take<double>(rank);
  return n;
}

static void to_potential(const Measure& p, const double* g, float* to) {
  double mean = 0;
  for (int j = 0; j < p.rank; j++) mean += g[j] / p.rank;
  for (int j = 0; j < p.padded; j++) to[j] = j < p.rank ? float(g[j] - mean) : kNothing;
}

// to = e ∘ (s − mean_i)
static void weigh_deviation(const View& e, const View& s, const float* mean, int count, int vectors, const Block& to) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++)
      store(to.data + i * to.ld + v * W,
            load(e.data + i * e.ld + v * W) * (load(s.data + i * s.ld + v * W) - mean[i]));
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

// One pass over the cloud at potential g and scores β s.
static void look(Newton& n, const Cloud& cloud, const double* g, double beta) {
  const Head& head = *n.head;
  const Measure& p = head.pivots;
  const int64_t square = int64_t(p.padded) * p.padded;
  to_potential(p, g, n.potential);
  start_columns(head);
  memset(n.sink.matrices, 0, sizeof(float) * size_t(head.workers * square));
  const bool moving = beta < 1;
  head.each_range(cloud.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = cloud.scores.at(i);
      exp_block(s, count, float(beta), n.potential, p.vectors, k.plan, k.shift, k.sum);
      divide_masses(cloud.mass + i, k.sum, count, k.extra, k.weight);
      n.sink.add(k, k.plan, k.extra, cloud.mass + i, count);
      if (!moving) continue;
      dot_blocks(k.plan, s, count, p.vectors, k.sum);
      for (int l = 0; l < count; l++) k.sum[l] *= k.extra[l];
      weigh_deviation(k.plan, s, k.sum, count, p.vectors, k.other);
      weigh_columns(k.other, count, k.weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  const double *b = head.worker[0].columns2, *drift = head.worker[0].columns;
  n.newton = factorise(n.system, n.sink.matrices, head.workers, b, kRidge);
  n.error = 0;
  for (int j = 0; j < p.rank; j++) {
    const double ratio = log(most(b[j], 1e-38)) - p.log_mass[j];
    n.error = ratio == ratio ? most(n.error, fabs(ratio)) : 1e300;
    n.plain[j] = b[j] - p.mass[j];
    n.corrector[j] = b[j] * ratio;
    n.tangent[j] = drift[j];
  }
  apply_inverse(n.system, -1, {n.corrector, moving ? n.tangent : n.plain});
  auto slope_along = [&](const double* x) {
    double slope = 0;
    for (int j = 0; j < p.rank; j++) slope += x[j] * (b[j] - p.mass[j]);
    return slope;
  };
  double slope = slope_along(n.corrector);
  const bool descends = slope < 0;  // Newton on log b = log m is faster from afar, where it is a descent direction
  if (moving && !descends) apply_inverse(n.system, -1, {n.plain});
  if (!descends) {
    memcpy(n.corrector, n.plain, sizeof(double) * size_t(p.rank));
    slope = slope_along(n.corrector);
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

// g exact to first order at β = 0, and the β at which nothing underflows.
static double start_path(const Newton& n, const Cloud& cloud, double* g) {
  const Head& head = *n.head;
  const Measure& p = head.pivots;
  const float* only = zero_potential(head);
  start_columns(head);
  for (int w = 0; w < head.workers; w++) head.worker[w].top = 0;
  head.each_range(cloud.count, [&](Worker& k, int64_t first, int64_t last) {
    double spread = 0;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = cloud.scores.at(i);
      weigh_columns(s, count, cloud.mass + i, p.vectors, k.column, k.columns);
      for (int l = 0; l < count; l++) {
        V high = splat(kNothing), low = splat(kNothing);
        for (int v = 0; v < p.vectors; v++) {
          const V x = load(s.data + l * s.ld + v * W), pad = load(only + v * W);
          high = vmax(high, x + pad);
          low = vmax(low, pad - x);
        }
        float top = high[0], bottom = low[0];
        for (int t = 1; t < W; t++) {
          top = most<float>(top, high[t]);
          bottom = most<float>(bottom, low[t]);
        }
        spread += double(cloud.mass[i + l]) * (double(top) + bottom);
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
  const int rank = n.head->pivots.rank;
  const size_t mark = n.head->call->host.mark();
  double* best = n.head->arena.take<double>(rank);
  double beta = cold ? start_path(n, cloud, g) : 1;
  double best_error = 1e300;
  for (int pass = 0; pass < kMaxPasses; pass++) {
    look(n, cloud, g, beta);
    if (!cold && pass == 0 && !(n.error < 2)) {
      n.head->call->host.release(mark);
      return false;
    }
    const bool arrived = beta >= 1, improved = arrived && n.error < best_error;
    const bool stalled = arrived && !improved && best_error < 1e-4;  // rounding decides from here on
    if (stalled) break;
    if (improved) {
      best_error = n.error;
      // The step from here is known already: take it if the problem is quadratic at that distance. It leaves
      // |b'' / b| / 2 ≤ 5/8 range², and a little for the rounding of the Hessian, so it need not be looked at.
      const double range = range_of(n.plain, rank);
      for (int j = 0; j < rank; j++) best[j] = g[j] + (range < 0.5 ? n.plain[j] : 0);
      if (best_error < tol || (n.newton && range < 0.5 && 0.7 * range * range + 1e-5 * range < tol)) break;
    }
    const bool settled = n.error < kSettled && n.reach < kLargeStep;
    const double next = settled ? least(kPace * beta, 1.0) : beta;
    for (int j = 0; j < rank; j++)
      g[j] += n.length * n.corrector[j] + (next > beta ? (next - beta) * n.tangent[j] : 0);
    beta = next;
  }
  if (best_error < 1e300) memcpy(g, best, sizeof(double) * size_t(rank));
  n.head->call->host.release(mark);
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
    reached += double(all.mass[i]) * double(size);
    while (taken < size && (reached > double(taken) + place || i == all.count - 1)) {
      memcpy(scores + taken * padded, all.scores.at(i).data, sizeof(float) * size_t(padded));
      mass[taken++] = float(1.0 / double(size));
      place = place + 0.6180339887498949 < 1 ? place + 0.6180339887498949 : place - 0.3819660112501051;
    }
  }
  return {{scores, padded}, mass, size};
}

// g with Pᵀa = m to the tolerance, P = softmax(s + g), as a potential in fp32.
static void solve_potential(const Head& head, const Tokens& t, const View& scores, float* potential) {
  const Measure& p = head.pivots;
  Newton n = open_newton(head);
  double* g = head.arena.zeros<double>(p.rank);
  const Cloud all{scores, t.mass, t.count};
  bool cold = true;
  int64_t size = t.count;
  while (size / kSampleGrowth >= most(4 * p.rank, 64)) size /= kSampleGrowth;
  for (; size * kSampleGrowth <= t.count; size *= kSampleGrowth) {
    const size_t mark = head.call->host.mark();
    const Cloud some = sample(head, all, size);
    if (cold || !solve_cloud(n, some, false, kSampleTolerance, g)) solve_cloud(n, some, true, kSampleTolerance, g);
    cold = false;
    head.call->host.release(mark);
  }
  const double tol = most(head.call->tol / 3, kFloor);  // the two plans share the error of the glued coupling
  if (cold || !solve_cloud(n, all, false, tol, g)) solve_cloud(n, all, true, tol, g);
  to_potential(p, g, potential);
}

// Key side: state gets g and ω = 1 / column sums; `Wᵀ v` goes to the product of worker 0.
static void solve_keys(const Head& head, const Tokens& t, const Rows& values, const Block& scores, float* state) {
  const Measure& p = head.pivots;
  float* g = head.arena.take<float>(p.padded);
  score_all(head, t, scores);
  solve_potential(head, t, scores, g);
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      exp_block(scores.at(i), count, 1.f, g, p.vectors, k.plan, k.shift, k.sum);
      divide_masses(t.mass + i, k.sum, count, k.extra, k.weight);
      weigh_columns(k.plan, count, k.weight, p.vectors, k.column, k.columns);
      scale_rows(k.plan, count, k.weight, p.vectors, k.plan);
      const View v = read_rows(t, values, i, count, head.call->value_dim, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, v.data, v.ld, head.value_padded / W, k.product,
                  head.value_padded);
    }
  });
  collect_columns(head);
  collect_products(head, head.value_padded);
  for (int j = 0; j < p.rank; j++) {
    state[j] = g[j];
    const float inverse = float(1.0 / most(head.worker[0].columns[j], 1e-37));
    state[p.rank + j] = inverse;
    for (int d = 0; d < head.value_padded; d++) head.worker[0].product[int64_t(j) * head.value_padded + d] *= inverse;
  }
}

static void solve_queries(const Head& head, const Tokens& t, const Block& scores, float* g, float* state) {
  score_all(head, t, scores);
  solve_potential(head, t, scores, g);
  memcpy(state, g, sizeof(float) * size_t(head.pivots.rank));
}

}  // namespace
