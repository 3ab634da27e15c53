// Gradients. Only the inputs and the potentials of every sweep were kept; K is formed again.
//
// Every half-step of a side is a softmax of the scores, so its share of the score gradient is K_ij times a number of
// the token times a number of the pivot. All shares together are K ∘ (A B) with as many columns of A as half-steps:
// one small product at the end, nothing of size n×r×T. With d = ∂/∂(output of the half-step), from last to first:
//
//     g_j = log m_j − LSE_i(log a_i + s_ij + f_i):   df_i = −a_i u_i Σ_j K_ij c_j,   c_j = b_j dg_j / m_j
//     f_i = −LSE_j(s_ij + g_j):                      dg_j = −b_j Σ_i K_ij u_i df_i
//
// The closing softmaxes start the recursion: the query plan with P ∘ (dP − rowdot), the key plan with W ∘ (dW − coldot).
#pragma once
#include "forward.h"

namespace {

// Sums over the batch for one head, kept apart per group of samples so that threads never meet.
struct Totals {
  float* pivots;       // (rank, dim)
  double* log_masses;  // (rank): with respect to normalised log masses
  double* temperature;
};

// One side of one head on its way back.
struct Reverse {
  const Head* head;
  const Tokens* t;
  float* rows;          // kernel (scaling form) or scores (log form), tokens × padded
  float* grad;          // log form: gradient of the scores, tokens × padded
  float* shares;        // scaling form: gradient of the plan's weights, one row a token
  int64_t shares_ld;
  int width, used;      // columns of A: room and filled
  float *a, *b;         // A: tokens × width, B: width × padded
  float* row_scale;     // weight of the plan's own term in each row
  double* log_mass;     // gradient of log a per token, or nullptr
};

// The shares live where dx, the gradient of the tokens, will be written over them, if its rows have room for them.
static Reverse open_reverse(const Head& head, const Tokens& t, int width, bool logarithmic, bool masses, float* rows,
                            const Rows& dx) {
  Reverse r;
  const int64_t room = round_up(t.count, kBlock);
  r.head = &head;
  r.t = &t;
  r.rows = rows;
  r.grad = logarithmic ? head.arena.take<float>(room * head.pivots.padded) : nullptr;
  const bool in_place = !t.bf16 && !t.index && head.pivots.padded <= head.pivots.dim;
  r.shares_ld = in_place ? dx.token : head.pivots.padded;
  r.shares = logarithmic ? nullptr
             : in_place  ? static_cast<float*>(dx.data)
                         : head.arena.take<float>(room * head.pivots.padded);
  r.width = width;
  r.used = 0;
  r.a = logarithmic ? nullptr : head.arena.take<float>(room * width);
  r.b = head.arena.zeros<float>(int64_t(width) * head.pivots.padded);
  r.row_scale = head.arena.take<float>(room);
  r.log_mass = masses ? head.arena.zeros<double>(room) : nullptr;
  return r;
}

LOT_INLINE View shares_at(const Reverse& r, int64_t first) { return {r.shares + first * r.shares_ld, r.shares_ld}; }

// Claims a column of A and fills its row of B with factor · x.
static int claim(Reverse& r, float factor, const float* x) {
  float* row = r.b + int64_t(r.used) * r.head->pivots.padded;
  for (int j = 0; j < r.head->pivots.rank; j++) row[j] = factor * x[j];
  return r.used++;
}

LOT_INLINE void put_column(const Reverse& r, int column, int64_t first, int count, const float* x) {
  for (int i = 0; i < count; i++) r.a[(first + i) * r.width + column] = x[i];
}

LOT_INLINE void add_log_mass(const Reverse& r, int64_t first, int count, const float* x) {
  if (r.log_mass)
    for (int i = 0; i < count; i++) r.log_mass[first + i] += x[i];
}

// dots[i] = Σ_d x[i, d] (y[i, d] − center[d]) over whole vectors
static void dot_pairs(const View& x, const View& y, const float* center, int count, int vectors, float* dots) {
  for (int i = 0; i < count; i += W) {
    V part[W];
    for (int t = 0; t < W; t++) {
      part[t] = V{};
      if (i + t >= count) continue;
      const float *p = x.data + (i + t) * x.ld, *q = y.data + (i + t) * y.ld;
      for (int v = 0; v < vectors; v++) part[t] += load(p + v * W) * (load(q + v * W) - load(center + v * W));
    }
    store(dots + i, reduce<Add>(part));
  }
}

// to[d, j] = factor[j] · x[j, d]: the right-hand side of products with rows of values.
static float* transposed(const Head& head, const float* x, const float* factor) {
  const Measure& p = head.pivots;
  float* to = head.arena.zeros<float>(int64_t(head.value_padded) * p.padded);
  for (int j = 0; j < p.rank; j++)
    for (int d = 0; d < head.call->value_dim; d++)
      to[int64_t(d) * p.padded + j] = factor[j] * x[int64_t(j) * head.value_padded + d];
  return to;
}

static float* ones(const Head& head) {
  float* x = head.arena.zeros<float>(head.pivots.padded);
  for (int j = 0; j < head.pivots.rank; j++) x[j] = 1;
  return x;
}

// What the pivots hold, and its gradient.
struct Mixed {
  float* value;     // (padded, value_padded): Wᵀ v
  float* centered;  // the same less its mean Σ_j m_j Y_j: rows of P sum to one, so only differences matter
  float* grad;      // (padded, value_padded): Pᵀ dout
};

static Mixed read_mixed(const Head& head, const float* saved) {
  const Measure& p = head.pivots;
  const int64_t width = head.value_padded, size = int64_t(p.padded) * width;
  Mixed y{head.arena.zeros<float>(size), head.arena.zeros<float>(size), head.arena.zeros<float>(size)};
  float* mean = head.arena.zeros<float>(width);
  for (int j = 0; j < p.rank; j++)
    for (int d = 0; d < head.call->value_dim; d++) {
      y.value[j * width + d] = saved[int64_t(j) * head.call->value_dim + d];
      mean[d] += p.mass[j] * y.value[j * width + d];
    }
  for (int j = 0; j < p.rank; j++)
    for (int d = 0; d < head.call->value_dim; d++) y.centered[j * width + d] = y.value[j * width + d] - mean[d];
  return y;
}

// Inner product in double of whole vectors: one sum per lane, so that no addition waits for the one before.
static double dot_double(const float* x, const float* y, int width) {
  double part[W] = {}, sum = 0;
  for (int d = 0; d < width; d += W)
    for (int t = 0; t < W; t++) part[t] += double(x[d + t]) * y[d + t];
  for (int t = 0; t < W; t++) sum += part[t];
  return sum;
}

static double dot_row(const Head& head, const float* x, const float* y, int j) {
  const int64_t at = int64_t(j) * head.value_padded;
  return dot_double(x + at, y + at, head.value_padded);
}

// ---- scaling form ----

// Forms K with `base` in the exponent and sends the output gradient through P_ij = u_i K_ij b_j:
// fills y.grad and dg, the gradient of log b.
static void reverse_query_plan(Reverse& r, const Rows& dout, const float* base, const float* b, Mixed& y, double* dg,
                               const HessianSink* hessian) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int width = head.call->value_dim, vectors = head.value_padded / W;
  const float *values_t = transposed(head, y.centered, b), *nothing = head.arena.zeros<float>(p.padded);
  const int column = claim(r, -1.f, b);
  start_columns(head);
  start_products(head, head.value_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      float* e = r.rows + i * p.padded;
      first_scores(head, t, k, i, count, base, e);
      dot_rows(e, count, b, p.vectors, k.sum);
      float* u = r.row_scale + i;
      divide_masses(t.mass + i, k.sum, count, u, k.weight);
      if (hessian) hessian->add(k, e, u, t.mass + i, count);
      scale_rows(e, count, u, p.vectors, k.plan);
      const View d = read_rows(t, dout, i, count, width, true, k.input);
      multiply_tn(k.plan, p.padded, p.padded, count, d.data, d.ld, vectors, k.product, head.value_padded);
      const View shares = shares_at(r, i);
      multiply_nn(d.data, d.ld, count, width, values_t, p.padded, p.vectors, const_cast<float*>(shares.data), shares.ld);
      dot_pairs({k.plan, p.padded}, shares, nothing, count, p.vectors, k.extra);
      for (int l = 0; l < count; l++) k.weight[l] = u[l] * k.extra[l];
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
      put_column(r, column, i, count, k.weight);
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
static void reverse_key_plan(Reverse& r, const Rows& values, const Rows& dv, const float* base, const float* b,
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
  const int plan = claim(r, -1.f, level), row = claim(r, -1.f, b);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      float* e = r.rows + i * p.padded;
      first_scores(head, t, k, i, count, base, e);
      if (origin)
        for (int l = 0; l < count; l += W) {
          store(k.weight + l, load(t.mass + i + l) * vexp(load(k.shift + l) - *origin));
        }
      if (origin) put_column(r, r.width - 1, i, count, k.weight);
      dot_rows(e, count, b, p.vectors, k.sum);
      divide_masses(t.mass + i, k.sum, count, k.extra, r.row_scale + i);
      if (hessian) hessian->add(k, e, k.extra, t.mass + i, count);
      put_column(r, plan, i, count, r.row_scale + i);
      const View to = target_rows(t, dv, i, width, k.output);
      multiply_nn(e, p.padded, count, p.rank, send, head.value_padded, head.value_padded / W, const_cast<float*>(to.data),
                  to.ld, r.row_scale + i);
      const View v = read_rows(t, values, i, count, width, true, k.input);
      write_rows(t, dv, i, count, width, to, k.output);
      const View shares = shares_at(r, i);
      multiply_nn(v.data, v.ld, count, width, values_t, p.padded, p.vectors, const_cast<float*>(shares.data), shares.ld);
      dot_pairs({e, p.padded}, shares, level, count, p.vectors, k.shift);
      for (int l = 0; l < count; l++) {
        const float df = r.row_scale[i + l] * k.shift[l];
        k.shift[l] = df;
        k.weight[l] = k.extra[l] * df;
      }
      add_log_mass(r, i, count, k.shift);
      put_column(r, row, i, count, k.weight);
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -b[j] * head.worker[0].columns[j];
}

// One sweep backwards: u from `b`, the column half-step that followed gave `next`, whose log has gradient dg.
// Replaces dg by the gradient of log b.
static void reverse_sweep(Reverse& r, const float* b, const float* next, double* dg, bool last_one) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  float* c = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) c[j] = float(next[j] / p.mass[j] * dg[j]);
  const int column = claim(r, -1.f, c), row = claim(r, -1.f, b);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const float* e = r.rows + i * p.padded;
      dot_rows(e, count, b, p.vectors, k.sum);
      dot_rows(e, count, c, p.vectors, k.shift);
      divide_masses(t.mass + i, k.sum, count, k.extra, k.weight);
      put_column(r, column, i, count, k.weight);
      for (int l = 0; l < count; l += W) {
        const V df = -(load(k.weight + l) * load(k.shift + l));
        store(k.shift + l, df);
        store(k.weight + l, load(k.extra + l) * df);
      }
      put_column(r, row, i, count, k.weight);
      add_log_mass(r, i, count, k.shift);
      if (!last_one) weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -b[j] * head.worker[0].columns[j];
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
      dot_rows(r.rows + i * p.padded, count, c, p.vectors, k.sum);
      for (int l = 0; l < count; l++) r.log_mass[i + l] -= r.a[(i + l) * r.width + column] * k.sum[l];
    }
  });
}

