// Which kernels of a long list a test compiles: it has them in groups, each a process of its own in ctest, so
// that they compile side by side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string_view>

namespace tandem::gpu {

constexpr std::size_t kernels_in_group = 8;

constexpr std::size_t groups_of(std::size_t kernels) {
  return (kernels + kernels_in_group - 1) / kernels_in_group;
}

/// Those of a group that are compiled, from `begin` on.
struct KernelSample {
  std::size_t begin;
  std::size_t end;
};

/// Whether every kernel of the lists is to be compiled, as before a release and after a change of kernels.
inline bool wants_all_kernels() {
  const char* const wish = std::getenv("TANDEM_ALL_KERNELS");
  return wish != nullptr && std::string_view(wish) == "1";
}

/// Whether a test compiles the one of number `i` in a list of which it has one in `n`.
inline bool is_in_sample(std::size_t i, std::size_t n) {
  return i % n == 0 || wants_all_kernels();
}

/// One of each group, an eighth of the list, since the shipped set takes twenty minutes of processor time;
/// from group to group another of the eight, since elements and masks repeat in the lists.
inline KernelSample sample_of(std::size_t group, std::size_t kernels) {
  const std::size_t begin = group * kernels_in_group;
  const std::size_t end = std::min(kernels, begin + kernels_in_group);
  if (wants_all_kernels()) return {begin, end};
  const std::size_t one = begin + group % (end - begin);
  return {one, one + 1};
}

}  // namespace tandem::gpu
