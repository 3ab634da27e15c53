// The operator that makes polarised rows of a prefix, for torch.
#include "pooling_call.h"
#include "torch_side.h"

namespace {

// What both directions share, held alive in the layout the kernel reads.
struct Pooling {
  Tensor q, k, v;
  MaybeTensor key_mask;
  lot::Pool call{};

  explicit Pooling(Arguments& next)
      : q(with_contiguous_rows(next.tensor())),
        k(with_contiguous_rows(next.tensor())),
        v(with_contiguous_rows(next.tensor())),
        key_mask(next.maybe_tensor()) {
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
    call.beta = float(next.number());
    for (float& power : call.powers) power = float(next.number());
  }
};

void pool(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Pooling in(next);
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
  Tensor grad = with_contiguous_rows(next.tensor()), out = next.tensor(), plan = next.tensor();
  Pooling in(next);
  lot::Pool& c = in.call;
  expect(grad, "grad", ScalarType::Float, {c.batch, c.heads, c.rows, c.value_dim});
  expect(out, "out", ScalarType::Float, {c.batch, c.heads, c.rows, c.value_dim});
  expect(plan, "plan", ScalarType::Float, {c.batch, c.heads, c.rows, c.length});
  Tensor dq = floats(in.q, {c.batch, c.heads, c.rows, c.dim}), dk = fresh_like(in.k), dv = fresh_like(in.v);
  c.grad = rows(grad);
  c.out = rows(out);
  c.plan = data(plan);
  c.grad_queries = data(dq);
  c.grad_keys = rows(dk);
  c.grad_values = rows(dv);
  run(chosen_kernel().pool_backward, c);
  give_back(stack, dq, dk, dv);
}

#define POOL_INPUTS "Tensor q, Tensor k, Tensor v, Tensor? key_mask, float beta, float like, float opposite"

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  library.def("pool_forward(" POOL_INPUTS ") -> (Tensor rows, Tensor plan)");
  library.def("pool_backward(Tensor grad, Tensor rows, Tensor plan, " POOL_INPUTS
              ") -> (Tensor q, Tensor k, Tensor v)");
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("pool_forward", &pool);
  library.impl("pool_backward", &pool_backward);
}

}  // namespace
