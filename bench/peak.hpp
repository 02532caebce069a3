// The arithmetic peak of this machine, measured: what a kernel's speed is a share of.
#pragma once

#include <string>

namespace tandem::bench {

/// GFLOP/s of `threads` threads together, a multiply and an add counting two.
struct Peak {
  int threads = 0;
  double f32_gflops = 0.0;       ///< fused multiply-add in f32
  double bf16_gflops = 0.0;      ///< bf16 dot product accumulating in f32; 0 where the processor has none
  std::string f32_instructions;  ///< "avx512f", "avx2+fma" or "portable"
};

/// Runs independent chains of multiply-adds out of registers on every thread at once, in runs so short that a
/// neighbour on the machine disturbs few of them, and adds up each thread's best by the wall clock. `threads`
/// below 1 means one. Takes about `seconds` for each of the two numbers.
Peak measure_peak(int threads, double seconds = 0.2);

}  // namespace tandem::bench
