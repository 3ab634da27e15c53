// The operator of near keys for torch: schemas, checks and allocation.
#include <cmath>

#include "near_call.h"
#include "torch_side.h"

namespace {

// The arguments of both directions, held alive in the layout the kernel reads.
struct Given {
  Arguments& next;
  Tensor q = next.rows("q"), k = next.rows("k"), v = next.rows("v");
  Tensor direction = next.packed("direction"), offset = next.packed("offset");
  MaybeTensor query_mask = next.maybe_tensor("query_mask"), key_mask = next.maybe_tensor("key_mask");
  int64_t columns = next.integer("columns");
  int64_t reach_rows = next.integer("reach_rows"), reach_columns = next.integer("reach_columns");
};

struct Kept {
  Arguments& next;
  Tensor grad = next.rows("grad"), grad_share = next.packed("grad_share");
  Tensor share = next.tensor("share"), total = next.tensor("total");
};

struct Inputs : Given {
  lot::Near call{};

  explicit Inputs(Arguments& arguments) : Given{arguments} {
    const ScalarType type = q.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                    "lotformer: the CPU kernel takes float32 and bfloat16.");
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "lotformer: q, k, v must have four dimensions.");
    const int64_t batch = q.size(0), heads = q.size(1), n = q.size(2), d = q.size(3), m = k.size(2);
    STD_TORCH_CHECK(m >= n && d >= 1 && v.size(3) >= 1 && d < (1 << 30) && v.size(3) < (1 << 30) && columns >= 1 &&
                        reach_rows >= 0 && reach_columns >= 0,
                    "lotformer: near keys need as many keys as queries, columns and a reach.");
    expect(q, "q", type, {batch, heads, n, d});
    expect(k, "k", type, {batch, heads, m, d});
    expect(v, "v", type, {batch, heads, m, v.size(3)});
    expect(direction, "direction", ScalarType::Float, {batch, heads, d});
    expect(offset, "offset", ScalarType::Float, {batch, heads});
    expect(query_mask, "query_mask", ScalarType::Bool, {batch, n});
    expect(key_mask, "key_mask", ScalarType::Bool, {batch, m});
    call.host = host();
    call.batch = batch;
    call.heads = heads;
    call.length = n;
    call.prefix = m - n;
    call.columns = columns;
    call.reach_rows = reach_rows;
    call.reach_columns = reach_columns;
    call.dim = int(d);
    call.value_dim = int(v.size(3));
    call.bf16 = type == ScalarType::BFloat16;
    call.scale = float(1 / std::sqrt(double(d)));
    call.q = rows(q);
    call.k = rows(k);
    call.v = rows(v);
    call.direction = data(direction);
    call.offset = data(offset);
    call.query_mask = mask(query_mask);
    call.key_mask = mask(key_mask);
  }
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Inputs in(next);
  lot::Near& c = in.call;
  Tensor out = output_like(in.q, in.v);
  Tensor share = floats(in.q, {c.batch, c.heads, c.length}), total = floats(in.q, {c.batch, c.heads, c.length});
  c.out = rows(out);
  c.share = data(share);
  c.total = data(total);
  run(chosen_kernel().near_forward, c);
  give_back(stack, out, share, total);
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Kept kept{next};
  Inputs in(next);
  lot::Near& c = in.call;
  expect(kept.grad, "grad", in.q.scalar_type(), {c.batch, c.heads, c.length, c.value_dim});
  for (const Tensor* x : {&kept.grad_share, &kept.share, &kept.total})
    expect(*x, "share", ScalarType::Float, {c.batch, c.heads, c.length});
  Tensor dq = fresh_like(in.q), dk = fresh_like(in.k), dv = fresh_like(in.v);
  Tensor ddirection = floats(in.q, {c.batch, c.heads, c.dim}), doffset = floats(in.q, {c.batch, c.heads});
  Tensor slope = floats(in.q, {c.batch, c.heads, c.length});
  c.grad_out = rows(kept.grad);
  c.grad_share = data(kept.grad_share);
  c.share = data(kept.share);
  c.total = data(kept.total);
  c.grad_q = rows(dq);
  c.grad_k = rows(dk);
  c.grad_v = rows(dv);
  c.grad_direction = data(ddirection);
  c.grad_offset = data(doffset);
  c.slope = data(slope);
  run(chosen_kernel().near_backward, c);
  give_back(stack, dq, dk, dv, ddirection, doffset);
}

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  define<Given>(library, "near_forward", {"out", "share", "total"});
  define<Kept, Given>(library, "near_backward", first<Given>(5));
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("near_forward", &forward);
  library.impl("near_backward", &backward);
}

}  // namespace
