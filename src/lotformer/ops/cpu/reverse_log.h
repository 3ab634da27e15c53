// The way back in log form: every half-step adds to the gradient of the scores.
#pragma once
#include "reverse.h"

namespace {

// grad −= plan_ij x_j + other_ij y_i (the second where given)
static void subtract_shares(const View& plan, const float* x, const View& other, const float* y, int count,
                            int vectors, const Block& grad) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      V share = load(plan.data + i * plan.ld + v * W) * load(x + v * W);
      if (other.data) share += load(other.data + i * other.ld + v * W) * y[i];
      float* to = grad.data + i * grad.ld + v * W;
      store(to, load(to) - share);
    }
}

// grad = plan ∘ (grad − level_j − row_i)
static void softmax_gradient(const View& plan, const float* level, const float* row, int count, int vectors,
                             const Block& grad) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      float* to = grad.data + i * grad.ld + v * W;
      store(to, load(plan.data + i * plan.ld + v * W) * (load(to) - load(level + v * W) - row[i]));
    }
}

static void reverse_query_plan_log(Reverse& r, const Rows& dout, const float* g, Mixed& y, double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int width = head.call->value_dim;
  const float *values_t = transposed(head, y.centered, ones(head)), *nothing = head.arena.zeros<float>(p.padded);
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const Block grad = r.grad.at(i);
      exp_block(r.rows.at(i), count, 1.f, {g}, p.vectors, k.plan, k.shift, k.sum);
      divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
      scale_rows(k.plan, count, k.extra, p.vectors, k.plan);
      const View d = read_rows(t, dout, i, count, width, true, k.input);
      multiply_tn(k.plan.data, k.plan.ld, p.padded, count, d.data, d.ld, head.value_padded / W, k.product,
                  head.value_padded);
      multiply_nn(d.data, d.ld, count, width, values_t, p.padded, p.vectors, grad.data, grad.ld);
      dot_blocks(k.plan, grad, count, p.vectors, k.extra);
      softmax_gradient(k.plan, nothing, k.extra, count, p.vectors, grad);
      for (int l = 0; l < count; l++) k.weight[l] = 1;
      weigh_columns(grad, count, k.weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  collect_products(head, head.value_padded);
  memcpy(y.grad, head.worker[0].product, sizeof(float) * size_t(p.rank) * size_t(head.value_padded));
  for (int j = 0; j < p.rank; j++) dg[j] = head.worker[0].columns[j];
}

static void reverse_key_plan_log(Reverse& r, const Rows& values, const Rows& dv, const float* g, const float* closing,
                                 const Mixed& y, double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int width = head.call->value_dim, vectors = head.value_padded / W;
  const float* grad_t = transposed(head, y.grad, ones(head));
  float* level = head.arena.zeros<float>(p.padded);
  const float* nothing = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) level[j] = float(dot_row(head, y.value, y.grad, j));
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = r.rows.at(i);
      const Block grad = r.grad.at(i);
      row_potential(s, t.mass.at(i), count, g, p.vectors, k);
      exp_plan(s, count, k.shift, closing, p.vectors, k.other);
      const Block to = target_rows(t, dv, i, width, k.output);
      multiply_nn(k.other.data, k.other.ld, count, p.rank, y.grad, head.value_padded, vectors, to.data, to.ld);
      write_rows(t, dv, i, count, width, to, k.output);
      const View v = read_values(head, t, values, i, count, false, k.input);
      multiply_nn(v.data, v.ld, count, width, grad_t, p.padded, p.vectors, grad.data, grad.ld);
      for (int l = 0; l < count; l++) k.extra[l] = 0;
      softmax_gradient(k.other, level, k.extra, count, p.vectors, grad);
      for (int j = 0; j < p.rank; j++) k.column[j] = 1;
      for (int j = p.rank; j < p.padded; j++) k.column[j] = 0;
      for (int l = count; l < round_up(count, W); l++) memset(grad.at(l).data, 0, sizeof(float) * size_t(p.padded));
      dot_rows(grad, count, k.column, p.vectors, k.extra);
      add_log_mass(r, i, count, k.extra);
      subtract_shares(k.other, nothing, k.plan, k.extra, count, p.vectors, grad);
      weigh_columns(k.plan, count, k.extra, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -head.worker[0].columns[j];
}

// The sums Σ_i exp(log a_i + s_ij + f_i + closing_j), f from g, whose logarithms have gradient −dg: which is replaced by
// that of g. Without g, f is zero and constant (the key side's first half-step).
static void reverse_columns_log(Reverse& r, const float* g, const float* closing, double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  float* x = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) x[j] = float(dg[j]);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const View s = r.rows.at(i);
      row_potential(s, t.mass.at(i), count, g, p.vectors, k);
      exp_plan(s, count, k.shift, closing, p.vectors, k.other);
      dot_rows(k.other, count, x, p.vectors, k.extra);
      for (int l = 0; l < count; l++) k.extra[l] = -k.extra[l];
      add_log_mass(r, i, count, k.extra);
      subtract_shares(k.other, x, g ? View(k.plan) : View{}, k.extra, count, p.vectors, r.grad.at(i));
      if (g) weigh_columns(k.plan, count, k.extra, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -head.worker[0].columns[j];
}

// One sweep backwards in log form.
static void reverse_sweep_log(Reverse& r, const float* g, const float* next, double* dg) {
  const Measure& p = r.head->pivots;
  float* closing = r.head->arena.take<float>(p.padded);
  for (int j = 0; j < p.padded; j++) closing[j] = j < p.rank ? next[j] - p.log_mass[j] : kNothing;
  reverse_columns_log(r, g, closing, dg);
}

}  // namespace