// ---- log form ----

// grad −= plan_ij x_j + other_ij y_i (the second where given)
static void subtract_shares(const float* plan, const float* x, const float* other, const float* y, int count,
                            int vectors, float* grad) {
  const int64_t ld = int64_t(vectors) * W;
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      V share = load(plan + i * ld + v * W) * load(x + v * W);
      if (other) share += load(other + i * ld + v * W) * y[i];
      store(grad + i * ld + v * W, load(grad + i * ld + v * W) - share);
    }
}

// to = plan ∘ (to − level_j − row_i)
static void softmax_gradient(const float* plan, const float* level, const float* row, int count, int vectors,
                             float* to) {
  const int64_t ld = int64_t(vectors) * W;
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++)
      store(to + i * ld + v * W,
            load(plan + i * ld + v * W) * (load(to + i * ld + v * W) - load(level + v * W) - row[i]));
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
      float* grad = r.grad + i * p.padded;
      exp_block(r.rows + i * p.padded, count, 1.f, g, p.vectors, k.plan, k.shift, k.sum);
      divide_masses(t.mass + i, k.sum, count, k.extra, k.weight);
      scale_rows(k.plan, count, k.extra, p.vectors, k.plan);
      const View d = read_rows(t, dout, i, count, width, true, k.input);
      multiply_tn(k.plan, p.padded, p.padded, count, d.data, d.ld, head.value_padded / W, k.product,
                  head.value_padded);
      multiply_nn(d.data, d.ld, count, width, values_t, p.padded, p.vectors, grad, p.padded);
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
      const float* s = r.rows + i * p.padded;
      float* grad = r.grad + i * p.padded;
      row_potential(s, t.mass + i, count, g, p.vectors, k);
      exp_plan(s, count, k.shift, closing, p.vectors, k.other);
      const View to = target_rows(t, dv, i, width, k.output);
      multiply_nn(k.other, p.padded, count, p.rank, y.grad, head.value_padded, vectors, const_cast<float*>(to.data),
                  to.ld);
      write_rows(t, dv, i, count, width, to, k.output);
      const View v = read_rows(t, values, i, count, width, false, k.input);
      multiply_nn(v.data, v.ld, count, width, grad_t, p.padded, p.vectors, grad, p.padded);
      for (int l = 0; l < count; l++) k.extra[l] = 0;
      softmax_gradient(k.other, level, k.extra, count, p.vectors, grad);
      for (int j = 0; j < p.rank; j++) k.column[j] = 1;
      for (int j = p.rank; j < p.padded; j++) k.column[j] = 0;
      for (int l = count; l < round_up(count, W); l++) memset(grad + l * p.padded, 0, sizeof(float) * size_t(p.padded));
      dot_rows(grad, count, k.column, p.vectors, k.extra);
      add_log_mass(r, i, count, k.extra);
      subtract_shares(k.other, nothing, k.plan, k.extra, count, p.vectors, grad);
      weigh_columns(k.plan, count, k.extra, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -head.worker[0].columns[j];
}

