// out = P (Wᵀ v), one head at a time: keys first, because the queries read what the pivots have collected.
#pragma once
#include "newton.h"
#include "sinkhorn.h"

namespace {

// out_i = Σ_j P_ij y_j with P_ij = u_i e_ij b_j; e are the kernel's rows, or exp(s + g − shift) without b.
// Returns the error of the plan: the largest relative deviation of its column sums from the masses of the pivots.
static float write_output(const Head& head, const Tokens& t, const Rows& out, const View& rows, const Potential& g,
                          const float* b, const float* mixed) {
  const Measure& p = head.pivots;
  const int width = head.value_padded;
  float* scaled = head.arena.take<float>(int64_t(p.padded) * width);
  for (int j = 0; j < p.padded; j++)
    for (int d = 0; d < width; d++)
      scaled[int64_t(j) * width + d] = j < p.rank ? (b ? b[j] : 1.f) * mixed[int64_t(j) * width + d] : 0.f;
  start_columns(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      View e = rows.at(i);
      if (b) {
        dot_rows(e, count, b, p.vectors, k.sum);
      } else {
        exp_block(e, count, 1.f, g, p.vectors, k.plan, k.shift, k.sum);
        e = k.plan;
      }
      divide_masses(t.mass + i, k.sum, count, k.extra, k.weight);
      weigh_columns(e, count, k.weight, p.vectors, k.column, k.columns);
      const Block to = target_rows(t, out, i, head.call->value_dim, k.output);
      multiply_nn(e.data, e.ld, count, p.rank, scaled, width, width / W, to.data, to.ld, k.extra, kOutput);
      write_rows(t, out, i, count, head.call->value_dim, to, k.output);
    }
  });
  collect_columns(head);
  for (int j = 0; b && j < p.rank; j++) head.worker[0].columns[j] *= b[j];
  return largest_deviation(p, head.worker[0].columns);
}

static void forward_sample(Head& head) {
  const Call& c = *head.call;
  const Scope scope(c.host);
  enter_sample(head);
  const Measure& p = head.pivots;
  const int64_t b = head.b, h = head.h;
  const Tokens queries = list_tokens(c, kQuery, b, h, head.arena), keys = list_tokens(c, kKey, b, h, head.arena);
  const Rows out = at_head(c.out, c.bf16, b, h), values = at_head(c.values, c.bf16, b, h);
  const int64_t which = b * c.heads + h, size = state_size(c.solver, c.iters, c.rank);
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
  float* key_state = state + int64_t(c.solver == kSinkhorn ? c.iters : 2) * c.rank;
  float key_error = 0;
  {
    const Scope key_scope(c.host);
    const Block rows = take_rows(head, keys);
    if (c.solver == kNewton) {
      key_error = solve_keys(head, keys, values, rows, key_state, &notes[kKeyForm]);
    } else if (!key_sweeps(head, keys, values, rows, key_state, &notes[kKeyOrigin])) {
      key_sweeps_log(head, keys, values, rows, key_state);
      notes[kKeyForm] = 1;
    }
    const float* last_two = key_state + int64_t(c.iters - 1) * c.rank;
    if (c.solver == kSinkhorn) key_error = last_change(p, last_two, notes[kKeyForm] != 0);
  }
  const float* collected = head.worker[0].product;
  for (int j = 0; j < c.rank; j++)
    memcpy(mixed + int64_t(j) * c.value_dim, collected + int64_t(j) * head.value_padded,
           sizeof(float) * size_t(c.value_dim));
  const Block rows = take_rows(head, queries);
  float* b_or_g = head.arena.zeros<float>(p.padded);
  Potential g{b_or_g};
  if (c.solver == kNewton) {
    g = solve_queries(head, queries, rows, state, &notes[kQueryForm]);
  } else if (!query_sweeps(head, queries, rows, b_or_g, state)) {
    query_sweeps_log(head, queries, rows, b_or_g, state);
    notes[kQueryForm] = 1;
  } else {
    g.high = nullptr;
  }
  const float error = write_output(head, queries, out, rows, g, g.high ? nullptr : b_or_g, collected);
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
