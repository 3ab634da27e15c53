// One call of the operator of near keys as plain data, see near.h.
#pragma once
#include "call.h"

namespace lot {

struct Near {
  Host host;
  int64_t batch, heads;
  int64_t length, prefix;  // tokens that are queries, and keys in front of them that every query reads
  int64_t columns;         // the tokens after the prefix are a grid of so many columns, of which the last row may be short
  int64_t reach_rows, reach_columns;  // how far a query sees on it, each way
  int dim, value_dim;
  bool bf16;
  float scale;
  Rows q, k, v;             // k and v with the prefix in front
  const float* direction;   // (batch, heads, dim), contiguous, as all that is not rows
  const float* offset;      // (batch, heads)
  Mask query_mask, key_mask;  // of q, and of k and v

  Rows out;
  float *total, *share;  // (batch, heads, length): the log-sum of a query's scores, −1e30 without a key, and λ

  // backward only
  Rows grad_out, grad_q, grad_k, grad_v;
  const float* grad_share;              // (batch, heads, length)
  float *grad_direction, *grad_offset;  // shapes of their inputs
  float* slope;                         // (batch, heads, length), scratch
};

}  // namespace lot
