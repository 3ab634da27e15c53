// From the gradient of the output to those of all inputs: the query side first, because it tells what the pivots get.
#pragma once
#include "reverse_unbalanced.h"

namespace {

// Sums over the batch for one head, kept apart per group of samples so that threads never meet.
struct Totals {
  float* pivots;       // (rank, dim)
  double* log_masses;  // (rank): with respect to normalised log masses
  double* temperature;
};

// to ∘= e
LOT_INLINE void multiply_rows(const View& e, int count, int vectors, const Block& to) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      float* x = to.data + i * to.ld + v * W;
      store(x, load(e.data + i * e.ld + v * W) * load(x));
    }
}

// Before the first block of a side.
static void start_totals(const Head& head) {
  if (head.pivots.scaled) start_products(head, head.pivots.dim_padded);
  for (int w = 0; w < head.workers; w++) head.worker[w].top = 0;
}

// From the gradient ds of the scores of a block to its dx = ds · scaled pivots, and to the pivots' gradient. Where scores
// are given, to that of the temperature, in `top`.
static void push_block(const Head& head, const Tokens& t, Worker& k, int64_t i, int count, const Block& ds,
                       const Rows& dx) {
  const Measure& p = head.pivots;
  if (head.unit != 1) scale_block(ds, count, head.unit, p.vectors, ds);
  const Block to = target_rows(t, dx, i, p.dim, k.output);
  if (!p.scaled) {
    const View x = read_rows(t, t.rows, i, count, p.dim, true, k.input);
    for (int l = 0; l < count; l++) k.top += dot_double(x.data + l * x.ld, ds.data + l * ds.ld, p.padded);
    scale_block(ds, count, p.temperature, p.vectors, to);
    return write_rows(t, dx, i, count, p.dim, to, k.output);
  }
  multiply_nn(ds.data, ds.ld, count, p.rank, p.scaled, p.dim_padded, p.dim_padded / W, to.data, to.ld);
  write_rows(t, dx, i, count, p.dim, to, k.output);
  const View x = read_rows(t, t.rows, i, count, p.dim, true, k.input);
  multiply_tn(ds.data, ds.ld, p.padded, count, x.data, x.ld, p.dim_padded / W, k.product, p.dim_padded);
}

// After the last block.
static void add_to_totals(const Head& head, Totals& totals) {
  const Measure& p = head.pivots;
  for (int w = 0; w < head.workers; w++) *totals.temperature += head.worker[w].top;
  if (!p.scaled) return;
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

// ds = K ∘ (A B + row_scale · plan_grad), or what log form has collected; then what follows from it.
static void write_token_gradient(Reverse& r, const Rows& dx, Totals& totals) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const Tokens& t = *r.t;
  start_totals(head);
  head.each_range(t.count, [&](Worker& k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int count = int(least<int64_t>(kBlock, last - i));
      if (r.grad.data) {
        scale_block(r.grad.at(i), count, 1.f, p.vectors, k.plan);  // dx may be written over it
      } else {
        if (r.replays) replay_columns(r, k, i, count);
        scale_rows(r.plan_grad.at(i), count, column_at(r, k, r.row_scale, i), p.vectors, k.plan);
        multiply_tn(column_at(r, k, 0, i), r.room, int(round_up(count, 4)), r.used, r.b, p.padded, p.vectors,
                    k.plan.data, k.plan.ld);
        multiply_rows(r.rows.at(i), count, p.vectors, k.plan);
      }
      push_block(head, t, k, i, count, k.plan, dx);
    }
  });
  add_to_totals(head, totals);
}

