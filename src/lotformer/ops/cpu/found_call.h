// One call of the operator of found groups as plain data, see found.h.
#pragma once
#include "call.h"

namespace lot {

constexpr int kMostHeaviest = 8;  // groups of a query that are read exactly

struct Found {
  Host host;
  int64_t batch, heads, queries;
  int64_t prefix, keys;     // special keys that every query reads, and keys behind them, which are in groups
  int64_t columns;          // with a window, queries and keys are a grid of so many columns; 0 without
  int64_t reach_rows, reach_columns;  // how far a query sees on it, each way
  int rank, steps, dim, value_dim;
  int heaviest;             // groups of a query whose keys it reads exactly: the first `most` of each
  int64_t most;
  bool bf16;
  float scale;
  Rows q, k, v;             // k and v with the prefix in front
  const float *gain, *shift, *offset;  // (heads), (heads, dim), (heads), or nullptr: 1, 0, 0
  Mask query_mask, key_mask;  // of q, and of k and v
  const int64_t* given;     // (batch, heads, keys): groups, if they are known

  Rows out;
  float *share, *total;  // (batch, heads, queries): the exact part of a row, and the logarithm of its sum
  int64_t* groups;       // (batch, heads, keys): `rank` for padding

  // backward only, with total and given
  Rows grad_out, grad_q, grad_k, grad_v;
  float *grad_gain, *grad_shift, *grad_offset;  // (batch, heads), (batch, heads, dim), (batch, heads)
};

}  // namespace lot
