// T sweeps from zero potentials and the closing half-step, as in `reference.py`.
//
// Scaling form: K = exp(s − row maximum) is formed once and every half-step multiplies,
//
//     u_i = 1 / Σ_j K_ij b_j        b_j = m_j / Σ_i a_i u_i K_ij        (b = exp g, u = exp(f + row maximum))
//
// K is exact to 1e-37 per entry, which kLost makes little of; while the scalings stay in the range that `rescale` allows
// that is below rounding. Otherwise the head is solved again in log form, from the scores, with two exponentials per
// score and sweep.
#pragma once
#include "blocks.h"

namespace {

constexpr float kLost = 1e-30f;  // entries below 1e-37 are not told apart; a column must be this large not to feel them
constexpr float kSmallest = 1e-24f, kLargest = 1e24f, kRange = 1e28f;

// The scalings of the pivots and the smallest of them.
struct Scaling {
  float* b;
  float low;
};

// New scalings from column sums; false when either leaves the range in which fp32 products are trustworthy.
static bool rescale(const Measure& p, const double* columns, Scaling& scaling) {
  V low = splat(kLargest), high = V{};
  VI sound = low == low;
  for (int v = 0; v < p.vectors; v++) {
    V column, next;
    for (int t = 0; t < W; t++) {
      column[t] = float(columns[v * W + t]);
      next[t] = float(p.mass[v * W + t] / columns[v * W + t]);
    }
    const VI real = ~(load(p.log_mass + v * W) <= 0.5f * kNothing);  // also what is not a number
    sound &= ((column * scaling.low > kLost) & (column < 1e30f)) | ~real;
    low = real && next < low ? next : low;
    high = real && next > high ? next : high;
    store(scaling.b + v * W, real ? next : V{});
  }
  scaling.low = reduce_spread<Min>(low)[0];
  const float top = reduce_spread<Max>(high)[0];
  for (int t = 0; t < W; t++)
    if (!sound[t]) return false;
  return scaling.low > kSmallest && top < kLargest && top < kRange * scaling.low;
}

// The potential that sweeps start from, nullptr if it is nothing but zeros.
static const float* starting_potential(const Head& head) {
  return head.pivots.rank == head.pivots.padded ? nullptr : head.pivots.zero;
}

// e = exp(s + base − shift), with the row's maximum as shift.
static void first_scores(const Head& head, const Tokens& t, Worker& k, int64_t i, int count,
                         const Potential& base, const Block& e) {
  const Measure& p = head.pivots;
  if (!p.scaled && !base.low) {
    const View x = read_rows(t, t.rows, i, count, p.rank, true, k.input);
    return exp_block(x, count, p.temperature, {base.high ? base.high : p.zero}, p.vectors, e, k.shift, k.sum);
  }
  score_block(head, t, k, i, count, e);
  exp_block(e, count, 1.f, base, p.vectors, e, k.shift, k.sum);
}

// Query side: fills `kernel` and `b` (the last scaling), writes b of every sweep to `trace`.
static bool query_sweeps(const Head& head, const Tokens& t, const Block& kernel, float* b, float* trace) {
  const Measure& p = head.pivots;
  const float* base = starting_potential(head);
  Scaling scaling{b, 1};
  for (int sweep = 0; sweep < head.call->iters; sweep++) {
    start_columns(head);
    head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i += kBlock) {
        const int count = int(least<int64_t>(kBlock, last - i));
        const Block e = kernel.at(i);
        if (sweep == 0)
          first_scores(head, t, k, i, count, {base}, e);
        else
          dot_rows(e, count, b, p.vectors, k.sum);
        divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
        weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
      }
    });
    collect_columns(head);
    if (!rescale(p, head.worker[0].columns, scaling)) return false;
    memcpy(trace + int64_t(sweep) * p.rank, b, sizeof(float) * size_t(p.rank));
  }
  return true;
}

// Adds mass · exp(shift) times the rows to the columns, in units of exp(top) where top is the largest shift so far.
static void weigh_raw(const float* mass, const View& e, int count, int vectors, Worker& k, bool& started) {
  float top = k.shift[0];
  for (int i = 1; i < count; i++) top = most(top, k.shift[i]);
  if (!started || top > k.top) {
    if (started)
      for (int j = 0; j < vectors * W; j++) k.columns[j] *= exp(k.top - top);
    k.top = top;
    started = true;
  }
  for (int i = 0; i < count; i += W)
    store(k.weight + i, load(mass + i) * vexp(load(k.shift + i) - float(k.top)));
  weigh_columns(e, count, k.weight, vectors, k.column, k.columns);
}

