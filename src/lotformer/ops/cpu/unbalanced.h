// Sides that nothing is imposed on: a softmax each, and no solve.
#pragma once
#include "sinkhorn.h"

namespace {

// P_ij = u_i e_ij b_j with rows of P that sum to one: how the queries spread over the pivots.
struct QueryPlan {
  Block rows;      // e with b, scores with g; without data they are formed when they are needed
  Potential g;     // then e = exp(s + g − shift) and b = 1
  const float* b;  // (padded) or nullptr
  float* u;        // of every query where it is known already, else nullptr
};

static float* ones(const Head& head) {
  float* x = head.arena.zeros<float>(head.pivots.padded);
  for (int j = 0; j < head.pivots.rank; j++) x[j] = 1;
  return x;
}

// P = softmax_j(s + log m), kept in `rows`, and the masses m' = Pᵀa that it sends: those of `receiving`, and log m' for
// the way back. `form` says whether some are so small that only the scores could tell.
static QueryPlan send_masses(const Head& head, const Tokens& t, const Block& rows, Measure& receiving, float* saved,
                             float* form) {
  const Measure& p = head.pivots;
  const Potential prior{p.log_mass};
  float* u = rows.tail ? nullptr : head.arena.take<float>(round_up(t.count, kBlock));  // in long ones told again
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = rows.at(i);
      first_scores(head, t, k, i, count, prior, e);
      divide_masses(t.mass.at(i), k.sum, count, u ? u + i : k.extra, k.weight);
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  double* log_sent = head.arena.take<double>(p.rank);
  bool told = true;
  for (int j = 0; j < p.rank; j++) {
    log_sent[j] = log(head.worker[0].columns[j]);
    told = told && head.worker[0].columns[j] > kSmallest;
  }
  QueryPlan plan{rows, {nullptr}, ones(head), u};
  if (!told && head.call->solver == kSinkhorn) {  // the exact solver counts them all as equally light
    plan = {rows, prior, nullptr, nullptr};
    *form = 1;
    float* next = head.arena.take<float>(p.padded);
    score_all(head, t, rows);
    log_half_steps(head, t, rows, p.log_mass, next);
    for (int j = 0; j < p.rank; j++) log_sent[j] = 2.0 * p.log_mass[j] - next[j];
  }
  receiving.log_mass = head.arena.take<float>(p.padded);
  receiving.mass = head.arena.take<float>(p.padded);
  normalise_masses(log_sent, p.rank, head.call->least_log_mass, p.padded, receiving.log_mass, receiving.mass);
  memcpy(saved, receiving.log_mass, sizeof(float) * size_t(p.rank));
  return plan;
}

// Raises `top`, the largest exponent of each column so far, to what the block holds. What was summed in units of exp(top)
// fades by `fade`; says whether anything does.
static bool raise_tops(const View& s, int count, const float* row, int vectors, float* top, float* fade) {
  bool raised = false;
  for (int v = 0; v < vectors; v++) {
    const V before = load(top + v * W);
    V now = before;
    for (int i = 0; i < count; i++) now = vmax(now, load(s.data + i * s.ld + v * W) + row[i]);
    const V faded = vexp(before - now);
    store(top + v * W, now);
    store(fade + v * W, faded);
    raised = raised || reduce_spread<Min>(faded)[0] < 1;
  }
  return raised;
}

static void fade_sums(const Worker& k, const float* fade, int padded, int width) {
  for (int j = 0; j < padded; j++) {
    if (fade[j] == 1) continue;
    k.columns[j] *= fade[j];
    for (int d = 0; d < width; d++) k.product[int64_t(j) * width + d] *= fade[j];
  }
}

// Keys that are not solved, W = softmax_i(log a + s): `Wᵀ v` goes to the product of worker 0, −LSE_i(log a + s) to
// `closing`. One pass, with the sums of each column in units of its largest exponent so far.
static void average_values(const Head& head, const Tokens& t, const Rows& values, float* closing) {
  const Measure& p = head.pivots;
  const int width = head.value_padded;
  float* tops = head.arena.take<float>(head.workers * p.padded);
  float* fades = head.arena.take<float>(head.workers * p.padded);
  start_columns(head);
  start_products(head, width);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    float *top = tops + (&k - head.worker) * p.padded, *fade = fades + (&k - head.worker) * p.padded;
    for (int j = 0; j < p.padded; j++) top[j] = kNothing;
    for (int l = 0; l < kBlock; l++) k.extra[l] = 1;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      score_block(head, t, k, i, count, k.plan);
      log_masses(t.mass.at(i), count, k.weight);
      if (raise_tops(k.plan, count, k.weight, p.vectors, top, fade)) fade_sums(k, fade, p.padded, width);
      for (int j = 0; j < p.padded; j++) fade[j] = -top[j];
      exp_plan(k.plan, count, k.weight, fade, p.vectors, k.plan);
      weigh_columns(k.plan, count, k.extra, p.vectors, k.column, k.columns);
      const View v = read_rows(t, values, i, count, head.call->value_dim, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, v.data, v.ld, width / W, k.product, width);
    }
  });
  float* best = head.arena.take<float>(p.padded);
  for (int j = 0; j < p.padded; j++) {
    best[j] = tops[j];
    for (int w = 1; w < head.workers; w++) best[j] = most(best[j], tops[w * p.padded + j]);
  }
  for (int w = 0; w < head.workers && head.workers > 1; w++) {
    for (int j = 0; j < p.padded; j++) fades[j] = expf(tops[w * p.padded + j] - best[j]);
    fade_sums(head.worker[w], fades, p.padded, width);
  }
  collect_columns(head);
  collect_products(head, width);
  for (int j = 0; j < p.rank; j++) {
    const double sum = head.worker[0].columns[j];
    closing[j] = float(-(best[j] + log(sum)));
    for (int d = 0; d < width; d++) head.worker[0].product[int64_t(j) * width + d] *= float(1 / sum);
  }
}

}  // namespace
