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

inline std::vector<const lot::Kernel*> runnable_kernels() {
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

inline const lot::Kernel& chosen_kernel() {
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

inline lot::Host host() {
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
inline Tensor with_contiguous_rows(const Tensor& x) {
  return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

// Asking first is much cheaper than a call that finds nothing to do.
inline Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

inline lot::Rows rows(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

inline lot::Masses masses(const MaybeTensor& x) {
  if (!x) return {};
  return {static_cast<const float*>(x->data_ptr()), x->stride(0), x->stride(1), x->stride(2)};
}

inline lot::Mask mask(const MaybeTensor& x) {
  if (!x) return {};
  return {static_cast<const uint8_t*>(x->data_ptr()), x->stride(0), x->stride(1)};
}

inline void expect(const Tensor& x, const char* name, ScalarType type, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(x.is_cpu(), "lotformer: `", name, "` must be on the CPU.");
  STD_TORCH_CHECK(x.scalar_type() == type, "lotformer: `", name, "` has the wrong dtype.");
  STD_TORCH_CHECK(x.dim() == int64_t(shape.size()), "lotformer: `", name, "` has the wrong number of dimensions.");
  for (size_t i = 0; i < shape.size(); i++)
    STD_TORCH_CHECK(x.size(int64_t(i)) == shape[i], "lotformer: `", name, "` has size ", x.size(int64_t(i)),
                    " in dimension ", i, ", expected ", shape[i], ".");
}

inline void expect(const MaybeTensor& x, const char* name, ScalarType type, std::vector<int64_t> shape) {
  if (x) expect(*x, name, type, shape);
}

// Reads the arguments of an operator one by one, off the stack of a boxed call. Without a stack it lists what would be
// read, for the schema. An operator states the order of its arguments in structs whose members are read on construction:
// `Given`, which both directions take, and `Kept`, which backward takes before them.
class Arguments {
 public:
  std::vector<std::string> names;  // without a stack, and as the schema has them
  std::string text;

  explicit Arguments(StableIValue* stack = nullptr) : next_(stack) {}
  double number(const char* name) { return read<double>("float ", name); }
  int64_t integer(const char* name) { return read<int64_t>("int ", name); }
  Tensor tensor(const char* name) { return read<Tensor>("Tensor ", name); }
  MaybeTensor maybe_tensor(const char* name) { return read<MaybeTensor>("Tensor? ", name); }
  Tensor rows(const char* name) { return in_layout(with_contiguous_rows, tensor(name)); }
  Tensor packed(const char* name) { return in_layout(::packed, tensor(name)); }
  MaybeTensor maybe_rows(const char* name) { return in_layout(with_contiguous_rows, maybe_tensor(name)); }
  MaybeTensor maybe_packed(const char* name) { return in_layout(::packed, maybe_tensor(name)); }

 private:
  template <class T>
  T read(const char* type, const char* name) {
    if (next_ != nullptr) return torch::stable::detail::to<T>(*next_++);
    text += std::string(names.empty() ? "" : ", ") + type + name;
    names.push_back(name);
    return {};
  }
  Tensor in_layout(Tensor (*layout)(const Tensor&), const Tensor& x) { return next_ != nullptr ? layout(x) : x; }
  MaybeTensor in_layout(Tensor (*layout)(const Tensor&), const MaybeTensor& x) { return x ? layout(*x) : x; }

  StableIValue* next_;
};

// Defines an operator with the arguments of these structs, one after the other, and tensors for results.
template <class... Given>
void define(torch::stable::detail::StableLibrary& library, const std::string& name, std::vector<std::string> results) {
  Arguments next;
  (void(Given{next}), ...);
  std::string text;
  for (const std::string& result : results) text += (text.empty() ? "Tensor " : ", Tensor ") + result;
  library.def((name + "(" + next.text + ") -> (" + text + ")").c_str());
}

// Names of the first arguments of a struct: of those with gradients, for the results of backward.
template <class Given>
std::vector<std::string> first(int count) {
  Arguments next;
  Given{next};
  return {next.names.begin(), next.names.begin() + count};
}

template <class... Tensors>
void give_back(StableIValue* stack, const Tensors&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

inline Tensor floats(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Float);
}

inline float* data(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }
inline float* data(const MaybeTensor& x) { return x ? data(*x) : nullptr; }

// Dense memory in the layout of x as far as that is dense, with contiguous rows: tokens that overlap in memory have a
// layout without them.
inline Tensor fresh_like(const Tensor& x) {
  Tensor y = torch::stable::empty_like(x);
  if (y.size(3) != 1 && y.stride(3) != 1)
    y = torch::stable::new_empty(x, std::vector<int64_t>{x.size(0), x.size(1), x.size(2), x.size(3)});
  lot::prefer_huge_pages(y.data_ptr(), size_t(y.numel()) * (y.scalar_type() == ScalarType::Float ? 4 : 2));
  return y;
}

// sum[i] = Σ_b x[b, i], in double: parameters are shared by the samples.
inline void add_samples(const Tensor& x, int64_t batch, int64_t size, float* sum) {
  const float* from = data(x);
  for (int64_t i = 0; i < size; i++) {
    double total = 0;
    for (int64_t b = 0; b < batch; b++) total += from[b * size + i];
    sum[i] = float(total);
  }
}

// The output has the layout of the queries, so that a host that transposes back gets a view.
inline Tensor output_like(const Tensor& q, const Tensor& v) {
  if (v.size(3) == q.size(3)) return fresh_like(q);
  const int64_t batch = q.size(0), heads = q.size(1), n = q.size(2), width = v.size(3);
  if (q.stride(1) >= q.stride(2)) return torch::stable::new_empty(q, std::vector<int64_t>{batch, heads, n, width});
  return torch::stable::transpose(torch::stable::new_empty(q, std::vector<int64_t>{batch, n, heads, width}), 1, 2);
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