// Merges columns kept in units of exp(top).
static double collect_raw(const Head& head) {
  double top = -1e300;
  for (int w = 0; w < head.workers; w++) top = most(top, head.worker[w].top);
  for (int w = 0; w < head.workers; w++)
    for (int j = 0; j < head.pivots.padded; j++) head.worker[w].columns[j] *= exp(head.worker[w].top - top);
  collect_columns(head);
  return top;
}

// Key side: writes b of the T + 1 column half-steps to `trace`, `Wᵀ v` to the product of worker 0.
// The first scaling is in units of exp(-origin).
static bool key_sweeps(const Head& head, const Tokens& t, const Rows& values, const Block& kernel,
                       float* trace, float* origin) {
  const Measure& p = head.pivots;
  const int rounds = head.call->iters;
  const float* base = starting_potential(head);
  float* b = head.arena.zeros<float>(p.padded);
  start_columns(head);
  for (int w = 0; w < head.workers; w++) head.worker[w].top = -1e300;
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    bool started = false;
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = kernel.at(i);
      first_scores(head, t, k, i, count, {base}, e);
      weigh_raw(t.mass.at(i), e, count, p.vectors, k, started);
    }
  });
  const double top = collect_raw(head);
  double largest = 0;
  for (int j = 0; j < p.rank; j++) {
    if (!(head.worker[0].columns[j] > kLost)) return false;
    largest = most(largest, p.mass[j] / head.worker[0].columns[j]);
  }
  for (int j = 0; j < p.rank; j++) head.worker[0].columns[j] *= largest;
  Scaling scaling{b, 1};
  if (!rescale(p, head.worker[0].columns, scaling)) return false;
  *origin = float(top - log(largest));
  memcpy(trace, b, sizeof(float) * size_t(p.rank));
  start_products(head, head.value_padded);
  for (int sweep = 1; sweep <= rounds; sweep++) {
    start_columns(head);
    head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i += kBlock) {
        const int count = int(least<int64_t>(kBlock, last - i));
        const Block e = kernel.at(i);
        dot_rows(e, count, b, p.vectors, k.sum);
        divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
        weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
        if (sweep < rounds) continue;
        scale_rows_and_columns(e, count, k.weight, b, p.vectors, e);  // the plan: its sums of values are no larger
        const View v = read_rows(t, values, i, count, head.call->value_dim, true, k.input);
        multiply_tn(e.data, e.ld, p.padded, count, v.data, v.ld, head.value_padded / W, k.product, head.value_padded);
      }
    });
    collect_columns(head);
    if (!rescale(p, head.worker[0].columns, scaling)) return false;
    memcpy(trace + int64_t(sweep) * p.rank, b, sizeof(float) * size_t(p.rank));
  }
  collect_products(head, head.value_padded);
  const float* last = trace + int64_t(rounds - 1) * p.rank;  // the scalings that the plan was made with
  for (int j = 0; j < p.rank; j++) {
    const float inverse = float(1.0 / (head.worker[0].columns[j] * last[j]));
    for (int d = 0; d < head.value_padded; d++) head.worker[0].product[int64_t(j) * head.value_padded + d] *= inverse;
  }
  return true;
}

// The largest relative deviation of column sums of the keys' plan from the masses of the pivots before the closing
// half-step, which is what that changed; `last_two` from the trace.
static float last_change(const Measure& p, const float* last_two, bool logarithmic) {
  float largest = 0;
  for (int j = 0; j < p.rank; j++) {
    if (!(p.log_mass[j] > least_log_mass(kNewton))) continue;  // no mass to speak of
    const float before = last_two[j], after = last_two[p.rank + j];
    const float change = fabsf(logarithmic ? expm1f(before - after) : before / after - 1);
    largest = change <= largest ? largest : change;  // what is not a number stays so
  }
  return largest;
}

// ---- log form ----

static void score_all(const Head& head, const Tokens& t, const Block& scores) {
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock)
      score_block(head, t, k, i, int(least<int64_t>(kBlock, last - i)), scores.at(i));
  });
}

LOT_INLINE void log_masses(const float* mass, int count, float* to) {
  for (int i = 0; i < count; i += W) {
    const V a = load(mass + i);
    store(to + i, a > 0.f ? vlog(vmax(a, splat(kTiny))) : splat(kNothing));
  }
}

// shift ← log a + f where f = −LSE_j(s + g), or f = 0 without g; `sum` keeps f and `plan` softmax_j(s + g).
static void row_potential(const View& s, const float* mass, int count, const float* g, int vectors, Worker& k) {
  log_masses(mass, count, k.weight);
  if (g) {
    exp_block(s, count, 1.f, {g}, vectors, k.plan, k.shift, k.sum);
    for (int i = 0; i < count; i += W) store(k.extra + i, 1.f / vmax(load(k.sum + i), splat(kTiny)));
    scale_rows(k.plan, count, k.extra, vectors, k.plan);
  }
  for (int i = 0; i < count; i += W) {
    const V f = g ? -(load(k.shift + i) + vlog(vmax(load(k.sum + i), splat(kTiny)))) : V{};
    store(k.sum + i, f);
    store(k.shift + i, f + load(k.weight + i));
  }
}

