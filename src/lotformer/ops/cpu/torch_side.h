// What operators of this extension share on torch's side: arguments, checks, memory and the choice of the kernel.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "scratch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

std::vector<const lot::Kernel*> runnable_kernels() {
  std::vector<const lot::Kernel*> kernels;
#ifdef LOT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw"))
    kernels.push_back(&lot::avx512_kernel());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back(&lot::avx2_kernel());
#endif
  kernels.push_back(&lot::portable_kernel());
  return kernels;
}

const lot::Kernel& chosen_kernel() {
  static const std::vector<const lot::Kernel*> kernels = runnable_kernels();
  const char* wanted = std::getenv("LOTFORMER_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return *kernels.front();
  std::string known;
  for (const lot::Kernel* kernel : kernels) {
    if (std::strcmp(kernel->name, wanted) == 0) return *kernel;
    known += std::string(known.empty() ? "" : ", ") + kernel->name;
  }
  STD_TORCH_CHECK(false, "LOTFORMER_CPU_ISA: expected one of ", known, " on this machine, got ", wanted, ".");
  return *kernels.front();
}

lot::Host host() {
  lot::Host h;
  h.parallel = [](int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
    // Across the boundary to torch's threads an exception loses its message.
    std::atomic<bool> starved{false};
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      try {
        body(begin, end, context);
      } catch (const std::bad_alloc&) {
        starved = true;
      }
    });
    if (starved) throw std::bad_alloc();
  };
  h.threads = [] { return int(torch::stable::get_num_threads()); };
  h.scratch = lot::take_scratch;
  h.mark = lot::mark_scratch;
  h.release = lot::release_scratch;
  return h;
}

// Rows must be contiguous; anything else about the layout is taken as it is.
Tensor with_contiguous_rows(const Tensor& x) {
  return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

// Asking first is much cheaper than a call that finds nothing to do.
inline Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

lot::Rows rows(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

inline lot::Masses masses(const MaybeTensor& x) {
  if (!x) return {};
  return {static_cast<const float*>(x->data_ptr()), x->stride(0), x->stride(1), x->stride(2)};
}

lot::Mask mask(const MaybeTensor& x) {
  if (!x) return {};
  return {static_cast<const uint8_t*>(x->data_ptr()), x->stride(0), x->stride(1)};
}

void expect(const Tensor& x, const char* name, ScalarType type, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(x.is_cpu(), "lotformer: `", name, "` must be on the CPU.");
  STD_TORCH_CHECK(x.scalar_type() == type, "lotformer: `", name, "` has the wrong dtype.");
  STD_TORCH_CHECK(x.dim() == int64_t(shape.size()), "lotformer: `", name, "` has the wrong number of dimensions.");
  for (size_t i = 0; i < shape.size(); i++)
    STD_TORCH_CHECK(x.size(int64_t(i)) == shape[i], "lotformer: `", name, "` has size ", x.size(int64_t(i)),
                    " in dimension ", i, ", expected ", shape[i], ".");
}

void expect(const MaybeTensor& x, const char* name, ScalarType type, std::vector<int64_t> shape) {
  if (x) expect(*x, name, type, shape);
}

// Takes the arguments of a boxed call one by one, in the order of the schema.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  Tensor tensor() { return torch::stable::detail::to<Tensor>(*next_++); }
  MaybeTensor maybe_tensor() { return torch::stable::detail::to<MaybeTensor>(*next_++); }
  double number() { return torch::stable::detail::to<double>(*next_++); }
  int64_t integer() { return torch::stable::detail::to<int64_t>(*next_++); }

 private:
  StableIValue* next_;
};

template <class... Tensors>
void give_back(StableIValue* stack, const Tensors&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

inline Tensor floats(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Float);
}

float* data(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

// Dense memory in the layout of x as far as that is dense, with contiguous rows: tokens that overlap in memory have a
// layout without them.
Tensor fresh_like(const Tensor& x) {
  Tensor y = torch::stable::empty_like(x);
  if (y.size(3) != 1 && y.stride(3) != 1)
    y = torch::stable::new_empty(x, std::vector<int64_t>{x.size(0), x.size(1), x.size(2), x.size(3)});
  lot::prefer_huge_pages(y.data_ptr(), size_t(y.numel()) * (y.scalar_type() == ScalarType::Float ? 4 : 2));
  return y;
}

template <class Call>
void run(void (*kernel)(const Call&), const Call& call) {
  try {
    kernel(call);
  } catch (const std::bad_alloc&) {
    STD_TORCH_CHECK(false, "lotformer: out of memory. The CPU kernel keeps a number for every token and pivot of a head.");
  }
}

}  // namespace
