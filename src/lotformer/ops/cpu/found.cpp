// The operator of found groups for torch: schemas, checks and allocation.
#include <cmath>

#include "found_call.h"
#include "torch_side.h"

namespace {

// The arguments of both directions, held alive in the layout the kernel reads.
struct Given {
  Arguments& next;
  Tensor q = next.rows("q"), k = next.rows("k"), v = next.rows("v");
  MaybeTensor gain = next.maybe_packed("gain"), shift = next.maybe_packed("shift");
  MaybeTensor offset = next.maybe_packed("offset");
  MaybeTensor query_mask = next.maybe_tensor("query_mask"), key_mask = next.maybe_tensor("key_mask");
  MaybeTensor groups = next.maybe_packed("groups");
  int64_t prefix = next.integer("prefix"), rank = next.integer("rank"), steps = next.integer("steps");
  int64_t heaviest = next.integer("heaviest"), most = next.integer("most"), columns = next.integer("columns");
  int64_t reach_rows = next.integer("reach_rows"), reach_columns = next.integer("reach_columns");
};

struct Kept {
  Arguments& next;
  Tensor grad = next.rows("grad"), total = next.tensor("total"), found = next.tensor("found");
};

struct Inputs : Given {
  lot::Found call{};

  explicit Inputs(Arguments& arguments) : Given{arguments} {
    const ScalarType type = q.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                    "lotformer: the CPU kernel takes float32 and bfloat16.");
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "lotformer: q, k, v must have four dimensions.");
    const int64_t batch = q.size(0), heads = q.size(1), n = q.size(2), d = q.size(3), m = k.size(2);
    STD_TORCH_CHECK(d >= 1 && d <= lot::kMaxWidth && v.size(3) >= 1 && v.size(3) <= lot::kMaxWidth && rank >= 1 &&
                        rank <= (1 << 14) && steps >= 1 && steps < (1 << 30) && n >= 1 && m >= 1 && m < (1 << 30) &&
                        n < (1 << 30) && prefix >= 0 && prefix <= m,
                    "lotformer: found groups need tokens, groups, steps and head dimensions of at most ", lot::kMaxWidth,
                    ".");
    STD_TORCH_CHECK(columns == 0 || (columns > 0 && n == m - prefix && n % columns == 0 && reach_rows >= 0 &&
                                     reach_columns >= 0),
                    "lotformer: a window takes a full grid with a query for every key behind the prefix.");
    expect(k, "k", type, {batch, heads, m, d});
    expect(q, "q", type, {batch, heads, n, d});
    expect(v, "v", type, {batch, heads, m, v.size(3)});
    expect(gain, "gain", ScalarType::Float, {heads});
    expect(shift, "shift", ScalarType::Float, {heads, d});
    expect(offset, "offset", ScalarType::Float, {heads});
    expect(query_mask, "query_mask", ScalarType::Bool, {batch, n});
    expect(key_mask, "key_mask", ScalarType::Bool, {batch, m});
    expect(groups, "groups", ScalarType::Long, {batch, heads, m - prefix});
    call.host = host();
    call.batch = batch;
    call.heads = heads;
    call.queries = n;
    call.prefix = prefix;
    call.keys = m - prefix;
    call.columns = columns;
    call.reach_rows = reach_rows;
    call.reach_columns = reach_columns;
    STD_TORCH_CHECK(heaviest >= 0 && most >= 0, "lotformer: counts of groups and keys cannot be negative.");
    call.most = most;
    call.heaviest = most > 0 ? int(heaviest < rank ? heaviest : rank) : 0;
    STD_TORCH_CHECK(call.heaviest <= lot::kMostHeaviest, "lotformer: queries read at most ", lot::kMostHeaviest,
                    " groups exactly.");
    call.rank = int(rank);
    call.steps = int(steps);
    call.dim = int(d);
    call.value_dim = int(v.size(3));
    call.bf16 = type == ScalarType::BFloat16;
    call.scale = float(1 / std::sqrt(double(d)));
    call.q = rows(q);
    call.k = rows(k);
    call.v = rows(v);
    call.gain = data(gain);
    call.shift = data(shift);
    call.offset = data(offset);
    call.query_mask = mask(query_mask);
    call.key_mask = mask(key_mask);
    if (groups) call.given = static_cast<const int64_t*>(groups->data_ptr());
  }
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Inputs in(next);
  lot::Found& c = in.call;
  Tensor out = output_like(in.q, in.v);
  Tensor share = floats(in.q, {c.batch, c.heads, c.queries}), total = floats(in.q, {c.batch, c.heads, c.queries});
  Tensor groups = torch::stable::new_empty(in.q, std::vector<int64_t>{c.batch, c.heads, c.keys}, ScalarType::Long);
  c.out = rows(out);
  c.share = data(share);
  c.total = data(total);
  c.groups = static_cast<int64_t*>(groups.data_ptr());
  run(chosen_kernel().found_forward, c);
  give_back(stack, out, share, total, groups);
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Kept kept{next};
  Inputs in(next);
  lot::Found& c = in.call;
  STD_TORCH_CHECK(c.heaviest == 0, "lotformer: keys by content have no derivative in the CPU kernel.");
  expect(kept.grad, "grad", in.q.scalar_type(), {c.batch, c.heads, c.queries, c.value_dim});
  expect(kept.total, "total", ScalarType::Float, {c.batch, c.heads, c.queries});
  expect(kept.found, "found", ScalarType::Long, {c.batch, c.heads, c.keys});
  Tensor dq = fresh_like(in.q), dk = fresh_like(in.k), dv = fresh_like(in.v);
  Tensor gains = floats(in.q, {c.batch, c.heads}), shifts = floats(in.q, {c.batch, c.heads, c.dim});
  Tensor offsets = floats(in.q, {c.batch, c.heads});
  Tensor dgain = floats(in.q, {c.heads}), dshift = floats(in.q, {c.heads, c.dim}), doffset = floats(in.q, {c.heads});
  c.grad_out = rows(kept.grad);
  c.total = data(kept.total);
  c.given = static_cast<const int64_t*>(kept.found.data_ptr());
  c.grad_q = rows(dq);
  c.grad_k = rows(dk);
  c.grad_v = rows(dv);
  c.grad_gain = data(gains);
  c.grad_shift = data(shifts);
  c.grad_offset = data(offsets);
  run(chosen_kernel().found_backward, c);
  add_samples(gains, c.batch, c.heads, data(dgain));
  add_samples(shifts, c.batch, c.heads * c.dim, data(dshift));
  add_samples(offsets, c.batch, c.heads, data(doffset));
  give_back(stack, dq, dk, dv, dgain, dshift, doffset);
}

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  define<Given>(library, "found_forward", {"out", "share", "total", "found"});
  define<Kept, Given>(library, "found_backward", first<Given>(6));
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("found_forward", &forward);
  library.impl("found_backward", &backward);
}

}  // namespace
