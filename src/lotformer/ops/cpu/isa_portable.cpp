// The kernel for any machine: four lanes, which SSE2 and NEON have by default.
#define LOT_WIDTH 4
#include "kernel.h"

const lot::Kernel& lot::portable_kernel() {
  static const Kernel kernel{"portable", forward, backward, key_masses, key_masses_backward, near_forward, near_backward,
                             join,   join_backward, pool, pool_backward, found_forward, found_backward};
  return kernel;
}
