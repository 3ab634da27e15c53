// One call of the operator that joins what a layer hands on, as plain data.
#pragma once
#include "call.h"

namespace lot {

// out = [rows | coupled + convolution of the values after the prefix], every channel with a filter of its own. Tokens
// after the prefix lie on a grid, row by row; a sequence is a grid of one row.
struct Join {
  Host host;
  int64_t batch, heads, prefix, grid[2];
  int dim, kernel[2];       // kernel: odd heights and widths
  const float* filters;     // (heads · dim or dim, taps), contiguous
  bool shared;              // by all heads
  Rows values;              // of all tokens, those of the prefix included
  Mask masks[2];            // of all tokens
  Rows rows, coupled, out;  // forward: rows of the prefix; coupled.data may be nullptr
  Rows grad, grad_values;   // backward
  float* grad_filters;

  int64_t tokens() const { return grid[0] * grid[1]; }
  int taps() const { return kernel[0] * kernel[1]; }
};

}  // namespace lot
