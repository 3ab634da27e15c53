// The way back in scaling form: K is formed again, every half-step adds columns of A.
#pragma once
#include "reverse.h"

namespace {

// Forms K with `base` in the exponent and sends the output gradient through P_ij = u_i K_ij b_j:
// fills y.grad and dg, the gradient of log b.
static void reverse_query_plan(Reverse& r, const Rows& dout, const Potential& base, const float* b, Mixed& y,
                               double* dg, const HessianSink* hessian) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int width = head.call->value_dim, vectors = head.value_padded / W;
  const float* values_t = transposed(head, y.centered, b);
  const int column = claim(r, -1.f, b);
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = r.rows.at(i);
      first_scores(head, t, k, i, count, base, e);
      dot_rows(e, count, b, p.vectors, k.sum);
      float* u = r.row_scale + i;
      divide_masses(t.mass + i, k.sum, count, u, k.weight);
      if (hessian) hessian->add(k, e, u, t.mass + i, count);
      scale_rows(e, count, u, p.vectors, k.plan);
      const View d = read_rows(t, dout, i, count, width, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, d.data, d.ld, vectors, k.product, head.value_padded);
      const Block plan_grad = r.plan_grad.at(i);
      multiply_nn(d.data, d.ld, count, width, values_t, p.padded, p.vectors, plan_grad.data, plan_grad.ld);
      dot_blocks(k.plan, plan_grad, count, p.vectors, k.extra);
      float* weight = column_at(r, column, i);
      for (int l = 0; l < count; l += W) store(weight + l, load(u + l) * load(k.extra + l));
      weigh_columns(e, count, weight, p.vectors, k.column, k.columns);
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
  r.row_scale = column_at(r, claim(r, -1.f, level), 0);
  const int row = claim(r, -1.f, b);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block e = r.rows.at(i);
      first_scores(head, t, k, i, count, base, e);
      if (origin)
        for (int l = 0; l < count; l += W)
          store(column_at(r, r.width - 1, i + l), load(t.mass + i + l) * vexp(load(k.shift + l) - *origin));
      dot_rows(e, count, b, p.vectors, k.sum);
      divide_masses(t.mass + i, k.sum, count, k.extra, r.row_scale + i);
      if (hessian) hessian->add(k, e, k.extra, t.mass + i, count);
      const Block to = target_rows(t, dv, i, width, k.output);
      multiply_nn(e.data, e.ld, count, p.rank, send, head.value_padded, head.value_padded / W, to.data, to.ld,
                  r.row_scale + i);
      const View v = read_rows(t, values, i, count, width, true, k.input);
      write_rows(t, dv, i, count, width, to, k.output);
      const Block plan_grad = r.plan_grad.at(i);
      multiply_nn(v.data, v.ld, count, width, values_t, p.padded, p.vectors, plan_grad.data, plan_grad.ld);
      dot_blocks(e, plan_grad, count, p.vectors, k.shift, level);
      float* weight = column_at(r, row, i);
      for (int l = 0; l < count; l += W) {
        const V df = load(r.row_scale + i + l) * load(k.shift + l);
        store(k.shift + l, df);
        store(weight + l, load(k.extra + l) * df);
      }
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
  const Tokens& t = *r.t;
  const int column = claim(r, -1.f, c), row = claim(r, -1.f, b);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View e = r.rows.at(i);
      dot_rows(e, count, b, p.vectors, k.sum);
      dot_rows(e, count, c, p.vectors, k.shift);
      float *mass = column_at(r, column, i), *weight = column_at(r, row, i);
      divide_masses(t.mass + i, k.sum, count, k.extra, mass);
      for (int l = 0; l < count; l += W) {
        const V df = -(load(mass + l) * load(k.shift + l));
        store(k.shift + l, df);
        store(weight + l, load(k.extra + l) * df);
      }
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
  const int column = claim(r, -1.f, c);
  if (!r.log_mass) return;
  head.each_range(r.t->count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      dot_rows(r.rows.at(i), count, c, p.vectors, k.sum);
      for (int l = 0; l < count; l++) r.log_mass[i + l] -= column_at(r, column, i)[l] * k.sum[l];
    }
  });
}

}  // namespace
