// Whether emulated kernels give the oracle's gradients, where out and lse are the CPU's.
#pragma once

#include "backward/emulated_backward.hpp"
#include "harness/expect.hpp"

namespace tandem::kernel_tests {

inline testing::AssertionResult gradients_are_right(const EmulatedBackward& kernels, harness::Call& call,
                                                    const EmulatedRun& run = {}) {
  const harness::Expected expected = harness::expect(call, Pass::backward);
  call.prepare(Pass::forward);
  tandem::forward(call.forward_args());
  call.prepare(Pass::backward);
  run_backward(kernels, call, run);
  return harness::correct(call, Pass::backward, expected);
}
inline testing::AssertionResult gradients_are_right(const EmulatedBackward& kernels, const harness::Case& c,
                                                    const EmulatedRun& run = {}) {
  harness::Call call(c);
  return gradients_are_right(kernels, call, run);
}

}  // namespace tandem::kernel_tests
