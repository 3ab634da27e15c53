// out = P (Wᵀ v), one head at a time: keys first, because the queries read what the pivots have collected; unless the keys
// are solved for what the queries have sent.
#pragma once
#include "newton_sides.h"
#include "unbalanced.h"

namespace {

constexpr double kRoom = 1e30;  // so large may be what is summed over pivots

// The scalings of a plan, which are free up to a factor: smaller ones if products with what the pivots hold lack room.
static const float* with_room(const Head& head, const float* b, const float* mixed) {
  const Measure& p = head.pivots;
  double largest = 0;
  for (int j = 0; j < p.rank; j++) {
    float top = 0;
    for (int d = 0; d < head.value_padded; d++) top = most(top, fabsf(mixed[int64_t(j) * head.value_padded + d]));
    largest = most(largest, double(top) * b[j]);
  }
  if (!(largest > kRoom && largest < HUGE_VAL)) return b;
  float* smaller = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) smaller[j] = float(b[j] * (kRoom / largest));
  return smaller;
}

// out_i = Σ_j P_ij y_j. Returns the error of the plan if the queries were solved: the largest relative deviation of its
// column sums from the masses of the pivots.
static float write_output(const Head& head, const Tokens& t, const Rows& out, const QueryPlan& plan,
                          const float* mixed) {
  const Measure& p = head.pivots;
  const int width = head.value_padded;
  const float* b = plan.b && !plan.u ? with_room(head, plan.b, mixed) : plan.b;
  const bool solved = head.call->balance == kBoth;
  float* scaled = head.arena.take<float>(int64_t(p.padded) * width);
  for (int j = 0; j < p.padded; j++)
    for (int d = 0; d < width; d++)
      scaled[int64_t(j) * width + d] = j < p.rank ? (b ? b[j] : 1.f) * mixed[int64_t(j) * width + d] : 0.f;
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      View e = k.plan;
      const float* u = plan.u ? plan.u + i : k.extra;
      if (b)
        e = plan.rows.at(i);
      else if (plan.rows.data)
        exp_block(plan.rows.at(i), count, 1.f, plan.g, p.vectors, k.plan, k.shift, k.sum);
      else
        first_scores(head, t, k, i, count, plan.g, k.plan);
      if (b && !plan.u) dot_rows(e, count, b, p.vectors, k.sum);
      if (!plan.u) divide_masses(t.mass.at(i), k.sum, count, k.extra, k.weight);
      if (solved) weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
      if (plan.rows.tail && b) {  // rows lie where the output goes
        scale_rows(e, count, u, p.vectors, k.plan);
        e = k.plan;
        u = nullptr;
      }
      const Block to = target_rows(t, out, i, head.call->value_dim, k.output);
      multiply_nn(e.data, e.ld, count, p.rank, scaled, width, width / W, to.data, to.ld, u, kOutput);
      write_rows(t, out, i, count, head.call->value_dim, to, k.output);
    }
  });
  if (!solved) return 0;
  collect_columns(head);
  for (int j = 0; b && j < p.rank; j++) head.worker[0].columns[j] *= b[j];
  return largest_deviation(p, head.worker[0].columns);
}

// Rows for a pass, in the memory of the output if they are many.
static Block output_rows(const Head& head, const Tokens& t, const Rows& out, int place) {
  const Call& c = *head.call;
  const bool fits = can_borrow(head, t, out, c.length[kQuery], c.value_dim, place + 1);
  return fits ? borrow_rows(head, t, out, place) : take_rows(head, t);
}

// `Wᵀ v` of the keys goes to the product of worker 0. Returns the error of their plan before its columns are closed.
static float collect_values(const Head& head, const Tokens& t, const Rows& values, const Rows& out, float* state,
                            float* notes) {
  const Call& c = *head.call;
  const Scope scope(c.host);
  if (c.balance == kNone) {
    average_values(head, t, values, state);
    return 0;
  }
  const Block rows = output_rows(head, t, out, 1);  // queries may have the first place
  if (c.solver == kNewton) return solve_keys(head, t, values, rows, state, &notes[kKeyForm]);
  if (!key_sweeps(head, t, values, rows, state, &notes[kKeyOrigin])) {
    key_sweeps_log(head, t, values, rows, state);
    notes[kKeyForm] = 1;
  }
  return last_change(head.pivots, state + int64_t(c.iters - 1) * c.rank, notes[kKeyForm] != 0);
}