// One sweep backwards in log form; without g the row potential is zero and constant (the key side's first half-step).
static void reverse_sweep_log(Reverse& r, const float* g, const float* next, double* dg) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  float* closing = head.arena.take<float>(p.padded);
  float* x = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.padded; j++) closing[j] = j < p.rank ? next[j] - p.log_mass[j] : kNothing;
  for (int j = 0; j < p.rank; j++) x[j] = float(dg[j]);
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const float* s = r.rows + i * p.padded;
      row_potential(s, t.mass + i, count, g, p.vectors, k);
      exp_plan(s, count, k.shift, closing, p.vectors, k.other);
      dot_rows(k.other, count, x, p.vectors, k.extra);
      for (int l = 0; l < count; l++) k.extra[l] = -k.extra[l];
      add_log_mass(r, i, count, k.extra);
      subtract_shares(k.other, x, g ? k.plan : nullptr, k.extra, count, p.vectors, r.grad + i * p.padded);
      if (g) weigh_columns(k.plan, count, k.extra, p.vectors, k.column, k.columns);
    }
  });
  collect_columns(head);
  for (int j = 0; j < p.rank; j++) dg[j] = -head.worker[0].columns[j];
}

// ---- from the score gradient to the inputs ----

// to = e ∘ (scale_i shares + other)
LOT_INLINE void weigh_shares(const float* e, const View& shares, const float* scale, const float* other, int count,
                             int vectors, float* to) {
  const int64_t ld = int64_t(vectors) * W;
  for (int i = 0; i < count; i++) {
    const V factor = splat(scale[i]);
    for (int v = 0; v < vectors; v++) {
      const int64_t at = i * ld + v * W;
      store(to + at, load(e + at) * (factor * load(shares.data + i * shares.ld + v * W) + load(other + at)));
    }
  }
}

