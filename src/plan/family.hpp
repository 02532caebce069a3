// Which family of kernels serves a GPU: those for Hopper, or those in the instructions that all GPUs from
// Ampere on have.
#pragma once

#include <string>

#include "gpu/device.hpp"
#include "kernels/config/types.hpp"
#include "problem/problem.hpp"

namespace tandem {

struct FamilyChoice {
  Family family;
  std::string why;  ///< for explain: "compute capability 8.6 has no WGMMA"
};

/// TANDEM_KERNELS=sm80 takes the others on Hopper too, for comparison. Throws Error (unsupported) for a GPU
/// without kernels, and for a wish that it cannot fulfil.
FamilyChoice choose_family(const gpu::DeviceProperties& device);

/// The same for a problem: gradients of what functions read are the other kernels' where Hopper's divide the
/// work on heads of more than 128 dimensions so that no warpgroup has both S and dP.
FamilyChoice choose_family(const Problem& problem);

/// Shared memory of an SM, of which CTAs have all but the kilobyte that the system takes of each. Of a GPU
/// that is not known, the least that any has.
int shared_bytes_per_sm(const gpu::DeviceProperties& device);

}  // namespace tandem
