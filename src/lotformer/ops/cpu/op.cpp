// The operator for torch: schemas, checks, allocation and what Python asks the extension.
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <cmath>
#include <utility>

#include "torch_side.h"

namespace {

// The arguments of both directions, held alive in the layout the kernel reads.
struct Given {
  Arguments& next;
  Tensor q = next.rows("q"), k = next.rows("k"), v = next.rows("v");
  MaybeTensor pivots = next.maybe_packed("pivots");
  Tensor log_masses = next.packed("log_masses");
  MaybeTensor temperatures = next.maybe_packed("temperatures");
  MaybeTensor query_masses = next.maybe_tensor("query_masses"), key_masses = next.maybe_tensor("key_masses");
  MaybeTensor query_mask = next.maybe_tensor("query_mask"), key_mask = next.maybe_tensor("key_mask");
  double temperature = next.number("temperature");
  int64_t solver = next.integer("solver"), iters = next.integer("iters");
  double tol = next.number("tol");
  int64_t balance = next.integer("balance");
};

struct Kept {
  Arguments& next;
  Tensor grad = next.rows("grad"), state = next.tensor("state"), mixed = next.tensor("mixed");
};

struct Inputs : Given {
  lot::Call call{};

  explicit Inputs(Arguments& arguments) : Given{arguments} {
    const ScalarType type = q.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                    "lotformer: the CPU kernel takes float32 and bfloat16.");
    const int64_t pivot_dims = pivots ? pivots->dim() : 3;
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && (pivot_dims == 3 || pivot_dims == 4),
                    "lotformer: q, k, v must have four dimensions and pivots three or four.");
    const bool own_pivots = pivot_dims == 4;
    const int64_t batch = q.size(0), heads = q.size(1), n = q.size(2), d = q.size(3), m = k.size(2);
    const int64_t rank = pivots ? pivots->size(own_pivots ? 2 : 1) : d, value_dim = v.size(3);
    for (int64_t width : {rank, d, value_dim})
      STD_TORCH_CHECK(width >= 1 && width <= lot::kMaxWidth, "lotformer: the CPU kernel takes ranks and head ",
                      "dimensions from 1 to ", lot::kMaxWidth, ", got ", width, ".");
    STD_TORCH_CHECK(n >= 1 && m >= 1 && n < (int64_t(1) << 31) && m < (int64_t(1) << 31) && iters >= 1,
                    "lotformer: the CPU kernel needs at least one query, one key and one sweep.");
    expect(q, "q", type, {batch, heads, n, d});
    expect(k, "k", type, {batch, heads, m, d});
    expect(v, "v", type, {batch, heads, m, value_dim});
    if (own_pivots)
      expect(pivots, "pivots", ScalarType::Float, {batch, heads, rank, d});
    else
      expect(pivots, "pivots", ScalarType::Float, {heads, rank, d});
    expect(log_masses, "log_masses", ScalarType::Float, {heads, rank});
    expect(temperatures, "temperatures", ScalarType::Float, {heads});
    expect(query_masses, "query_masses", ScalarType::Float, {batch, heads, n});
    expect(key_masses, "key_masses", ScalarType::Float, {batch, heads, m});
    expect(query_mask, "query_mask", ScalarType::Bool, {batch, n});
    expect(key_mask, "key_mask", ScalarType::Bool, {batch, m});
    call.host = host();
    call.batch = batch;
    call.heads = heads;
    call.length[lot::kQuery] = n;
    call.length[lot::kKey] = m;
    call.rank = int(rank);
    call.dim = int(d);
    call.value_dim = int(value_dim);
    call.bf16 = type == ScalarType::BFloat16;
    call.tokens[lot::kQuery] = rows(q);
    call.tokens[lot::kKey] = rows(k);
    call.values = rows(v);
    call.pivots = data(pivots);
    call.own_pivots = own_pivots;
    call.scored = !pivots;
    call.log_masses = data(log_masses);
    call.temperatures = data(temperatures);
    call.temperature = float(temperature);
    call.masses[lot::kQuery] = masses(query_masses);
    call.masses[lot::kKey] = masses(key_masses);
    call.masks[lot::kQuery] = mask(query_mask);
    call.masks[lot::kKey] = mask(key_mask);
    call.solver = lot::Solver(solver);
    call.balance = lot::Balance(balance);
    call.least_log_mass = lot::least_log_mass(call.solver);
    call.iters = int(iters);
    call.tol = tol;
  }
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Inputs in(next);
  lot::Call& c = in.call;
  Tensor out = output_like(in.q, in.v);
  Tensor state = floats(in.q, {c.batch, c.heads, lot::state_size(c)});
  Tensor mixed = floats(in.q, {c.batch, c.heads, c.rank, c.value_dim});
  c.out = rows(out);
  c.state = data(state);
  c.mixed = data(mixed);
  run(chosen_kernel().forward, c);
  give_back(stack, out, state, mixed);
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  const Kept kept{next};
  Inputs in(next);
  lot::Call& c = in.call;
  const Tensor& q = in.q;
  expect(kept.grad, "grad", q.scalar_type(), {c.batch, c.heads, c.length[lot::kQuery], c.value_dim});
  expect(kept.state, "state", ScalarType::Float, {c.batch, c.heads, lot::state_size(c)});
  expect(kept.mixed, "mixed", ScalarType::Float, {c.batch, c.heads, c.rank, c.value_dim});
  Tensor dq = fresh_like(in.q), dk = fresh_like(in.k), dv = fresh_like(in.v);
  std::vector<int64_t> pivots{0};
  if (!c.scored) pivots = {c.heads, c.rank, c.dim};
  if (c.own_pivots) pivots.insert(pivots.begin(), c.batch);
  Tensor dpivots = floats(q, pivots);
  Tensor dlog_masses = floats(q, {c.heads, c.rank});
  Tensor dtemperatures = floats(q, {c.heads});
  const bool query_masses = in.query_masses.has_value(), key_masses = in.key_masses.has_value();
  Tensor dquery = floats(q, {c.batch, c.heads, query_masses ? c.length[lot::kQuery] : 0});
  Tensor dkey = floats(q, {c.batch, c.heads, key_masses ? c.length[lot::kKey] : 0});
  c.state = data(kept.state);
  c.mixed = data(kept.mixed);
  c.grad_out = rows(kept.grad);
  c.grad_tokens[lot::kQuery] = rows(dq);
  c.grad_tokens[lot::kKey] = rows(dk);
  c.grad_values = rows(dv);
  c.grad_pivots = data(dpivots);
  c.grad_log_masses = data(dlog_masses);
  c.grad_temperatures = data(dtemperatures);
  c.grad_masses[lot::kQuery] = query_masses ? data(dquery) : nullptr;
  c.grad_masses[lot::kKey] = key_masses ? data(dkey) : nullptr;
  run(chosen_kernel().backward, c);
  give_back(stack, dq, dk, dv, dpivots, dlog_masses, dtemperatures, dquery, dkey);
}

