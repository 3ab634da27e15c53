// The kernel for x86 with AVX2 and FMA; compiled with those flags and called only where they exist.
#define LOT_WIDTH 8
#include "kernel.h"

const lot::Kernel& lot::avx2_kernel() {
  static const Kernel kernel{"avx2", forward, backward, key_masses, key_masses_backward, near_forward, near_backward,
                             join,   join_backward, pool, pool_backward, found_forward, found_backward};
  return kernel;
}