// ds = K ∘ (A B + row_scale · shares), or what log form has collected; then dx = ds · scaled pivots and the pivots'
// gradient.
static void write_token_gradient(Reverse& r, const Rows& dx, Totals& totals) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int64_t ld = p.padded;
  start_products(head, p.dim_padded);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const float* ds = k.plan;
      if (r.grad) {
        ds = r.grad + i * ld;
      } else {
        multiply_nn(r.a + i * r.width, r.width, count, r.used, r.b, ld, p.vectors, k.other, ld);
        weigh_shares(r.rows + i * ld, shares_at(r, i), r.row_scale + i, k.other, count, p.vectors, k.plan);
      }
      const View to = target_rows(t, dx, i, p.dim, k.output);
      multiply_nn(ds, ld, count, p.rank, p.scaled, p.dim_padded, p.dim_padded / W, const_cast<float*>(to.data), to.ld);
      write_rows(t, dx, i, count, p.dim, to, k.output);
      const View x = read_rows(t, t.rows, i, count, p.dim, true, k.input);
      multiply_tn(ds, ld, p.padded, count, x.data, x.ld, p.dim_padded / W, k.product, p.dim_padded);
    }
  });
  collect_products(head, p.dim_padded);
  double inner = 0;
  for (int j = 0; j < p.rank; j++) {
    const float* x = head.worker[0].product + int64_t(j) * p.dim_padded;
    float* to = totals.pivots + int64_t(j) * p.dim;
    for (int d = 0; d < p.dim; d++) to[d] += p.temperature * x[d];
    inner += dot_double(x, p.scaled + int64_t(j) * p.dim_padded, p.dim_padded);
  }
  *totals.temperature += inner / p.temperature;
}

