// Gradients of one side of one head. Only the inputs and the potentials of every sweep were kept; K is formed again.
//
// Every half-step of a side is a softmax of the scores, so its share of the score gradient is K_ij times a number of
// the token times a number of the pivot. All shares together are K ∘ (A B) with as many columns of A as half-steps:
// one small product at the end, nothing of size n×r×T. In long sequences A is not kept either: what belongs to the pivots
// of each half-step says what belongs to a block of tokens. With d = ∂/∂(output of the half-step), from last to first:
//
//     g_j = log m_j − LSE_i(log a_i + s_ij + f_i):   df_i = −a_i u_i Σ_j K_ij c_j,   c_j = b_j dg_j / m_j
//     f_i = −LSE_j(s_ij + g_j):                      dg_j = −b_j Σ_i K_ij u_i df_i
//
// The closing softmaxes start the recursion: the query plan with P ∘ (dP − rowdot), the key plan with W ∘ (dW − coldot).
#pragma once
#include "forward.h"

namespace {

// The sums Σ_i a_i u_i K_ij with u from `b`, of gradient −c.
struct ColumnSums {
  const float *b, *c;
};

// One side of one head on its way back.
struct Reverse {
  const Head* head;
  const Tokens* t;
  Block rows;           // kernel (scaling form) or scores (log form), tokens × padded
  Block grad;           // log form: gradient of the scores, tokens × padded
  Block plan_grad;      // scaling form: gradient of the plan, up to factors of rows, tokens × padded
  int width, used;      // columns of A: room and filled
  bool replays;         // A is made again, block by block
  int64_t room;         // from column to column: tokens, rounded up to whole blocks, or a block of each worker
  float *a, *b;         // A: width columns and `row_scale`; B: width × padded
  int row_scale;        // the column that holds the weight of the plan's own term in each row
  double* log_mass;     // gradient of log a per token, or nullptr

  // scaling form: what the columns of A are made from
  const float *plan_scaling, *plan_level;  // b of the plan's u, and what is taken off plan_grad, or nullptr
  ColumnSums* sums;                        // of the half-steps met so far
  int met;
  const float* origin;                     // key side by sweeps: of its first half-step
};

// The gradient of the plan lives where dx, the gradient of the tokens, will be written over it, if its rows have room; in
// long sequences the kernel does so too, and of their length only masses that are given, and their gradient, are left in
// scratch.
static Reverse open_reverse(const Head& head, const Tokens& t, int side, int width, bool logarithmic, const Rows& dx) {
  Reverse r{};
  r.head = &head;
  r.t = &t;
  const int dim = head.pivots.dim;
  const bool fits = !t.bf16 && !t.index && head.pivots.padded <= dim;
  r.replays = fits && can_borrow(head, t, dx, t.count, dim, 2);
  const Block grad = r.replays              ? borrow_rows(head, t, dx, 0)
                     : fits && !logarithmic ? Block{static_cast<float*>(dx.data), dx.token}
                                            : take_rows(head, t);
  (logarithmic ? r.grad : r.plan_grad) = grad;
  r.rows = r.replays ? borrow_rows(head, t, dx, 1) : take_rows(head, t);
  r.width = r.row_scale = width;
  r.room = r.replays ? head.workers * kBlock : round_up(t.count, kBlock);
  r.a = logarithmic ? nullptr : head.arena.take<float>(r.room * (width + 1));
  r.b = head.arena.zeros<float>(int64_t(width) * head.pivots.padded);
  r.sums = head.arena.take<ColumnSums>(width);
  if (head.call->grad_masses[side]) r.log_mass = head.arena.zeros<double>(round_up(t.count, kBlock));
  return r;
}

// Claims a column of A and fills its row of B with factor · x.
static int claim(Reverse& r, float factor, const float* x) {
  float* row = r.b + int64_t(r.used) * r.head->pivots.padded;
  for (int j = 0; j < r.head->pivots.rank; j++) row[j] = factor * x[j];
  return r.used++;
}

// What a column of A holds of the block that begins at `first` and is with this worker.
LOT_INLINE float* column_at(const Reverse& r, const Worker& k, int column, int64_t first) {
  return r.a + column * r.room + (r.replays ? (&k - r.head->worker) * kBlock : first);
}

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
  float* value;     // (padded, value_padded): Wᵀ v, in units of the head
  float* centered;  // the same less its mean Σ_j m_j Y_j: rows of P sum to one, so only differences matter
  float* grad;      // (padded, value_padded): Pᵀ dout
};

constexpr float kLargeValue = 1e12f;  // times the largest scaling, and summed, it is still in the range of fp32

// A power of two in which values are moderate; one if they are anyway, or are not finite.
static float value_unit(const float* saved, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; i++) largest = most(largest, fabsf(saved[i]));
  return largest > kLargeValue && largest < HUGE_VALF ? ldexpf(1, least(ilogbf(largest), 120)) : 1;
}

// Rows of values as `read_rows` gives them, in units of the head.
static View read_values(const Head& head, const Tokens& t, const Rows& values, int64_t first, int count, bool vectors,
                        float* buffer) {
  const int width = head.call->value_dim;
  const View v = read_rows(t, values, first, count, width, vectors || head.unit != 1, buffer);
  if (head.unit == 1) return v;
  const Block to{buffer, round_up(width, W)};
  scale_block(v, count, 1 / head.unit, head.value_padded / W, to);
  return to;
}

static Mixed read_mixed(const Head& head, const float* saved) {
  const Measure& p = head.pivots;
  const int64_t width = head.value_padded, size = int64_t(p.padded) * width;
  Mixed y{head.arena.zeros<float>(size), head.arena.zeros<float>(size), head.arena.zeros<float>(size)};
  float* mean = head.arena.zeros<float>(width);
  for (int j = 0; j < p.rank; j++)
    for (int d = 0; d < head.call->value_dim; d++) {
      y.value[j * width + d] = saved[int64_t(j) * head.call->value_dim + d] / head.unit;
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