STABLE_TORCH_LIBRARY_FRAGMENT(lotformer, library) {
  define<Given>(library, "cpu_forward", {"out", "state", "mixed"});
  define<Kept, Given>(library, "cpu_backward", first<Given>(8));
}

STABLE_TORCH_LIBRARY_IMPL(lotformer, CPU, library) {
  library.impl("cpu_forward", &forward);
  library.impl("cpu_backward", &backward);
}

// What this build can run here, best first, and what it chose: for `lotformer doctor` and the tests.
PyObject* instruction_sets(PyObject*, PyObject*) {
  const std::vector<const lot::Kernel*> kernels = runnable_kernels();
  PyObject* names = PyList_New(0);
  for (const lot::Kernel* kernel : kernels) {
    PyObject* name = PyUnicode_FromString(kernel->name);
    if (name == nullptr || PyList_Append(names, name) != 0) return nullptr;
    Py_DECREF(name);
  }
  return names;
}

// Whether every row of a (heads, rank) matrix of logarithms at an address sums to one, to 2 %. An operator would take
// longer to call than the check of a small problem may cost.
PyObject* sum_to_one(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  Py_ssize_t heads = 0, rank = 0;
  if (!PyArg_ParseTuple(arguments, "Knn", &address, &heads, &rank)) return nullptr;
  const float* x = reinterpret_cast<const float*>(static_cast<uintptr_t>(address));
  bool ok = true;
  for (Py_ssize_t h = 0; h < heads && ok; h++) {
    double total = 0;
    for (Py_ssize_t j = 0; j < rank; j++) total += std::exp(double(*x++));
    ok = std::fabs(total - 1) < 2e-2;
  }
  return PyBool_FromLong(ok);
}

// What has to be equal in Python, by the names it has there.
PyObject* constants(PyObject*, PyObject*) {
  const std::pair<const char*, double> all[] = {
      {"MAX_WIDTH", lot::kMaxWidth},
      {"STATE_NOTES", lot::kNotes},
      {"LEAST_LOG_MASS sinkhorn", lot::least_log_mass(lot::kSinkhorn)},
      {"LEAST_LOG_MASS newton", lot::least_log_mass(lot::kNewton)},
      {"MAX_PASSES", lot::kMaxPasses},
      {"START_RANGE", lot::kStartRange},
      {"PACE", lot::kPace},
      {"SETTLED", lot::kSettled},
      {"SETTLED_REACH", lot::kSettledReach},
      {"TOO_FAR", lot::kTooFar},
      {"LARGE_STEP", lot::kLargeStep},
      {"BOLDNESS", lot::kBoldness},
  };
  PyObject* named = PyDict_New();
  for (const auto& [name, number] : all) {
    PyObject* value = PyFloat_FromDouble(number);
    if (value == nullptr || PyDict_SetItemString(named, name, value) != 0) return nullptr;
    Py_DECREF(value);
  }
  return named;
}

PyMethodDef methods[] = {{"instruction_sets", instruction_sets, METH_NOARGS, "Names of the kernels that run here."},
                         {"constants", constants, METH_NOARGS, "What has to be equal in Python."},
                         {"sum_to_one", sum_to_one, METH_VARARGS, "Whether logarithms are those of masses."},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernel() { return PyModule_Create(&module); }