// From the gradient of log a to that of the masses as given, through their normalisation.
static void write_mass_gradient(const Head& head, const Tokens& t, const double* log_mass, int side) {
  const Call& c = *head.call;
  const int64_t length = c.length[side];
  float* to = c.grad_masses[side] + (head.b * c.heads + head.h) * length;
  const Mask& mask = c.masks[side];
  double common = 0;
  for (int64_t i = 0; i < t.count; i++) common += log_mass[i];
  const double scale = t.total > 0 ? head.unit / t.total : 0;
  for (int64_t i = 0; i < length; i++) {
    const bool real = !mask.data || mask.data[head.b * mask.batch + i * mask.token];
    to[i] = real ? float(-common * scale) : 0.f;
  }
  for (int64_t i = 0; i < t.count; i++)
    if (t.mass.of(i) > 0) to[t.index ? t.index[i] : i] = float((log_mass[i] / t.mass.of(i) - common) * scale);
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
static void reverse_sinkhorn(Reverse& r, int side, const float* state, const float* notes, const Rows& given,
                             const Rows& dv, Mixed& y, double* log_mass) {
  const Head& head = *r.head;
  const int rank = head.pivots.rank, rounds = head.call->iters;
  const bool logarithmic = notes[side] != 0;
  const float* start = logarithmic ? head.pivots.zero : ones(head);
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
      reverse_query_plan(r, given, {starting_potential(head)}, saved(rounds), y, dg, nullptr);
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
    reverse_key_plan(r, given, dv, {starting_potential(head)}, saved(rounds), closing, y, &notes[kKeyOrigin], dg,
                     nullptr);
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
static void reverse_newton(Reverse& r, int side, const float* state, bool exact, const Rows& given,
                           const Rows& dv, Mixed& y, double* log_mass) {
  const Head& head = *r.head;
  const Measure& p = head.pivots;
  const int64_t square = int64_t(p.padded) * p.padded;
  const HessianSink sink{&head, head.arena.zeros<float>(head.workers * square)};
  const float* one = ones(head);
  const Potential g{potential_or_scaling(head, state, true),
                    exact ? potential_or_scaling(head, state + p.rank, false) : nullptr};
  double* dg = head.arena.zeros<double>(p.padded);
  if (side == kQuery) {
    reverse_query_plan(r, given, g, one, y, dg, &sink);
  } else {
    const float* omega = potential_or_scaling(head, state + 2 * p.rank, false);
    reverse_key_plan(r, given, dv, g, one, omega, y, nullptr, dg, &sink);
  }
  const System system = open_system(head);
  factorise(system, sink.matrices, head.workers, head.worker[0].columns2, kBackwardRidge);
  apply_inverse(system, 1, {dg});
  float* x = head.arena.zeros<float>(p.padded);
  for (int j = 0; j < p.rank; j++) {
    x[j] = float(dg[j]);
    log_mass[j] += p.mass[j] * dg[j];
  }
  reverse_columns(r, one, x, nullptr);
}

// Everything that follows from the gradient of a side's scores.
static void finish_side(Reverse& r, int side, const Rows& dx, Totals& totals) {
  const Call& c = *r.head->call;
  write_token_gradient(r, dx, totals);
  clear_padding(*r.t, dx, c.length[side], c.dim);
  if (c.grad_masses[side]) write_mass_gradient(*r.head, *r.t, r.log_mass, side);
}

// A side that is solved. `log_mass` gets the gradient of the logarithms of the masses that it is solved for.
static void reverse_solved(const Head& head, const Tokens& t, int side, const float* state, const float* notes,
                           const Rows& given, const Rows& dv, Mixed& y, double* log_mass, Totals& totals) {
  const Call& c = *head.call;
  const Scope scope(c.host);
  const Rows dx = at_head(c.grad_tokens[side], c.bf16, head.b, head.h);
  const bool sweeps = c.solver == kSinkhorn;
  Reverse r = open_reverse(head, t, side, sweeps ? 2 * c.iters + 1 : 4, sweeps && notes[side] != 0, dx);
  if (sweeps)
    reverse_sinkhorn(r, side, state, notes, given, dv, y, log_mass);
  else
    reverse_newton(r, side, state, notes[side] != 0, given, dv, y, log_mass);
  finish_side(r, side, dx, totals);
}

// Keys that are not solved.
static void reverse_keys_unsolved(const Head& head, const Tokens& t, const float* state, const Rows& values,
                                  const Rows& dv, const Mixed& y, Totals& totals) {
  const Call& c = *head.call;
  const Scope scope(c.host);
  const Rows dx = at_head(c.grad_tokens[kKey], c.bf16, head.b, head.h);
  double* log_mass = c.grad_masses[kKey] ? head.arena.zeros<double>(t.count) : nullptr;
  start_totals(head);
  reverse_average(head, t, values, dv, potential_or_scaling(head, state, true), y, log_mass,
                  [&](Worker& k, int64_t i, int count, const Block& ds) { push_block(head, t, k, i, count, ds, dx); });
  add_to_totals(head, totals);
  clear_padding(t, dx, c.length[kKey], c.dim);
  if (log_mass) write_mass_gradient(head, t, log_mass, kKey);
}

// The pivots as the keys meet them: their masses are what the queries have sent, if the keys are solved for that.
static Measure receiving_measure(const Head& head, const float* log_sent) {
  Measure m = head.pivots;
  if (head.call->balance != kKeys) return m;
  m.log_mass = head.arena.take<float>(m.padded);
  m.mass = head.arena.take<float>(m.padded);
  normalise_masses(log_sent, m.rank, head.call->least_log_mass, m.padded, m.log_mass, m.mass);
  return m;
}

static void backward_sample(Head& head, Totals totals) {
  const Call& c = *head.call;
  const Scope scope(c.host);
  enter_sample(head);
  if (c.own_pivots) memset(totals.pivots, 0, sizeof(float) * size_t(c.rank) * size_t(c.dim));
  const int64_t b = head.b, h = head.h;
  const Tokens queries = list_tokens(c, kQuery, b, h, head.arena), keys = list_tokens(c, kKey, b, h, head.arena);
  if (queries.count == 0 || keys.count == 0) {
    clear_gradients(c, b, h, queries, keys);
    return;
  }
  const int64_t which = b * c.heads + h, size = state_size(c);
  const float* state = c.state + which * size;
  const float* notes = state + size - kNotes;
  const float* key_state = state + query_vectors(c) * c.rank;
  const Rows dout = at_head(c.grad_out, c.bf16, b, h);
  const Rows values = at_head(c.values, c.bf16, b, h), dv = at_head(c.grad_values, c.bf16, b, h);
  const float* mixed = c.mixed + which * c.rank * c.value_dim;
  head.unit = value_unit(mixed, int64_t(c.rank) * c.value_dim);
  Head receiving = head;
  receiving.pivots = receiving_measure(head, state);
  Mixed y = read_mixed(receiving, mixed);
  double* dg = head.arena.zeros<double>(c.rank);  // of log m
  if (c.balance == kBoth) {
    reverse_solved(head, queries, kQuery, state, notes, dout, dv, y, dg, totals);
    reverse_solved(head, keys, kKey, key_state, notes, values, dv, y, dg, totals);
  } else {
    const Rows dx = at_head(c.grad_tokens[kQuery], c.bf16, b, h);
    double* received = head.arena.zeros<double>(c.rank);
    Reverse r = open_reverse(head, queries, kQuery, 3, notes[kQueryForm] != 0, dx);
    reverse_spread(r, dout, y, dg);
    if (c.balance == kKeys) {
      reverse_solved(receiving, keys, kKey, key_state, notes, values, dv, y, received, totals);
      reverse_sent(r, receiving.pivots, received, dg);
    } else {
      reverse_keys_unsolved(head, keys, key_state, values, dv, y, totals);
    }
    finish_side(r, kQuery, dx, totals);
  }
  for (int j = 0; j < c.rank; j++) totals.log_masses[j] += double(head.unit) * dg[j];
  clear_padding(keys, dv, c.length[kKey], c.value_dim);
}

// What every group of samples adds to the gradients of the parameters: summed in a fixed order afterwards. Pivots that
// belong to one sample need no sum.
struct PartialTotals {
  const Call* call;
  float* pivots;     // (groups, heads, rank, dim), nullptr if every sample has its own or there are none
  double* numbers;   // (groups, heads, rank + 1)

  Totals of(int64_t group, int64_t b, int64_t h) const {
    const Call& c = *call;
    const int64_t which = group * c.heads + h;
    double* log_masses = numbers + which * (c.rank + 1);
    float* own = c.own_pivots ? c.grad_pivots + pivots_at(c, b, h) : nullptr;
    return {pivots ? pivots + which * c.rank * c.dim : own, log_masses, log_masses + c.rank};
  }
};

static void backward(const Call& c) {
  constexpr int64_t kGroups = 16;
  const Scope scope(c.host);
  const Arena arena{&c.host};
  const int64_t groups = most<int64_t>(1, least(c.batch, kGroups));
  const int64_t size = int64_t(c.rank) * c.dim;
  const bool shared = !c.scored && !c.own_pivots;
  const PartialTotals totals{&c, shared ? arena.zeros<float>(groups * c.heads * size) : nullptr,
                             arena.zeros<double>(groups * c.heads * (c.rank + 1))};
  each_head(c, groups, [&](Head& head, int64_t group) {
    for (head.b = group; head.b < c.batch; head.b += groups) backward_sample(head, totals.of(group, head.b, head.h));
  });
  float *log_mass = arena.take<float>(c.rank), *mass = arena.take<float>(c.rank);
  for (int64_t h = 0; h < c.heads; h++) {
    Totals sum = totals.of(0, 0, h);
    for (int64_t g = 1; g < groups; g++) {
      const Totals part = totals.of(g, 0, h);
      for (int64_t x = 0; totals.pivots && x < size; x++) sum.pivots[x] += part.pivots[x];
      for (int j = 0; j <= c.rank; j++) sum.log_masses[j] += part.log_masses[j];
    }
    if (totals.pivots) memcpy(c.grad_pivots + pivots_at(c, 0, h), sum.pivots, sizeof(float) * size_t(size));
    c.grad_temperatures[h] = float(*sum.temperature);
    read_masses(c, h, c.rank, log_mass, mass);
    double all = 0;
    for (int j = 0; j < c.rank; j++) all += sum.log_masses[j];
    for (int64_t j = 0; j < c.rank; j++) {
      const bool felt = c.log_masses[h * c.rank + j] >= c.least_log_mass;
      c.grad_log_masses[h * c.rank + j] = felt ? float(sum.log_masses[j] - mass[j] * all) : 0.f;
    }
  }
}

}  // namespace
