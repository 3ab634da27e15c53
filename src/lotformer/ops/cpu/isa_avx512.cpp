// The kernel for x86 with AVX-512; compiled with those flags and called only where they exist.
#define LOT_WIDTH 16
#include "kernel.h"

const lot::Kernel& lot::avx512_kernel() {
  static const Kernel kernel{"avx512", forward, backward, key_masses, key_masses_backward, near_forward, near_backward,
                             join,   join_backward, pool, pool_backward, found_forward, found_backward};
  return kernel;
}
