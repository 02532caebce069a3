// Which kernels of a long list a test compiles: it has them in groups, each a process of its own in ctest, so
// that they compile side by side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string_view>

namespace tandem::gpu {

constexpr std::size_t kernels_in_group = 4;

constexpr std::size_t groups_of(std::size_t kernels) {
  return (kernels + kernels_in_group - 1) / kernels_in_group;
}

/// Those of a group that are compiled, from `begin` on.
struct KernelSample {
  std::size_t begin;
  std::size_t end;
};

/// One of each group, a quarter of the list, since the shipped set takes twelve minutes; from group to
/// group another of the four, since elements and masks repeat in the lists. With TANDEM_ALL_KERNELS=1 all.
inline KernelSample sample_of(std::size_t group, std::size_t kernels) {
  const std::size_t begin = group * kernels_in_group;
  const std::size_t end = std::min(kernels, begin + kernels_in_group);
  const char* const wish = std::getenv("TANDEM_ALL_KERNELS");
  if (wish != nullptr && std::string_view(wish) == "1") return {begin, end};
  const std::size_t one = begin + group % (end - begin);
  return {one, one + 1};
}

}  // namespace tandem::gpu