// e = exp(s + row + column)
static void exp_plan(const View& s, int count, const float* row, const float* column, int vectors, const Block& e) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++)
      store(e.data + i * e.ld + v * W, vexp(load(s.data + i * s.ld + v * W) + row[i] + load(column + v * W)));
  for (int i = count; i < round_up(count, W); i++)
    for (int v = 0; v < vectors; v++) store(e.data + i * e.ld + v * W, V{});
}

// next_j = log m_j − LSE_i(log a_i + s_ij + f_i),  f from g (f = 0 without g).
static void log_half_steps(const Head& head, const Tokens& t, const View& scores, const float* g, float* next) {
  const Measure& p = head.pivots;
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int j = 0; j < p.padded; j++) k.column[j] = kNothing;  // running maximum of each column
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = scores.at(i);
      row_potential(s, t.mass.at(i), count, g, p.vectors, k);
      for (int v = 0; v < p.vectors; v++) {
        V top = load(k.column + v * W);
        const V before = top;
        for (int r = 0; r < count; r++) top = vmax(top, load(s.data + r * s.ld + v * W) + k.shift[r]);
        V total = V{};
        for (int r = 0; r < count; r++) total += vexp(load(s.data + r * s.ld + v * W) + k.shift[r] - top);
        const V faded = vexp(before - top);
        store(k.column + v * W, top);
        for (int j = 0; j < W; j++) {
          double& sum = k.columns[v * W + j];
          sum = sum * faded[j] + total[j];
        }
      }
    }
  });
  for (int j = 0; j < p.padded; j++) {
    if (j >= p.rank) {
      next[j] = kNothing;
      continue;
    }
    float top = head.worker[0].column[j];
    for (int w = 1; w < head.workers; w++) top = most(top, head.worker[w].column[j]);
    double sum = 0;
    for (int w = 0; w < head.workers; w++)
      sum += head.worker[w].columns[j] * exp(double(head.worker[w].column[j] - top));
    next[j] = float(p.log_mass[j] - (top + log(sum)));
  }
}

// Query side in log form: fills `scores` and the last potential g, writes g of every sweep to `trace`.
static void query_sweeps_log(const Head& head, const Tokens& t, const Block& scores, float* g, float* trace) {
  const Measure& p = head.pivots;
  score_all(head, t, scores);
  memcpy(g, p.zero, sizeof(float) * size_t(p.padded));
  for (int sweep = 0; sweep < head.call->iters; sweep++) {
    log_half_steps(head, t, scores, g, g);
    memcpy(trace + int64_t(sweep) * p.rank, g, sizeof(float) * size_t(p.rank));
  }
}

static void key_sweeps_log(const Head& head, const Tokens& t, const Rows& values, const Block& scores, float* trace) {
  const Measure& p = head.pivots;
  float* g = head.arena.take<float>(p.padded);
  float* last_g = head.arena.take<float>(p.padded);
  score_all(head, t, scores);
  for (int sweep = 0; sweep <= head.call->iters; sweep++) {
    memcpy(last_g, g, sizeof(float) * size_t(p.padded));
    log_half_steps(head, t, scores, sweep ? g : nullptr, g);
    memcpy(trace + int64_t(sweep) * p.rank, g, sizeof(float) * size_t(p.rank));
  }
  float* column = head.arena.take<float>(p.padded);  // g − log m: turns the plan into W
  for (int j = 0; j < p.padded; j++) column[j] = j < p.rank ? g[j] - p.log_mass[j] : kNothing;
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      row_potential(scores.at(i), t.mass.at(i), count, last_g, p.vectors, k);
      for (int l = 0; l < kBlock; l++) k.extra[l] = 1;
      exp_plan(scores.at(i), count, k.shift, column, p.vectors, k.plan);
      weigh_columns(k.plan, count, k.extra, p.vectors, k.column, k.columns);
      const View v = read_rows(t, values, i, count, head.call->value_dim, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, v.data, v.ld, head.value_padded / W, k.product,
                  head.value_padded);
    }
  });
  collect_columns(head);
  collect_products(head, head.value_padded);
  for (int j = 0; j < p.rank; j++) {
    const float inverse = float(1.0 / head.worker[0].columns[j]);
    for (int d = 0; d < head.value_padded; d++) head.worker[0].product[int64_t(j) * head.value_padded + d] *= inverse;
  }
}

}  // namespace