// From the gradient of log a to that of the masses as given, through their normalisation.
static void write_mass_gradient(const Reverse& r, int side) {
  const Call& c = *r.head->call;
  const Tokens& t = *r.t;
  const int64_t length = c.length[side];
  float* to = c.grad_masses[side] + (r.head->b * c.heads + r.head->h) * length;
  const Mask& mask = c.masks[side];
  double common = 0;
  for (int64_t i = 0; i < t.count; i++) common += r.log_mass[i];
  const double scale = t.total > 0 ? 1 / t.total : 0;
  for (int64_t i = 0; i < length; i++) {
    const bool real = !mask.data || mask.data[r.head->b * mask.batch + i * mask.token];
    to[i] = real ? float(-common * scale) : 0.f;
  }
  for (int64_t i = 0; i < t.count; i++)
    if (t.mass[i] > 0) to[t.index ? t.index[i] : i] = float((r.log_mass[i] / t.mass[i] - common) * scale);
}

static float* potential_or_scaling(const Head& head, const float* saved, bool logarithmic) {
  float* x = head.arena.take<float>(head.pivots.padded);
  for (int j = 0; j < head.pivots.padded; j++)
    x[j] = j < head.pivots.rank ? saved[j] : (logarithmic ? kNothing : 0.f);
  return x;
}

static void clear_gradients(const Call& c, int64_t b, int64_t h, Tokens queries, Tokens keys) {
  queries.count = keys.count = 0;
  clear_padding(queries, at_head(c.grad_tokens[kQuery], c.bf16, b, h), c.length[kQuery], c.dim);
  clear_padding(keys, at_head(c.grad_tokens[kKey], c.bf16, b, h), c.length[kKey], c.dim);
  clear_padding(keys, at_head(c.grad_values, c.bf16, b, h), c.length[kKey], c.value_dim);
  for (int side = 0; side < 2; side++)
    if (c.grad_masses[side])
      memset(c.grad_masses[side] + (b * c.heads + h) * c.length[side], 0, sizeof(float) * size_t(c.length[side]));
}

