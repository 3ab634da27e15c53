// Gradients of one side of one head. Only the inputs and the potentials of every sweep were kept; K is formed again.
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

// One side of one head on its way back.
struct Reverse {
  const Head* head;
  const Tokens* t;
  Block rows;           // kernel (scaling form) or scores (log form), tokens × padded
  Block grad;           // log form: gradient of the scores, tokens × padded
  Block plan_grad;      // scaling form: gradient of the plan, up to factors of rows, tokens × padded
  int width, used;      // columns of A: room and filled
  int64_t room;         // tokens, rounded up to whole blocks
  float *a, *b;         // A: width columns of `room`, B: width × padded
  float* row_scale;     // weight of the plan's own term in each row
  double* log_mass;     // gradient of log a per token, or nullptr
};

// The gradient of the plan lives where dx, the gradient of the tokens, will be written over it, if its rows have room; in
// long sequences the kernel does so too.
static Reverse open_reverse(const Head& head, const Tokens& t, int side, int width, bool logarithmic, const Rows& dx) {
  Reverse r;
  const int64_t room = r.room = round_up(t.count, kBlock);
  r.head = &head;
  r.t = &t;
  const int dim = head.pivots.dim;
  const bool borrows = !logarithmic && !t.bf16 && !t.index && head.pivots.padded <= dim;
  const bool borrows_twice = borrows && can_borrow(head, t, dx, t.count, dim, 2);
  const Block own = borrows ? Block{} : take_rows(head, t);
  r.grad = logarithmic ? own : Block{};
  r.plan_grad = borrows ? Block{static_cast<float*>(dx.data), dx.token} : own;
  if (borrows_twice) r.plan_grad = borrow_rows(head, t, dx, 0);
  r.rows = borrows_twice ? borrow_rows(head, t, dx, 1) : take_rows(head, t);
  r.width = width;
  r.used = 0;
  r.a = logarithmic ? nullptr : head.arena.take<float>(room * width);
  r.b = head.arena.zeros<float>(int64_t(width) * head.pivots.padded);
  r.row_scale = head.arena.take<float>(room);
  r.log_mass = head.call->grad_masses[side] ? head.arena.zeros<double>(room) : nullptr;
  return r;
}

// Claims a column of A and fills its row of B with factor · x.
static int claim(Reverse& r, float factor, const float* x) {
  float* row = r.b + int64_t(r.used) * r.head->pivots.padded;
  for (int j = 0; j < r.head->pivots.rank; j++) row[j] = factor * x[j];
  return r.used++;
}

LOT_INLINE float* column_at(const Reverse& r, int column, int64_t first) { return r.a + column * r.room + first; }

LOT_INLINE void add_log_mass(const Reverse& r, int64_t first, int count, const float* x) {
  if (r.log_mass)
    for (int i = 0; i < count; i++) r.log_mass[first + i] += x[i];
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

}  // namespace
