// The exact solver on the two sides of a head.
#pragma once
#include "newton_scaling.h"

namespace {

// What an exact solve has found: the potential, `low` if its exponents must not be rounded, and if they need not be formed
// at all the scaling `b` of kernels that are in place of the scores.
struct Solution {
  const float *high, *low, *b;
};

static Solution to_solution(const Newton& n, const double* g, const float* b) {
  const Measure& p = n.head->pivots;
  float *high = n.head->arena.take<float>(p.padded), *low = n.head->arena.take<float>(p.padded);
  to_potential(p, g, high, low);
  return {high, n.exact ? low : nullptr, b};
}

static void save_potential(const Solution& s, int rank, float* state) {
  memcpy(state, s.high, sizeof(float) * size_t(rank));
  for (int j = 0; j < rank; j++) state[rank + j] = s.low ? s.low[j] : 0.f;
}

// g with Pᵀa = m to the tolerance, P = softmax(s + g). Rows get the scores or their kernel.
static Solution solve_potential(const Head& head, const Tokens& t, const Block& rows) {
  const Measure& p = head.pivots;
  Newton n = open_newton(head);
  double* g = head.arena.zeros<double>(p.rank);
  float* b = head.arena.take<float>(p.padded);
  const double tol = most(head.call->tol / 3, kFloor);  // the two plans share the error of the glued coupling
  if (solve_scaled(n, t, rows, tol, g, b)) return to_solution(n, g, b);
  n.exact = false;
  score_all(head, t, rows);
  const Cloud all{rows, t.mass, t.count};
  bool cold = true;
  int64_t size = t.count;
  while (size / kSampleGrowth >= most(4 * p.rank, 64)) size /= kSampleGrowth;
  for (; size * kSampleGrowth <= t.count; size *= kSampleGrowth) {
    const Scope scope(head.call->host);
    const Cloud some = sample(head, all, size);
    if (cold || !solve_cloud(n, some, false, kSampleTolerance, g)) solve_cloud(n, some, true, kSampleTolerance, g);
    cold = false;
  }
  if (cold || !solve_cloud(n, all, false, tol, g)) solve_cloud(n, all, true, tol, g);
  return to_solution(n, g, nullptr);
}

// The largest relative deviation of column sums from the masses of the pivots.
static float largest_deviation(const Measure& p, const double* columns) {
  double largest = 0;
  for (int j = 0; j < p.rank; j++) {
    if (!(p.log_mass[j] > least_log_mass(kNewton))) continue;  // no mass to speak of
    const double deviation = fabs(columns[j] / p.mass[j] - 1);
    largest = deviation <= largest ? largest : deviation;  // what is not a number stays so
  }
  return float(largest);
}

// The plan times v goes to the product of worker 0, the sums of the plan's columns to `columns`: these without b, which
// is given if rows are kernels and not scores.
static void carry_values(const Head& head, const Tokens& t, const Rows& values, const View& rows, const Potential& g,
                         const float* b) {
  const Measure& p = head.pivots;
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      View e = k.plan;
      if (b) {
        e = rows.at(i);
        dot_rows(e, count, b, p.vectors, k.sum);
      } else {
        exp_block(rows.at(i), count, 1.f, g, p.vectors, k.plan, k.shift, k.sum);
      }
      divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
      if (b)
        scale_rows_and_columns(e, count, k.weight, b, p.vectors, k.plan);
      else
        scale_rows(e, count, k.weight, p.vectors, k.plan);
      const View v = read_rows(t, values, i, count, head.call->value_dim, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, v.data, v.ld, head.value_padded / W, k.product,
                  head.value_padded);
    }
  });
  collect_columns(head);
  collect_products(head, head.value_padded);
}

// Whether a column of the plan has lost its mass to underflow.
static bool starves(const Measure& p, const double* columns) {
  for (int j = 0; j < p.rank; j++)
    if (columns[j] < kStarved) return true;
  return false;
}

// Key side: state gets g (two vectors) and ω = 1 / column sums; `Wᵀ v` goes to the product of worker 0.
// Returns the error of the plan before ω closes it.
static float solve_keys(const Head& head, const Tokens& t, const Rows& values, const Block& rows, float* state,
                        float* exact) {
  const Measure& p = head.pivots;
  Solution s = solve_potential(head, t, rows);
  carry_values(head, t, values, rows, {s.high, s.low}, s.b);
  double* columns = head.worker[0].columns;
  // A half-step in log form gives every column back what the best of its tokens can send, whatever g was.
  for (int rescue = 0; !s.b && rescue < kRescues && starves(p, columns); rescue++) {
    float* next = head.arena.take<float>(p.padded);
    log_half_steps(head, t, rows, s.high, next);
    s = {next, nullptr, nullptr};
    carry_values(head, t, values, rows, {s.high}, nullptr);
  }
  *exact = s.low != nullptr;
  save_potential(s, p.rank, state);
  for (int j = 0; j < p.rank; j++) {
    if (s.b) columns[j] *= s.b[j];
    const float inverse = float(1 / columns[j]);
    for (int d = 0; d < head.value_padded; d++) head.worker[0].product[int64_t(j) * head.value_padded + d] *= inverse;
    state[2 * p.rank + j] = inverse;
  }
  return largest_deviation(p, columns);
}

static Solution solve_queries(const Head& head, const Tokens& t, const Block& rows, float* state, float* exact) {
  const Solution s = solve_potential(head, t, rows);
  *exact = s.low != nullptr;
  save_potential(s, head.pivots.rank, state);
  return s;
}

}  // namespace