// `given` are the rows the plan meets: dout on the query side, v on the key side, whose gradient goes to dv.
static void reverse_sinkhorn(Reverse& r, int side, const float* state, const float* form, const Rows& given,
                             const Rows& dv, Mixed& y, double* log_mass) {
  const Head& head = *r.head;
  const int rank = head.pivots.rank, rounds = head.call->iters;
  const bool logarithmic = form[side] != 0;
  const float* start = logarithmic ? zero_potential(head) : ones(head);
  auto saved = [&](int sweep) {  // the potential after this many column half-steps
    return sweep == 0 ? start : potential_or_scaling(head, state + int64_t(sweep - 1) * rank, logarithmic);
  };
  double* dg = head.arena.zeros<double>(head.pivots.padded);
  auto credit = [&] {
    for (int j = 0; j < rank; j++) log_mass[j] += dg[j];
  };
  if (logarithmic) score_all(head, *r.t, r.rows);
  if (side == kQuery) {
    if (logarithmic)
      reverse_query_plan_log(r, given, saved(rounds), y, dg);
    else
      reverse_query_plan(r, given, starting_potential(head), saved(rounds), y, dg, nullptr);
    for (int sweep = rounds; sweep >= 1; sweep--) {
      credit();
      if (logarithmic)
        reverse_sweep_log(r, saved(sweep - 1), saved(sweep), dg);
      else
        reverse_sweep(r, saved(sweep - 1), saved(sweep), dg, sweep == 1);
    }
    return;
  }
  float* closing = head.arena.take<float>(head.pivots.padded);  // ω = b / m, or its logarithm
  for (int j = 0; j < head.pivots.padded; j++) {
    const float last = j < rank ? state[int64_t(rounds) * rank + j] : 0.f;
    closing[j] = logarithmic ? (j < rank ? last - head.pivots.log_mass[j] : kNothing)
                             : (j < rank ? last / head.pivots.mass[j] : 0.f);
  }
  if (logarithmic)
    reverse_key_plan_log(r, given, dv, saved(rounds), closing, y, dg);
  else
    reverse_key_plan(r, given, dv, starting_potential(head), saved(rounds), closing, y, &form[2], dg, nullptr);
  for (int sweep = rounds - 1; sweep >= 1; sweep--) {
    credit();
    if (logarithmic)
      reverse_sweep_log(r, saved(sweep), saved(sweep + 1), dg);
    else
      reverse_sweep(r, saved(sweep), saved(sweep + 1), dg, false);
  }
  credit();
  if (logarithmic)
    reverse_sweep_log(r, nullptr, saved(1), dg);
  else
    reverse_first_key_step(r, saved(1), dg);
}

// Implicit differentiation: dg = −H⁺ d(b − m) at the solution, one solve.
static void reverse_newton(Reverse& r, int side, const float* state, const Rows& given, const Rows& dv, Mixed& y,
                           double* log_mass) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  const int64_t square = int64_t(p.padded) * p.padded;
  const HessianSink sink{&head, head.arena.zeros<float>(head.workers * square)};
  const float *g = potential_or_scaling(head, state, true), *one = ones(head);
  double* dg = head.arena.zeros<double>(p.padded);
  if (side == kQuery)
    reverse_query_plan(r, given, g, one, y, dg, &sink);
  else
    reverse_key_plan(r, given, dv, g, one, potential_or_scaling(head, state + p.rank, false), y, nullptr, dg, &sink);
  const System system = open_system(head);
  factorise(system, sink.matrices, head.workers, head.worker[0].columns2, kBackwardRidge);
  apply_inverse(system, 1, {dg});
  float* x = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) {
    x[j] = float(dg[j]);
    log_mass[j] += p.mass[j] * dg[j];
  }
  const int direct = claim(r, -1.f, x), through = claim(r, 1.f, one);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      const float* e = r.rows + i * p.padded;
      dot_rows(e, count, one, p.vectors, k.sum);
      dot_rows(e, count, x, p.vectors, k.shift);
      divide_masses(t.mass + i, k.sum, count, k.extra, k.weight);
      put_column(r, direct, i, count, k.weight);
      for (int l = 0; l < count; l++) {
        const float mean = k.extra[l] * k.shift[l];  // P_i · x
        k.shift[l] = -t.mass[i + l] * mean;
        k.weight[l] *= mean;
      }
      put_column(r, through, i, count, k.weight);
      add_log_mass(r, i, count, k.shift);
    }
  });
}

