// out = P (Wᵀ v), one head at a time: keys first, because the queries read what the pivots have collected.
#pragma once
#include "newton.h"
#include "sinkhorn.h"

namespace {

// out_i = Σ_j P_ij y_j with P_ij = u_i e_ij b_j; e are the kernel's rows, or exp(s + g − shift) if g is given.
static void write_output(const Head& head, const Tokens& t, const Rows& out, const View& rows, const float* g,
                         const float* b, const float* mixed) {
  const Measure& p = head.pivots;
  const int width = head.value_padded;
  float* scaled = head.arena.take<float>(int64_t(p.padded) * width);
  for (int j = 0; j < p.padded; j++)
    for (int d = 0; d < width; d++)
      scaled[int64_t(j) * width + d] = j < p.rank ? (g ? 1.f : b[j]) * mixed[int64_t(j) * width + d] : 0.f;
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      View e = rows.at(i);
      if (g) {
        exp_block(e, count, 1.f, g, p.vectors, k.plan, k.shift, k.sum);
        e = k.plan;
      } else {
        dot_rows(e, count, b, p.vectors, k.sum);
      }
      divide_masses(t.mass + i, k.sum, count, k.extra, k.weight);
      const Block to = target_rows(t, out, i, head.call->value_dim, k.output);
      multiply_nn(e.data, e.ld, count, p.rank, scaled, width, width / W, to.data, to.ld, k.extra, kOutput);
      write_rows(t, out, i, count, head.call->value_dim, to, k.output);
    }
  });
}

static void forward_sample(Head& head) {
  const Call& c = *head.call;
  const size_t mark = c.host.mark();
  enter_sample(head);
  const Measure& p = head.pivots;
  const int64_t b = head.b, h = head.h;
  const Tokens queries = list_tokens(c, kQuery, b, h, head.arena), keys = list_tokens(c, kKey, b, h, head.arena);
  const Rows out = at_head(c.out, c.bf16, b, h), values = at_head(c.values, c.bf16, b, h);
  const int64_t which = b * c.heads + h, size = state_size(c.solver, c.iters, c.rank);
  float* state = c.state + which * size;
  float* form = state + size - 4;
  float* mixed = c.mixed + which * c.rank * c.value_dim;
  form[0] = form[1] = form[2] = form[3] = 0;
  if (queries.count == 0 || keys.count == 0) {
    memset(state, 0, sizeof(float) * size_t(size));
    memset(mixed, 0, sizeof(float) * size_t(c.rank) * size_t(c.value_dim));
    Tokens none = queries;
    none.count = 0;
    clear_padding(none, out, c.length[kQuery], c.value_dim);
    c.host.release(mark);
    return;
  }
  const size_t key_mark = c.host.mark();
  Block rows = take_rows(head, keys);
  float* key_state = state + int64_t(c.solver == kSinkhorn ? c.iters : 1) * c.rank;
  bool logarithmic = c.solver == kNewton;
  if (c.solver == kNewton) {
    solve_keys(head, keys, values, rows, key_state);
  } else if (!key_sweeps(head, keys, values, rows, key_state, &form[2])) {
    key_sweeps_log(head, keys, values, rows, key_state);
    form[1] = 1;
  }
  c.host.release(key_mark);
  const float* collected = head.worker[0].product;
  for (int j = 0; j < c.rank; j++)
    memcpy(mixed + int64_t(j) * c.value_dim, collected + int64_t(j) * head.value_padded,
           sizeof(float) * size_t(c.value_dim));
  rows = take_rows(head, queries);
  float* b_or_g = head.arena.zeros<float>(p.padded);
  if (c.solver == kNewton) {
    solve_queries(head, queries, rows, b_or_g, state);
  } else if (!query_sweeps(head, queries, rows, b_or_g, state)) {
    query_sweeps_log(head, queries, rows, b_or_g, state);
    form[0] = 1;
    logarithmic = true;
  }
  write_output(head, queries, out, rows, logarithmic ? b_or_g : nullptr, b_or_g, collected);
  clear_padding(queries, out, c.length[kQuery], c.value_dim);
  c.host.release(mark);
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
    const size_t mark = host.mark();
    host.scratch(1);  // keeps the stack, and with it the memory, from head to head
    for (int64_t i = begin; i < end;) {
      const size_t head_mark = host.mark();
      const int64_t h = i / j.groups, last = least(end, (h + 1) * j.groups);
      Head head = open_head(*j.call, h, j.workers);
      for (; i < last; i++) (*j.body)(head, i % j.groups);
      host.release(head_mark);
    }
    host.release(mark);
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
