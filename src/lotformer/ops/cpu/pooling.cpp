// The operator that makes polarised rows of a prefix, for torch.
#include "pooling_call.h"
#include "torch_side.h"

namespace {

// The arguments of both directions, held alive in the layout the kernel reads.
struct Given {
  Arguments& next;
  Tensor q = next.rows("q"), k = next.rows("k"), v = next.rows("v");
  MaybeTensor key_mask = next.maybe_tensor("key_mask");
  double beta = next.number("beta"), like = next.number("like"), opposite = next.number("opposite");
};

struct Kept {
  Arguments& next;
  Tensor grad = next.rows("grad"), rows = next.tensor("rows"), plan = next.tensor("plan");
};

struct Inputs : Given {
  lot::Pool call{};

  explicit Inputs(Arguments& arguments) : Given{arguments} {
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "lotformer: q, k, v must have four dimensions.");
    const int64_t batch = q.size(0), heads = q.size(1), count = q.size(2), dim = q.size(3), length = k.size(2);
    STD_TORCH_CHECK(length >= 1 && dim >= 1, "lotformer: there must be a key, and a channel.");
    expect(q, "q", ScalarType::Float, {batch, heads, count, dim});
    expect(k, "k", ScalarType::Float, {batch, heads, length, dim});
    expect(v, "v", ScalarType::Float, {batch, heads, length, v.size(3)});
    expect(key_mask, "key_mask", ScalarType::Bool, {batch, length});
    call.host = host();
    call.batch = batch;
    call.heads = heads;
    call.rows = count;
    call.length = length;
    call.dim = int(dim);
    call.value_dim = int(v.size(3));
    call.queries = rows(q);
    call.keys = rows(k);
    call.values = rows(v);
    call.mask = mask(key_mask);
    call.beta = float(beta);
    call.powers[0] = float(like);
    call.powers[1] = float(opposite);
  }
};

void pool(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Inputs in(next);
  lot::Pool& c = in.call;
  Tensor out = floats(in.q, {c.batch, c.heads, c.rows, c.value_dim});
  Tensor plan = floats(in.q, {c.batch, c.heads, c.rows, c.length});
  c.out = rows(out);
  c.plan = data(plan);
  run(chosen_kernel().pool, c);
  give_back(stack, out, plan);
}

void pool_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Kept kept{next};
  Inputs in(next);
  lot::Pool& c = in.call;
  expect(kept.grad, "grad", ScalarType::Float, {c.batch, c.heads, c.rows, c.value_dim});
  expect(kept.rows, "rows", ScalarType::Float, {c.batch, c.heads, c.rows, c.value_dim});
  expect(kept.plan, "plan", ScalarType::Float, {c.batch, c.heads, c.rows, c.length});
  Tensor dq = floats(in.q, {c.batch, c.heads, c.rows, c.dim}), dk = fresh_like(in.k), dv = fresh_like(in.v);
  c.grad = rows(kept.grad);
  c.out = rows(kept.rows);
  c.plan = data(kept.plan);
  c.grad_queries = data(dq);
  c.grad_keys = rows(dk);
  c.grad_values = rows(dv);
  run(chosen_kernel().pool_backward, c);
  give_back(stack, dq, dk, dv);
}

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  define<Given>(library, "pool_forward", {"rows", "plan"});
  define<Kept, Given>(library, "pool_backward", first<Given>(3));
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("pool_forward", &pool);
  library.impl("pool_backward", &pool_backward);
}

}  // namespace
