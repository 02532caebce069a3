// The log: silent until asked, one line a call at debug, to the sink that was given last.
#include "tandem/log.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "problem/log.hpp"
#include "tandem/attention.hpp"
#include "tandem/quantize.hpp"

namespace tandem::test {
namespace {

using Lines = std::vector<std::pair<LogLevel, std::string>>;

Lines& lines() {
  static Lines written;
  return written;
}

void write(LogLevel level, const char* message) {
  lines().emplace_back(level, message);
}

void call() {
  std::array<float, 2 * 4 * 8> q{};
  std::array<float, 2 * 4 * 8> out{};
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(q.data(), DType::f32, {1, 4, 2, 8});
  args.out = Tensor(out.data(), DType::f32, {1, 4, 2, 8});
  args.options.causal = true;
  forward(args, {.threads = 1});
}

TEST(Log, SaysNothingUntilAskedAndACallALineThen) {
  call();
  EXPECT_TRUE(lines().empty());
  set_log(LogLevel::info, &write);
  call();
  EXPECT_TRUE(lines().empty());
  set_log(LogLevel::debug, &write);
  call();
  EXPECT_EQ(lines(), (Lines{{LogLevel::debug, "forward f32 b1 q4 k4 h2/2 d8/8 causal"}}));
  log(LogLevel::info, "{} of {}", 1, 2);
  EXPECT_EQ(lines().back(), std::pair(LogLevel::info, std::string("1 of 2")));
  lines().clear();
  set_log(LogLevel::debug, nullptr);
  call();
  EXPECT_TRUE(lines().empty());
}

TEST(Log, HasALineForQuantize) {
  std::array<float, 4 * 2 * 8> x{};
  std::array<std::uint8_t, 4 * 2 * 8> codes{};
  std::array<float, 2> scales{};
  std::array<float, 2 * 8> mean{};
  lines().clear();
  set_log(LogLevel::debug, &write);
  quantize({.x = ConstTensor(x.data(), DType::f32, {1, 4, 2, 8}),
            .codes = Tensor(codes.data(), DType::s8, {1, 4, 2, 8}),
            .scales = Tensor(scales.data(), DType::f32, {1, 2, 1}),
            .mean = Tensor(mean.data(), DType::f32, {1, 2, 8}),
            .granularity = Granularity::block,
            .hadamard = true},
           {.threads = 1});
  set_log(LogLevel::debug, nullptr);
  EXPECT_EQ(lines(), (Lines{{LogLevel::debug, "quantize f32 to s8 b1 n4 h2 d8 block hadamard mean"}}));
}

}  // namespace
}  // namespace tandem::test
