// What whole calls in the emulator share, forward and backward.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/make_problem.hpp"
#include "config/fields.hpp"
#include "harness/box.hpp"
#include "harness/call.hpp"
#include "launch.hpp"
#include "problem/problem.hpp"

namespace tandem::kernel_tests {

/// The problem of a call, its mask function whole: kernels with functions are to have every mask, also those
/// that are windows to the library.
template <typename Args>
Problem problem_of(Args args) {
  const Function* const mask = std::exchange(args.mask_function, nullptr);
  Problem p = make_problem(args);
  p.mask_function = mask;
  return p;
}

/// Makes the case's sequences of one length each, or, for kernels of the mask `varlen`, of lengths of their
/// own.
void choose_lengths(harness::Case& c, bool varlen, harness::Random& random);

/// Lets kernels at the elements of boxes, as far as there are any, and at what lies between them; not at the
/// guards around.
void add_buffers(emulator::Options& options, const std::vector<harness::Box*>& boxes, bool writable);

/// Copies a tensor that TMA cannot read, by the kernel that does it on a GPU.
void pack_in_emulator(Operand& o, std::vector<std::uint16_t>& target, std::int64_t batch, std::int64_t rows,
                      std::int64_t heads, std::int64_t head_dim, emulator::Options options);

/// Makes e4m3 queries 16-bit ones, as the kernel does it on a GPU, and of their scales and those of k what
/// scores are multiplied by. `options` can then read both.
void widen_in_emulator(Problem& p, std::vector<std::uint16_t>& target, std::vector<float>& scales,
                       emulator::Options& options);

/// Lengths (queries, keys) whose diagonal passes the corners and the middle of a block of keys, one key to
/// either side of them, and the corner of a warpgroup's 64 queries.
inline std::vector<std::pair<std::int64_t, std::int64_t>> diagonals(int block_m, int block_n) {
  std::vector<std::pair<std::int64_t, std::int64_t>> lengths;
  for (const std::int64_t queries : {64, block_m}) {
    for (const int corner : {0, block_n / 2, block_n}) {
      for (const int beside : {-1, 0, 1}) lengths.emplace_back(queries, queries + corner + beside);
    }
    lengths.emplace_back(queries + 1, queries);
  }
  return lengths;
}

/// Names a Config for test output: its shape, and what is not default.
template <typename Config>
std::string describe(const Config& config) {
  std::string text;
  if constexpr (requires { Config::family; }) text = Config::family == Family::sm80 ? "sm80" : "";
  const Config defaults;
  const auto value = [](const auto& field) {
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(field)>>) {
      return std::string(name_of(field));
    } else {
      return fmt::format("{}", field);
    }
  };
  for_each_field(config, defaults, [&](std::string_view name, const auto& field, const auto& otherwise) {
    const bool shape = name.starts_with("head_dim") || name.starts_with("block");
    if (shape || field != otherwise)
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value(field));
  });
  return text;
}

}  // namespace tandem::kernel_tests
