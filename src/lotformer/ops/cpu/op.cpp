// The operator for torch: schemas, checks, allocation and what Python asks the extension.
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <cmath>
#include <utility>

#include "torch_side.h"

namespace {

#define LOT_INPUTS                                                                                                   \
  "Tensor q, Tensor k, Tensor v, Tensor? pivots, Tensor log_masses, Tensor? temperatures, Tensor? query_masses, "    \
  "Tensor? key_masses, Tensor? query_mask, Tensor? key_mask, float temperature, int solver, int iters, float tol, "   \
  "int balance"

// LOT_INPUTS as they come.
struct Given {
  Arguments& next;
  Tensor q = next.tensor(), k = next.tensor(), v = next.tensor();
  MaybeTensor pivots = next.maybe_tensor();
  Tensor log_masses = next.tensor();
  MaybeTensor temperatures = next.maybe_tensor();
  MaybeTensor query_masses = next.maybe_tensor(), key_masses = next.maybe_tensor();
  MaybeTensor query_mask = next.maybe_tensor(), key_mask = next.maybe_tensor();
  double temperature = next.number();
  int64_t solver = next.integer(), iters = next.integer();
  double tol = next.number();
  int64_t balance = next.integer();
};

// The inputs both directions share, held alive in the layout the kernel reads.
struct Inputs {
  Given given;
  Tensor q, k, v, log_masses;
  MaybeTensor pivots, temperatures;
  lot::Call call;

  explicit Inputs(Arguments& next)
      : given{next},
        q(with_contiguous_rows(given.q)),
        k(with_contiguous_rows(given.k)),
        v(with_contiguous_rows(given.v)),
        log_masses(packed(given.log_masses)) {
    const ScalarType type = q.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                    "lotformer: the CPU kernel takes float32 and bfloat16.");
    if (given.pivots) pivots = packed(*given.pivots);
    const int64_t pivot_dims = pivots ? pivots->dim() : 3;
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && (pivot_dims == 3 || pivot_dims == 4),
                    "lotformer: q, k, v must have four dimensions and pivots three or four.");
    const bool own_pivots = pivot_dims == 4;
    const int64_t batch = q.size(0), heads = q.size(1), n = q.size(2), d = q.size(3), m = k.size(2);
    const int64_t rank = pivots ? pivots->size(own_pivots ? 2 : 1) : d, value_dim = v.size(3);
    for (int64_t width : {rank, d, value_dim})
      STD_TORCH_CHECK(width >= 1 && width <= lot::kMaxWidth, "lotformer: the CPU kernel takes ranks and head ",
                      "dimensions from 1 to ", lot::kMaxWidth, ", got ", width, ".");
    STD_TORCH_CHECK(n >= 1 && m >= 1 && n < (int64_t(1) << 31) && m < (int64_t(1) << 31) && given.iters >= 1,
                    "lotformer: the CPU kernel needs at least one query, one key and one sweep.");
    expect(q, "q", type, {batch, heads, n, d});
    expect(k, "k", type, {batch, heads, m, d});
    expect(v, "v", type, {batch, heads, m, value_dim});
    if (own_pivots)
      expect(pivots, "pivots", ScalarType::Float, {batch, heads, rank, d});
    else
      expect(pivots, "pivots", ScalarType::Float, {heads, rank, d});
    expect(log_masses, "log_masses", ScalarType::Float, {heads, rank});
    if (given.temperatures) temperatures = packed(*given.temperatures);
    expect(temperatures, "temperatures", ScalarType::Float, {heads});
    expect(given.query_masses, "query_masses", ScalarType::Float, {batch, heads, n});
    expect(given.key_masses, "key_masses", ScalarType::Float, {batch, heads, m});
    expect(given.query_mask, "query_mask", ScalarType::Bool, {batch, n});
    expect(given.key_mask, "key_mask", ScalarType::Bool, {batch, m});
    call = lot::Call{};
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
    call.pivots = pivots ? static_cast<const float*>(pivots->data_ptr()) : nullptr;
    call.own_pivots = own_pivots;
    call.scored = !pivots;
    call.log_masses = static_cast<const float*>(log_masses.data_ptr());
    call.temperatures = temperatures ? static_cast<const float*>(temperatures->data_ptr()) : nullptr;
    call.temperature = float(given.temperature);
    call.masses[lot::kQuery] = masses(given.query_masses);
    call.masses[lot::kKey] = masses(given.key_masses);
    call.masks[lot::kQuery] = mask(given.query_mask);
    call.masks[lot::kKey] = mask(given.key_mask);
    call.solver = lot::Solver(given.solver);
    call.balance = lot::Balance(given.balance);
    call.least_log_mass = lot::least_log_mass(call.solver);
    call.iters = int(given.iters);
    call.tol = given.tol;
  }
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments next(stack);
  Inputs in(next);
  lot::Call& c = in.call;
  Tensor out = output_like(in.given.q, in.v);
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
  Tensor dout = with_contiguous_rows(next.tensor());
  Tensor state = next.tensor(), mixed = next.tensor();
  Inputs in(next);
  lot::Call& c = in.call;
  const Tensor& q = in.q;
  expect(dout, "grad", q.scalar_type(), {c.batch, c.heads, c.length[lot::kQuery], c.value_dim});
  expect(state, "state", ScalarType::Float, {c.batch, c.heads, lot::state_size(c)});
  expect(mixed, "mixed", ScalarType::Float, {c.batch, c.heads, c.rank, c.value_dim});
  Tensor dq = fresh_like(in.q), dk = fresh_like(in.k), dv = fresh_like(in.v);
  std::vector<int64_t> pivots{0};
  if (!c.scored) pivots = {c.heads, c.rank, c.dim};
  if (c.own_pivots) pivots.insert(pivots.begin(), c.batch);
  Tensor dpivots = floats(q, pivots);
  Tensor dlog_masses = floats(q, {c.heads, c.rank});
  Tensor dtemperatures = floats(q, {c.heads});
  const bool query_masses = in.given.query_masses.has_value(), key_masses = in.given.key_masses.has_value();
  Tensor dquery = floats(q, {c.batch, c.heads, query_masses ? c.length[lot::kQuery] : 0});
  Tensor dkey = floats(q, {c.batch, c.heads, key_masses ? c.length[lot::kKey] : 0});
  c.state = data(state);
  c.mixed = data(mixed);
  c.grad_out = rows(dout);
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
  library.def("cpu_forward(" LOT_INPUTS ") -> (Tensor out, Tensor state, Tensor mixed)");
  library.def("cpu_backward(Tensor grad, Tensor state, Tensor mixed, " LOT_INPUTS
              ") -> (Tensor q, Tensor k, Tensor v, Tensor pivots, Tensor log_masses, Tensor temperatures, "
              "Tensor query_masses, Tensor key_masses)");
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
