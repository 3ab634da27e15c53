// One call of the operator as plain data: what the torch side hands to the kernel of an instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lot {

// Rows of a (batch, heads, tokens, width) tensor. Strides in elements; the last dimension is contiguous.
struct Rows {
  void* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
};

// Masses of tokens (batch, heads, tokens); data == nullptr means uniform.
struct Masses {
  const float* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
};

// Masks (batch, tokens), non-zero = a real token; data == nullptr means all real.
struct Mask {
  const uint8_t* data = nullptr;
  int64_t batch = 0, token = 0;
};

enum Side { kQuery = 0, kKey = 1 };
enum Solver { kSinkhorn = 0, kNewton = 1 };
enum Balance { kBoth = 0, kKeys = 1, kNone = 2 };  // whose marginals are imposed

// Services of the host, so that code compiled for one instruction set includes nothing that others share.
struct Host {
  void (*parallel)(int64_t count, void (*body)(int64_t begin, int64_t end, void* context), void* context);
  int (*threads)();
  void* (*scratch)(size_t bytes);  // this thread's, 64-byte aligned, valid until `release` takes it back
  size_t (*mark)();
  void (*release)(size_t mark);
};

struct Call {
  Host host;
  int64_t batch, heads, length[2];
  int rank, dim, value_dim;
  bool bf16;
  Rows tokens[2], values;
  const float *pivots, *log_masses;  // (heads, rank, dim) or (batch, heads, rank, dim), and (heads, rank), contiguous
  bool own_pivots;                   // of every sample
  bool scored;                       // there are no pivots: tokens are given by their scores, and dim is the rank
  const float* temperatures;         // (heads,) or nullptr: then `temperature` for every head
  float temperature;
  Masses masses[2];
  Mask masks[2];
  Solver solver;
  Balance balance;
  float least_log_mass;  // lighter pivots count as this light
  int iters;
  double tol;

  Rows out;      // forward only
  float* state;  // (batch, heads, state_size): potentials of every sweep, see state_size
  float* mixed;  // (batch, heads, rank, value_dim): Wᵀ v

  // backward only
  Rows grad_out, grad_tokens[2], grad_values;
  float *grad_pivots, *grad_log_masses, *grad_temperatures;  // shapes of their inputs
  float* grad_masses[2];                                     // (batch, heads, tokens) or nullptr
};

// What is kept per head for backward, and for whoever asks how the solve went. First vectors of `rank` numbers, those of
// the queries before those of the keys. Of a side that is solved:
//   Sinkhorn  after each sweep of the queries; after each half-step to the pivots of the keys (iters + 1: the last closes)
//   Newton    its potential, and what fp32 rounded off it; of the keys also 1 / column sums of their plan at it
// Of queries that are not solved: log m', what they have sent, if the keys are solved for it. Of keys that are not
// solved: the logarithms of their column sums, negative. Then notes. The form of a side: Sinkhorn's vectors are g instead
// of exp(g), up to a factor, or log m' was so small that it took the scores to tell; Newton's exponents s + g are not
// rounded. The residual is `reference.residual`, what the kernel has really reached.
enum Note { kQueryForm = 0, kKeyForm = 1, kKeyOrigin = 2, kResidual = 3, kNotes = 4 };

inline int64_t query_vectors(const Call& c) {
  if (c.balance != kBoth) return c.balance == kKeys ? 1 : 0;
  return c.solver == kSinkhorn ? c.iters : 2;
}

inline int64_t key_vectors(const Call& c) {
  if (c.balance == kNone) return 1;
  return c.solver == kSinkhorn ? c.iters + 1 : 3;
}

inline int64_t state_size(const Call& c) { return (query_vectors(c) + key_vectors(c)) * c.rank + kNotes; }

// What follows is equal in Python, which `constants` in op.cpp lets the tests see.

constexpr int kMaxWidth = 256;  // largest rank and largest head dimension

// The walk of the exact solver, explained in newton.py.
constexpr int kMaxPasses = 120;
constexpr double kStartRange = 4, kPace = 1.8, kSettled = 0.25, kSettledReach = 2, kTooFar = 1;
constexpr double kLargeStep = 10, kBoldness = 0.25;

// Lighter pivots count as this light.
constexpr float least_log_mass(Solver solver) { return solver == kNewton ? -60.f : -1e4f; }

struct Found;      // found_call.h
struct Join;       // joining_call.h
struct KeyMasses;  // mass_call.h
struct Near;       // near_call.h
struct Pool;       // pooling_call.h

struct Kernel {
  const char* name;
  void (*forward)(const Call&);
  void (*backward)(const Call&);
  void (*key_masses)(const KeyMasses&);
  void (*key_masses_backward)(const KeyMasses&);
  void (*near_forward)(const Near&);
  void (*near_backward)(const Near&);
  void (*join)(const Join&);
  void (*join_backward)(const Join&);
  void (*pool)(const Pool&);
  void (*pool_backward)(const Pool&);
  void (*found_forward)(const Found&);
  void (*found_backward)(const Found&);
};

const Kernel& portable_kernel();
#ifdef LOT_X86
const Kernel& avx2_kernel();
const Kernel& avx512_kernel();
#endif

}  // namespace lot
