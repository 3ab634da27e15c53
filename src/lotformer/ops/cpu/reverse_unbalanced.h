// The way back through sides that nothing is imposed on.
#pragma once
#include "reverse_log.h"
#include "reverse_scaling.h"

namespace {

// Sends the output gradient through P = softmax_j(s + log m): fills y.grad and dg, the gradient of log m.
static void reverse_spread(Reverse& r, const Rows& dout, Mixed& y, double* dg) {
  const Head& head = *r.head;
  const float* prior = head.pivots.log_mass;
  if (!r.grad.data) return reverse_query_plan(r, dout, {prior}, ones(head), y, dg, nullptr);
  score_all(head, *r.t, r.rows);
  reverse_query_plan_log(r, dout, prior, y, dg);
}

// What the keys' solve tells about log m', normalised, goes on to the scores and, added to dg, to log m.
static void reverse_sent(Reverse& r, const Measure& received, const double* grad, double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  double *step = head.arena.zeros<double>(p.padded), all = 0;
  for (int j = 0; j < p.rank; j++) all += grad[j];
  auto sent = [&](int j) {
    const bool felt = received.log_mass[j] > head.call->least_log_mass;  // lighter ones have counted as this light
    return felt ? grad[j] - received.mass[j] * all : 0.0;
  };
  if (r.grad.data) {
    float* closing = head.arena.take<float>(p.padded);
    for (int j = 0; j < p.padded; j++) closing[j] = j < p.rank ? p.log_mass[j] - received.log_mass[j] : kNothing;
    for (int j = 0; j < p.rank; j++) step[j] = -sent(j);
    reverse_columns_log(r, p.log_mass, closing, step);
  } else {
    float* c = head.arena.zeros<float>(p.padded);
    for (int j = 0; j < p.rank; j++) c[j] = float(-sent(j) / received.mass[j]);
    reverse_columns(r, ones(head), c, step);
  }
  for (int j = 0; j < p.rank; j++) dg[j] += step[j] + sent(j);
}

// Keys that are not solved, W_ij = exp(log a_i + s_ij + closing_j): one pass from the gradient of what the pivots hold to
// those of values and tokens, and of log a if that is wanted. `Sink` takes blocks of the gradient of the scores.
template <class Sink>
static void reverse_average(const Head& head, const Tokens& t, const Rows& values, const Rows& dv, const float* closing,
                            const Mixed& y, double* log_mass, const Sink& sink) {
  const Measure& p = head.pivots;
  const int width = head.call->value_dim, vectors = head.value_padded / W;
  const float *grad_t = transposed(head, y.grad, ones(head)), *one = ones(head);
  float* level = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) level[j] = float(dot_row(head, y.value, y.grad, j));
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      score_block(head, t, k, i, count, k.plan);
      log_masses(t.mass.at(i), count, k.weight);
      exp_plan(k.plan, count, k.weight, closing, p.vectors, k.plan);
      const Block to = target_rows(t, dv, i, width, k.output);
      multiply_nn(k.plan.data, k.plan.ld, count, p.rank, y.grad, head.value_padded, vectors, to.data, to.ld);
      const View v = read_values(head, t, values, i, count, false, k.input);
      multiply_nn(v.data, v.ld, count, width, grad_t, p.padded, p.vectors, k.other.data, k.other.ld);
      write_rows(t, dv, i, count, width, to, k.output);
      for (int l = 0; l < count; l++) k.extra[l] = 0;
      softmax_gradient(k.plan, level, k.extra, count, p.vectors, k.other);
      if (log_mass) {
        for (int l = count; l < round_up(count, W); l++)
          memset(k.other.at(l).data, 0, sizeof(float) * size_t(p.padded));
        dot_rows(k.other, count, one, p.vectors, k.extra);
        for (int l = 0; l < count; l++) log_mass[i + l] += k.extra[l];
      }
      sink(k, i, count, k.other);
    }
  });
}

}  // namespace