static QueryPlan solve_query_plan(const Head& head, const Tokens& t, const Block& rows, float* state, float* form) {
  if (head.call->solver == kNewton) {
    const Solution s = solve_queries(head, t, rows, state, form);
    return {rows, {s.high, s.low}, s.b, nullptr};
  }
  float* b_or_g = head.arena.zeros<float>(head.pivots.padded);
  if (query_sweeps(head, t, rows, b_or_g, state)) return {rows, {nullptr}, b_or_g, nullptr};
  query_sweeps_log(head, t, rows, b_or_g, state);
  *form = 1;
  return {rows, {b_or_g}, nullptr, nullptr};
}

static void forward_sample(Head& head) {
  const Call& c = *head.call;
  const Scope scope(c.host);
  enter_sample(head);
  const int64_t b = head.b, h = head.h;
  const Tokens queries = list_tokens(c, kQuery, b, h, head.arena), keys = list_tokens(c, kKey, b, h, head.arena);
  const Rows out = at_head(c.out, c.bf16, b, h), values = at_head(c.values, c.bf16, b, h);
  const int64_t which = b * c.heads + h, size = state_size(c);
  float* state = c.state + which * size;
  float* notes = state + size - kNotes;
  float* mixed = c.mixed + which * c.rank * c.value_dim;
  for (int i = 0; i < kNotes; i++) notes[i] = 0;
  if (queries.count == 0 || keys.count == 0) {
    memset(state, 0, sizeof(float) * size_t(size));
    memset(mixed, 0, sizeof(float) * size_t(c.rank) * size_t(c.value_dim));
    Tokens none = queries;
    none.count = 0;
    clear_padding(none, out, c.length[kQuery], c.value_dim);
    return;
  }
  QueryPlan plan{{}, {head.pivots.log_mass}, nullptr, nullptr};
  Head receiving = head;  // the keys' side of the pivots
  if (c.balance == kKeys)
    plan = send_masses(head, queries, output_rows(head, queries, out, 0), receiving.pivots, state, &notes[kQueryForm]);
  const float key_error = collect_values(receiving, keys, values, out, state + query_vectors(c) * c.rank, notes);
  const float* collected = head.worker[0].product;
  for (int j = 0; j < c.rank; j++)
    memcpy(mixed + int64_t(j) * c.value_dim, collected + int64_t(j) * head.value_padded,
           sizeof(float) * size_t(c.value_dim));
  if (c.balance == kBoth)
    plan = solve_query_plan(head, queries, output_rows(head, queries, out, 0), state, &notes[kQueryForm]);
  const float error = write_output(head, queries, out, plan, collected);
  notes[kResidual] = error <= key_error ? key_error : error;
  clear_padding(queries, out, c.length[kQuery], c.value_dim);
}

// Heads in parallel when they fill the machine, otherwise one by one with the tokens in parallel.
static int workers_per_head(const Call& c, int64_t heads) {
  const int threads = c.host.threads();
  const int64_t work = most(c.length[0], c.length[1]) * c.rank;
  if (threads == 1 || work < 1 << 16 || heads % threads == 0 || heads >= 4 * threads) return 1;
  return threads;
}

// Runs body(head, group) for `groups` groups of samples of every head, numbered group by group within a head: what is
// made of the pivots is made once for all samples that one thread has of a head.
template <class F>
static void each_head(const Call& c, int64_t groups, const F& body) {
  struct Job {
    const Call* call;
    const F* body;
    int64_t groups;
    int workers;
  } job{&c, &body, groups, workers_per_head(c, c.heads * groups)};
  auto run = [](int64_t begin, int64_t end, void* context) {
    const Job& j = *static_cast<const Job*>(context);
    const Host& host = j.call->host;
    const Scope scope(host);
    host.scratch(1);  // keeps the stack, and with it the memory, from head to head
    for (int64_t i = begin; i < end;) {
      const Scope head_scope(host);
      const int64_t h = i / j.groups, last = least(end, (h + 1) * j.groups);
      Head head = open_head(*j.call, h, j.workers);
      for (; i < last; i++) (*j.body)(head, i % j.groups);
    }
  };
  if (job.workers > 1)
    run(0, c.heads * groups, &job);
  else
    c.host.parallel(c.heads * groups, run, &job);
}

static void forward(const Call& c) {
  each_head(c, c.batch, [](Head& head, int64_t b) {
    head.b = b;
    forward_sample(head);
  });
}

}  // namespace