static void backward_sample(const Head& head, Totals totals) {
  const Call& c = *head.call;
  const size_t mark = c.host.mark();
  const Measure& p = head.pivots;
  const int64_t b = head.b, h = head.h;
  const Tokens queries = list_tokens(c, kQuery, b, h, head.arena), keys = list_tokens(c, kKey, b, h, head.arena);
  if (queries.count == 0 || keys.count == 0) {
    clear_gradients(c, b, h, queries, keys);
    c.host.release(mark);
    return;
  }
  const int64_t which = b * c.heads + h, size = state_size(c.solver, c.iters, c.rank);
  const float* state = c.state + which * size;
  const float* form = state + size - 4;
  const float* key_state = state + int64_t(c.solver == kSinkhorn ? c.iters : 1) * c.rank;
  const Rows dout = at_head(c.grad_out, c.bf16, b, h);
  const Rows values = at_head(c.values, c.bf16, b, h), dv = at_head(c.grad_values, c.bf16, b, h);
  Mixed y = read_mixed(head, c.mixed + which * c.rank * c.value_dim);
  float* rows = head.arena.take<float>(round_up(most(queries.count, keys.count), kBlock) * p.padded);
  const int width = c.solver == kSinkhorn ? 2 * c.iters + 1 : 4;
  for (int side = 0; side < 2; side++) {
    const size_t side_mark = c.host.mark();
    const Tokens& t = side == kQuery ? queries : keys;
    const bool logarithmic = c.solver == kSinkhorn && form[side] != 0;
    const Rows dx = at_head(c.grad_tokens[side], c.bf16, b, h), given = side == kQuery ? dout : values;
    Reverse r = open_reverse(head, t, width, logarithmic, c.grad_masses[side] != nullptr, rows, dx);
    if (c.solver == kSinkhorn)
      reverse_sinkhorn(r, side, side == kQuery ? state : key_state, form, given, dv, y, totals.log_masses);
    else
      reverse_newton(r, side, side == kQuery ? state : key_state, given, dv, y, totals.log_masses);
    write_token_gradient(r, dx, totals);
    clear_padding(t, dx, c.length[side], c.dim);
    if (c.grad_masses[side]) write_mass_gradient(r, side);
    c.host.release(side_mark);
  }
  clear_padding(keys, dv, c.length[kKey], c.value_dim);
  c.host.release(mark);
}

// What every group of samples adds to the gradients of the parameters: summed in a fixed order afterwards.
struct PartialTotals {
  const Call* call;
  float* pivots;     // (groups, heads, rank, dim)
  double* numbers;   // (groups, heads, rank + 1)

  Totals of(int64_t group, int64_t h) const {
    const Call& c = *call;
    const int64_t which = group * c.heads + h;
    double* log_masses = numbers + which * (c.rank + 1);
    return {pivots + which * c.rank * c.dim, log_masses, log_masses + c.rank};
  }
};

static void backward(const Call& c) {
  constexpr int64_t kGroups = 16;
  const size_t mark = c.host.mark();
  const Arena arena{&c.host};
  const int64_t groups = least(c.batch, kGroups);
  const PartialTotals totals{&c, arena.zeros<float>(groups * c.heads * c.rank * c.dim),
                             arena.zeros<double>(groups * c.heads * (c.rank + 1))};
  each_head(c, groups, [&](Head& head, int64_t group) {
    for (head.b = group; head.b < c.batch; head.b += groups) backward_sample(head, totals.of(group, head.h));
  });
  for (int64_t h = 0; h < c.heads; h++) {
    Totals sum = totals.of(0, h);
    for (int64_t g = 1; g < groups; g++) {
      const Totals part = totals.of(g, h);
      for (int64_t x = 0; x < int64_t(c.rank) * c.dim; x++) sum.pivots[x] += part.pivots[x];
      for (int j = 0; j <= c.rank; j++) sum.log_masses[j] += part.log_masses[j];
    }
    memcpy(c.grad_pivots + h * c.rank * c.dim, sum.pivots, sizeof(float) * size_t(c.rank) * size_t(c.dim));
    c.grad_temperatures[h] = float(*sum.temperature);
    const Measure p = read_measure(c, h, arena);
    double all = 0;
    for (int j = 0; j < c.rank; j++) all += sum.log_masses[j];
    for (int64_t j = 0; j < c.rank; j++) {
      const bool felt = c.log_masses[h * c.rank + j] >= c.least_log_mass;
      c.grad_log_masses[h * c.rank + j] = felt ? float(sum.log_masses[j] - p.mass[j] * all) : 0.f;
    }
  }
  c.host.release(mark);
}

}  // namespace
