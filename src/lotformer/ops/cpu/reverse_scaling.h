// The way back in scaling form: K is formed again, every half-step adds columns of A.
//
// Columns are numbered as they are claimed: on the key side first the row scales, then for both one of the plan, two for
// each of its sums, and on the key side by sweeps one for the first half-step.
#pragma once
#include "reverse.h"

namespace {

// How rows of K become rows of the plan: u of a block, the scales of its rows in A.
LOT_INLINE const float* scale_plan(const Reverse& r, Worker& k, const View& e, int64_t i, int count) {
  float* scales = column_at(r, k, r.row_scale, i);
  const bool keys = r.plan_level != nullptr;  // their rows are weighed
  float* u = keys ? k.extra : scales;
  dot_rows(e, count, r.plan_scaling, r.head->pivots.vectors, k.sum);
  divide_masses(r.t->mass.at(i), k.sum, count, u, keys ? scales : k.weight);
  return u;
}

// The plan's own column of A, from the gradient of the plan; `shift` gets the gradient of f. Returns the column.
LOT_INLINE const float* weigh_plan(const Reverse& r, Worker& k, const View& e, const float* u, int64_t i, int count) {
  const float* scales = column_at(r, k, r.row_scale, i);
  float* weight = column_at(r, k, r.plan_level ? 1 : 0, i);
  dot_blocks(e, r.plan_grad.at(i), count, r.head->pivots.vectors, k.shift, r.plan_level);
  for (int l = 0; l < count; l += W) {
    const V df = load(scales + l) * load(k.shift + l);
    store(k.shift + l, df);
    store(weight + l, load(u + l) * df);
  }
  return weight;
}

// The two columns of A that sums of K add; `shift` gets the gradient of f. Returns the second one.
LOT_INLINE const float* weigh_sums(const Reverse& r, Worker& k, const View& e, int which, int64_t i, int count) {
  const int column = (r.plan_level ? 2 : 1) + 2 * which, vectors = r.head->pivots.vectors;
  float *mass = column_at(r, k, column, i), *weight = column_at(r, k, column + 1, i);
  dot_rows(e, count, r.sums[which].b, vectors, k.sum);
  dot_rows(e, count, r.sums[which].c, vectors, k.shift);
  divide_masses(r.t->mass.at(i), k.sum, count, k.extra, mass);
  for (int l = 0; l < count; l += W) {
    const V df = -(load(mass + l) * load(k.shift + l));
    store(k.shift + l, df);
    store(weight + l, load(k.extra + l) * df);
  }
  return weight;
}

// The last column of A: a_i exp(shift_i − origin), weights of the first half-step of the key side.
LOT_INLINE void weigh_first(const Reverse& r, Worker& k, int64_t i, int count) {
  float* weight = column_at(r, k, r.width - 1, i);
  for (int l = 0; l < count; l += W)
    store(weight + l, load(r.t->mass.at(i) + l) * vexp(load(k.shift + l) - *r.origin));
}

// All columns of A for a block, from K and the gradient of the plan.
static void replay_columns(const Reverse& r, Worker& k, int64_t i, int count) {
  const View e = r.rows.at(i);
  weigh_plan(r, k, e, scale_plan(r, k, e, i, count), i, count);
  for (int which = 0; which < r.met; which++) weigh_sums(r, k, e, which, i, count);
  if (!r.origin) return;
  first_scores(*r.head, *r.t, k, i, count, {starting_potential(*r.head)}, k.other);
  weigh_first(r, k, i, count);
}

// Forms K with `base` in the exponent and sends the output gradient through P_ij = u_i K_ij b_j:
// fills y.grad and dg, the gradient of log b.
static void reverse_query_plan(Reverse& r, const Rows& dout, const Potential& base, const float* b, Mixed& y,
                               double* dg, const HessianSink* hessian) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int width = head.call->value_dim, vectors = head.value_padded / W;
  const float* values_t = transposed(head, y.centered, b);
  r.plan_scaling = b;
  claim(r, -1.f, b);
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = r.rows.at(i);
      first_scores(head, t, k, i, count, base, e);
      const float* u = scale_plan(r, k, e, i, count);
      if (hessian) hessian->add(k, e, u, t.mass.at(i), count);
      scale_rows(e, count, u, p.vectors, k.plan);
      const View d = read_rows(t, dout, i, count, width, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, d.data, d.ld, vectors, k.product, head.value_padded);
      const Block plan_grad = r.plan_grad.at(i);
      multiply_nn(d.data, d.ld, count, width, values_t, p.padded, p.vectors, plan_grad.data, plan_grad.ld);
      weigh_columns(e, count, weigh_plan(r, k, e, u, i, count), p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  collect_products(head, head.value_padded);
  for (int j = 0; j < p.rank; j++) {
    for (int d = 0; d < head.value_padded; d++)
      y.grad[int64_t(j) * head.value_padded + d] = b[j] * head.worker[0].product[int64_t(j) * head.value_padded + d];
    dg[j] = dot_row(head, y.centered, y.grad, j) - b[j] * head.worker[0].columns[j];
  }
}

// The same for W_ij = a_i u_i K_ij ω_j, u from b: writes the gradient of v and fills dg, that of log b.
// `origin` (scaling form only) asks for the column a_i exp(shift_i − origin) of the first half-step.
static void reverse_key_plan(Reverse& r, const Rows& values, const Rows& dv, const Potential& base, const float* b,
                             const float* omega, const Mixed& y, const float* origin, double* dg,
                             const HessianSink* hessian) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int width = head.call->value_dim;
  float* send = head.arena.zeros<float>(int64_t(p.padded) * head.value_padded);  // ω dY
  float* level = head.arena.zeros<float>(p.padded);                             // ω κ, κ_j = Y_j · dY_j
  const float* values_t = transposed(head, y.grad, omega);
  for (int j = 0; j < p.rank; j++) {
    for (int d = 0; d < head.value_padded; d++)
      send[int64_t(j) * head.value_padded + d] = omega[j] * y.grad[int64_t(j) * head.value_padded + d];
    level[j] = float(omega[j] * dot_row(head, y.value, y.grad, j));
  }
  r.plan_scaling = b;
  r.plan_level = level;
  r.origin = origin;
  r.row_scale = claim(r, -1.f, level);
  claim(r, -1.f, b);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = r.rows.at(i);
      first_scores(head, t, k, i, count, base, e);
      if (origin) weigh_first(r, k, i, count);
      const float* u = scale_plan(r, k, e, i, count);
      if (hessian) hessian->add(k, e, u, t.mass.at(i), count);
      const Block to = target_rows(t, dv, i, width, k.output);
      multiply_nn(e.data, e.ld, count, p.rank, send, head.value_padded, head.value_padded / W, to.data, to.ld,
                  column_at(r, k, r.row_scale, i));
      const View v = read_values(head, t, values, i, count, true, k.input);
      write_rows(t, dv, i, count, width, to, k.output);
      const Block plan_grad = r.plan_grad.at(i);
      multiply_nn(v.data, v.ld, count, width, values_t, p.padded, p.vectors, plan_grad.data, plan_grad.ld);
      const float* weight = weigh_plan(r, k, e, u, i, count);
      add_log_mass(r, i, count, k.shift);
      weigh_columns(e, count, weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -b[j] * head.worker[0].columns[j];
}

// The sums Σ_i a_i u_i K_ij with u from `b`, of gradient −c: the gradient of log b goes to dg if that is wanted.
static void reverse_columns(Reverse& r, const float* b, const float* c, double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const int which = r.met++;
  r.sums[which] = {b, c};
  claim(r, -1.f, c);
  claim(r, -1.f, b);
  if (r.replays && !dg && !r.log_mass) return;  // there is nothing to be had of it yet
  start_columns(head);
  head.each_range(r.t->count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View e = r.rows.at(i);
      const float* weight = weigh_sums(r, k, e, which, i, count);
      add_log_mass(r, i, count, k.shift);
      if (dg) weigh_columns(e, count, weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; dg && j < p.rank; j++) dg[j] = -b[j] * head.worker[0].columns[j];
}

// One sweep backwards: u from `b`, the column half-step that followed gave `next`, whose log has gradient dg.
// Replaces dg by the gradient of log b unless it is the last one.
static void reverse_sweep(Reverse& r, const float* b, const float* next, double* dg, bool last_one) {
  const Measure& p = r.head->pivots;
  float* c = r.head->arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) c[j] = float(next[j] / p.mass[j] * dg[j]);
  reverse_columns(r, b, c, last_one ? nullptr : dg);
}

// The first half-step of the key side: f = 0, weights of the tokens already in the last column of A.
static void reverse_first_key_step(Reverse& r, const float* next, const double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  float* c = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) c[j] = float(next[j] / p.mass[j] * dg[j]);
  claim(r, -1.f, c);
  if (!r.log_mass) return;
  head.each_range(r.t->count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      if (r.replays) {
        first_scores(head, *r.t, k, i, count, {starting_potential(head)}, k.other);
        weigh_first(r, k, i, count);
      }
      dot_rows(r.rows.at(i), count, c, p.vectors, k.sum);
      for (int l = 0; l < count; l++) r.log_mass[i + l] -= column_at(r, k, r.width - 1, i)[l] * k.sum[l];
    }
  });
}

}  // namespace
