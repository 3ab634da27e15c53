// One call of the operator of learned masses of keys as plain data, see masses.h.
#pragma once
#include "call.h"

namespace lot {

struct KeyMasses {
  Host host;
  int64_t batch, heads, length[2];
  int dim;
  Rows tokens[2];  // fp32
  Mask masks[2];
  const float *direction, *query_weight;  // (heads, dim), and (heads,) or nullptr: then there are no queries
  float* masses;                          // (batch, heads, keys)
  float* mean_query;                      // (batch, heads, dim)

  // backward only
  const float* grad_masses;
  Rows grad_tokens[2];
  float *grad_direction, *grad_query_weight;  // of every sample
};

}  // namespace lot
