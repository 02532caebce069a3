// Execution::interrupted ends a call before it is done.
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "harness/changes.hpp"
#include "harness/error_of.hpp"
#include "harness/runner.hpp"
#include "tandem/error.hpp"
#include "tandem/quantize.hpp"

namespace tandem::cpu {
namespace {

using harness::Call;
using harness::Case;

struct Asked {
  int times = 0;
  int until = 0;  ///< the question that is answered with yes; 0: none
};

bool answer(void* context) {
  auto& asked = *static_cast<Asked*>(context);
  return ++asked.times == asked.until;
}

template <typename Args>
void run(const Args& args, int threads, Asked& asked) {
  const Execution execution{.threads = threads, .interrupted = answer, .interrupted_context = &asked};
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    forward(args, execution);
  } else if constexpr (std::is_same_v<Args, QuantizeArgs>) {
    quantize(args, execution);
  } else {
    backward(args, execution);
  }
}

/// A long call ends with the first yes, the answer to question `until`, whatever its threads wait for. It is
/// asked every 50 ms: the call must take longer than that, `until` times.
template <typename Args>
void expect_early_end(const Args& args, std::initializer_list<int> numbers_of_threads = {1, 2, 5},
                      int until = 2) {
  for (const int threads : numbers_of_threads) {
    Asked asked{.until = until};
    EXPECT_NE(error_of(Status::interrupted, [&] { run(args, threads, asked); }), "")
        << "ran to its end with " << threads << " threads";
    EXPECT_EQ(asked.times, until) << "of which the last was answered with yes";
  }
}

Case long_case(DType dtype) {
  return harness::with({}, {.dtype = dtype, .head_dim = 256, .seqlen = 12000});
}

TEST(Stop, AForwardCallEndsWhereItIsInterrupted) {
  for (const Precision precision : {Precision::exact, Precision::int8}) {
    Case c = long_case(precision == Precision::exact ? DType::f32 : DType::bf16);
    c.options.precision = precision;
    if (precision != Precision::exact) c = with(c, {.seqlen = 36000});  // a matrix unit is fast
    const Call call(c);
    expect_early_end(call.forward_args());
  }
}

TEST(Stop, ABackwardCallEndsWhereItIsInterrupted) {
  const Call call(long_case(DType::f32));
  expect_early_end(call.backward_args());
}

/// One tile of queries and many keys is one piece of work, which ends in its midst if it is the caller's own
/// thread's.
TEST(Stop, ATileOfManyKeysEndsWhereItIsInterrupted) {
  Case c = with(long_case(DType::f32), {.head_dim = 64, .seqlen_q = 60, .seqlen_k = 1200000});
  c.options.softcap = 30.0F;  // which takes longer
  const Call call(c);
  expect_early_end(call.forward_args(), {1}, 1);
  expect_early_end(call.backward_args(), {1}, 1);
}

/// No exception leaves a parallel region, which would end the process.
TEST(Stop, AQuestionThatThrowsEndsTheCallWithWhatItThrew) {
  const Call call(long_case(DType::f32));
  const auto interrupted = [](void*) -> bool { throw std::runtime_error("asked"); };
  for (const int threads : {1, 3}) {
    const Execution execution{.threads = threads, .interrupted = interrupted};
    EXPECT_THROW(forward(call.forward_args(), execution), std::runtime_error);
  }
}

/// Two heads of rows that are one row: several passes over 200 million elements each.
TEST(Stop, QuantizeEndsWhereItIsInterrupted) {
  constexpr std::int64_t rows = 800000;
  const std::vector<float> row(std::size_t{2} * 256, 1.0F);
  std::vector<std::uint8_t> codes(row.size() * rows);
  std::vector<float> mean(row.size());
  float scale = 0.0F;
  QuantizeArgs args;
  args.x = {row.data(), DType::f32, {1, rows, 2, 256}};
  args.x.stride[1] = 0;
  args.codes = {codes.data(), DType::s8, {1, rows, 2, 256}};
  args.scales = {&scale, DType::f32, {1}};
  args.mean = {mean.data(), DType::f32, {1, 2, 256}};
  args.granularity = Granularity::tensor;
  args.hadamard = true;
  expect_early_end(args, {1, 2, 5}, 1);
  args.granularity = Granularity::row;
  std::vector<float> scales(std::size_t{2} * rows);
  args.scales = {scales.data(), DType::f32, {1, 2, rows}};
  expect_early_end(args, {1, 2, 5}, 1);
}

TEST(Stop, ACallThatIsNotInterruptedHasItsBits) {
  Call call(harness::with({}, {.seqlen = 900}));
  call.prepare(Pass::forward);
  forward(call.forward_args(), Execution{.threads = 2});
  const auto expected = call.out.raw();
  call.prepare(Pass::forward);
  Asked asked;
  run(call.forward_args(), 2, asked);
  EXPECT_TRUE(call.out.raw() == expected);
}

}  // namespace
}  // namespace tandem::cpu
