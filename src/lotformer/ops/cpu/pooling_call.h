// One call of the operator that makes polarised rows of a prefix, as plain data.
#pragma once
#include "call.h"

namespace lot {

// rows = plan · v with plan = softmax_j(like_j^p + opposite_j^o) over real keys, where like_j and opposite_j are β times
// the sums of the positive and of the negative parts of q_d k_jd, at least kLeastScore.
struct Pool {
  Host host;
  int64_t batch, heads, rows, length;
  int dim, value_dim;
  float beta, powers[2];  // of like and opposite signs
  Rows queries, keys, values;
  Mask mask;
  Rows out;
  float* plan;                            // (batch, heads, rows, length)
  Rows grad, grad_keys, grad_values;      // backward
  float* grad_queries;                    // (batch, heads, rows, dim)
};

constexpr float kLeastScore = 1e-6f;  // a power below one has no slope at zero; equal in `PrefixRows`

}  // namespace lot
