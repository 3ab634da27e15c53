// The operator that joins prefix rows, coupled rows and local mixing, for torch.
#include "joining_call.h"
#include "torch_side.h"

namespace {

// The arguments of both directions, held alive in the layout the kernel reads.
struct Given {
  Arguments& next;
  Tensor values = next.rows("values"), filters = next.packed("filters");
  MaybeTensor query_mask = next.maybe_tensor("query_mask"), key_mask = next.maybe_tensor("key_mask");
  int64_t rows = next.integer("rows"), columns = next.integer("columns");
};

// What forward takes before them, and what backward takes.
struct Joined {
  Arguments& next;
  MaybeTensor coupled = next.maybe_rows("coupled"), prefix = next.maybe_rows("prefix");
};

struct Kept {
  Arguments& next;
  Tensor grad = next.rows("grad");
  int64_t prefix = next.integer("prefix");
};

struct Inputs : Given {
  lot::Join call{};

  Inputs(Arguments& arguments, int64_t prefix) : Given{arguments} {
    STD_TORCH_CHECK(values.dim() == 4, "lotformer: values must have four dimensions.");
    const int64_t batch = values.size(0), heads = values.size(1), length = values.size(2), dim = values.size(3);
    const int64_t kernel = filters.size(filters.dim() - 1);
    const bool flat = filters.dim() == 3;  // filters of a sequence; those of a grid have one dimension more
    const int64_t channels = filters.size(0);
    STD_TORCH_CHECK(channels == heads * dim || channels == dim, "lotformer: expected ", heads * dim, " or ", dim,
                    " filters, got ", channels, ".");
    if (flat)
      expect(filters, "filters", ScalarType::Float, {channels, 1, kernel});
    else
      expect(filters, "filters", ScalarType::Float, {channels, 1, kernel, kernel});
    STD_TORCH_CHECK(kernel % 2 == 1, "lotformer: filters must have odd widths.");
    STD_TORCH_CHECK(prefix >= 0 && rows >= 1 && columns >= 1 && prefix + rows * columns == length, "lotformer: a prefix of ",
                    prefix, " and a grid of ", rows, " × ", columns, " do not make ", length, " tokens.");
    STD_TORCH_CHECK(!flat || rows == 1, "lotformer: filters of a sequence take a grid of one row.");
    expect(values, "values", ScalarType::Float, {batch, heads, length, dim});
    expect(query_mask, "query_mask", ScalarType::Bool, {batch, length});
    expect(key_mask, "key_mask", ScalarType::Bool, {batch, length});
    call.host = host();
    call.batch = batch;
    call.heads = heads;
    call.prefix = prefix;
    call.grid[0] = rows;
    call.grid[1] = columns;
    call.dim = int(dim);
    call.kernel[0] = flat ? 1 : int(kernel);
    call.kernel[1] = int(kernel);
    call.filters = data(filters);
    call.shared = channels != heads * dim;
    call.values = ::rows(values);
    call.masks[lot::kQuery] = mask(query_mask);
    call.masks[lot::kKey] = mask(key_mask);
  }
};

void join(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Joined joined{next};
  const MaybeTensor &coupled = joined.coupled, &prefix = joined.prefix;
  Inputs in(next, prefix ? prefix->size(2) : 0);
  lot::Join& c = in.call;
  expect(coupled, "coupled", ScalarType::Float, {c.batch, c.heads, c.tokens(), c.dim});
  expect(prefix, "rows", ScalarType::Float, {c.batch, c.heads, c.prefix, c.dim});
  Tensor out = fresh_like(in.values);
  if (coupled) c.coupled = rows(*coupled);
  if (prefix) c.rows = rows(*prefix);
  c.out = rows(out);
  run(chosen_kernel().join, c);
  give_back(stack, out);
}

void join_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Kept kept{next};
  Inputs in(next, kept.prefix);
  lot::Join& c = in.call;
  expect(kept.grad, "grad", ScalarType::Float, {c.batch, c.heads, c.prefix + c.tokens(), c.dim});
  Tensor values = fresh_like(in.values), filters = torch::stable::empty_like(in.filters);
  c.grad = rows(kept.grad);
  c.grad_values = rows(values);
  c.grad_filters = data(filters);
  run(chosen_kernel().join_backward, c);
  give_back(stack, values, filters);
}

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  define<Joined, Given>(library, "join_forward", {"out"});
  define<Kept, Given>(library, "join_backward", first<Given>(2));
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("join_forward", &join);
  library.impl("join_backward", &join_backward);
}

}  // namespace
