// Learned masses of keys as an operator for torch.
#include "mass_call.h"
#include "torch_side.h"

namespace {

// The arguments of both directions, held alive in the layout the kernel reads. Without q the masses do not see it.
struct Given {
  Arguments& next;
  MaybeTensor q = next.maybe_rows("q");
  Tensor k = next.rows("k"), direction = next.packed("direction");
  MaybeTensor query_weight = next.maybe_packed("query_weight");
  MaybeTensor query_mask = next.maybe_tensor("query_mask"), key_mask = next.maybe_tensor("key_mask");
};

struct Kept {
  Arguments& next;
  Tensor grad = next.packed("grad"), masses = next.packed("masses"), mean_query = next.packed("mean_query");
};

struct Inputs : Given {
  lot::KeyMasses call{};

  explicit Inputs(Arguments& arguments) : Given{arguments} {
    STD_TORCH_CHECK(k.dim() == 4 && q.has_value() == query_weight.has_value(),
                    "lotformer: keys must have four dimensions, and queries come with their weight.");
    const int64_t batch = k.size(0), heads = k.size(1), m = k.size(2), d = k.size(3);
    STD_TORCH_CHECK(d >= 1 && d <= lot::kMaxWidth && m >= 1, "lotformer: the CPU kernel takes head dimensions from 1 to ",
                    lot::kMaxWidth, " and at least one key, got ", d, " and ", m, ".");
    expect(k, "k", ScalarType::Float, {batch, heads, m, d});
    expect(direction, "direction", ScalarType::Float, {heads, d});
    expect(key_mask, "key_mask", ScalarType::Bool, {batch, m});
    call.host = host();
    call.batch = batch;
    call.heads = heads;
    call.dim = int(d);
    call.length[lot::kKey] = m;
    if (q) {
      const int64_t n = q->size(2);
      expect(*q, "q", ScalarType::Float, {batch, heads, n, d});
      expect(query_weight, "query_weight", ScalarType::Float, {heads});
      expect(query_mask, "query_mask", ScalarType::Bool, {batch, n});
      call.length[lot::kQuery] = n;
      call.tokens[lot::kQuery] = rows(*q);
      call.query_weight = data(*query_weight);
    }
    call.tokens[lot::kKey] = rows(k);
    call.masks[lot::kQuery] = mask(query_mask);
    call.masks[lot::kKey] = mask(key_mask);
    call.direction = data(direction);
  }
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Inputs in(next);
  lot::KeyMasses& c = in.call;
  Tensor masses = floats(in.k, {c.batch, c.heads, c.length[lot::kKey]});
  Tensor mean_query = floats(in.k, {c.batch, c.heads, in.q ? c.dim : 0});
  c.masses = data(masses);
  c.mean_query = data(mean_query);
  run(chosen_kernel().key_masses, c);
  give_back(stack, masses, mean_query);
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Kept kept{next};
  Inputs in(next);
  lot::KeyMasses& c = in.call;
  expect(kept.grad, "grad", ScalarType::Float, {c.batch, c.heads, c.length[lot::kKey]});
  expect(kept.masses, "masses", ScalarType::Float, {c.batch, c.heads, c.length[lot::kKey]});
  Tensor dq = in.q ? fresh_like(*in.q) : floats(in.k, {0});
  Tensor dk = fresh_like(in.k);
  Tensor by_sample = floats(in.k, {c.batch, c.heads, c.dim});
  Tensor weight_by_sample = floats(in.k, {c.batch, c.heads});
  Tensor ddirection = floats(in.k, {c.heads, c.dim}), dweight = floats(in.k, {in.q ? c.heads : 0});
  c.grad_masses = data(kept.grad);
  c.masses = data(kept.masses);
  c.mean_query = data(kept.mean_query);
  if (in.q) c.grad_tokens[lot::kQuery] = rows(dq);
  c.grad_tokens[lot::kKey] = rows(dk);
  c.grad_direction = data(by_sample);
  c.grad_query_weight = data(weight_by_sample);
  run(chosen_kernel().key_masses_backward, c);
  add_samples(by_sample, c.batch, c.heads * c.dim, data(ddirection));
  if (in.q) add_samples(weight_by_sample, c.batch, c.heads, data(dweight));
  give_back(stack, dq, dk, ddirection, dweight);
}

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  define<Given>(library, "key_masses_forward", {"masses", "mean_query"});
  define<Kept, Given>(library, "key_masses_backward", first<Given>(4));
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("key_masses_forward", &forward);
  library.impl("key_masses_backward", &backward);
}

}  // namespace
