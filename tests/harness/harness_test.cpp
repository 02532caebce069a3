// The harness itself: its number formats, its guards, and that a wrong result does not pass.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "changes.hpp"
#include "harness/element.hpp"
#include "harness/expect.hpp"
#include "harness/rounding.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

std::int64_t packed_index(const Call& call, std::int64_t batch, std::int64_t row) {
  return (call.spec.packed_q ? 0 : batch) * call.spec.rows_q() + row;
}

/// Writes the oracle's own results: what a perfect backend would do.
void write_exact(Call& call, Pass pass) {
  const Expected e = expect(call, pass);
  const auto write = [](Box& box, const Target& target) {
    for (std::int64_t n = 0; n < box.numel(); ++n) box.set(n, target.values[static_cast<std::size_t>(n)]);
  };
  if (pass == Pass::forward) {
    write(call.out, e.out);
    write(call.lse, e.lse);
  } else {
    write(call.dq, e.dq);
    write(call.dk, e.dk);
    write(call.dv, e.dv);
    write(call.dsink, e.dsink);
    write(call.dgate, e.dgate);
  }
}

TEST(Element, EveryCodeRoundTrips) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::e4m3}) {
    const std::uint32_t patterns = dtype == DType::e4m3 ? 256 : 65536;
    for (std::uint32_t code = 0; code < patterns; ++code) {
      const double value = decode(dtype, &code, 0);
      if (std::isnan(value)) continue;
      std::uint32_t back = 0;
      encode(dtype, &back, 0, value);
      ASSERT_EQ(back, code) << name_of(dtype) << " " << value;
    }
  }
}

TEST(Element, RoundsHalfwayToEven) {
  EXPECT_EQ(rounded(DType::bf16, 1.0 + 0x1p-8), 1.0);
  EXPECT_EQ(rounded(DType::bf16, 1.0 + 3 * 0x1p-8), 1.0 + 4 * 0x1p-8);
  EXPECT_EQ(rounded(DType::f16, 1.0 + 0x1p-11), 1.0);
  EXPECT_EQ(rounded(DType::f16, 65519.0), 65504.0);
  EXPECT_EQ(rounded(DType::f16, 65520.0), INFINITY);
  EXPECT_EQ(rounded(DType::f16, 0x1p-25), 0.0);
  EXPECT_EQ(rounded(DType::f16, 3 * 0x1p-25), 0x1p-23);
  EXPECT_EQ(rounded(DType::e4m3, 1.0625), 1.0);
  EXPECT_EQ(rounded(DType::e4m3, 1.1875), 1.25);
  EXPECT_EQ(rounded(DType::e4m3, -1000.0), -448.0);
  EXPECT_EQ(rounded(DType::e4m3, 0x1p-9), 0x1p-9);
}

TEST(Element, FastRoundingIsTheSame) {
  Random random(7);
  for (int n = 0; n < 200000; ++n) {
    const auto value =
        static_cast<float>(std::ldexp(random.normal(), static_cast<int>(random.between(-30, 17))));
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      ASSERT_EQ(static_cast<double>(round_fast(dtype, value)), rounded(dtype, static_cast<double>(value)))
          << value;
    }
  }
}

TEST(Box, LayoutsHoldTheirElements) {
  Random random(3);
  for (int n = 0; n < 200; ++n) {
    const Layout layout = random_layout(random, 4, false);
    Box box(DType::bf16, {random.between(1, 3), random.between(1, 5), random.between(1, 4), 8}, layout, true);
    for (std::int64_t i = 0; i < box.numel(); ++i) box.set(i, static_cast<double>(i % 256));
    for (std::int64_t i = 0; i < box.numel(); ++i) ASSERT_EQ(box.get(i), static_cast<double>(i % 256));
    ASSERT_EQ(box.changed_outside(), "");
  }
}

TEST(Box, StrayWritesAreNoticed) {
  Layout layout;
  layout.pad = 3;
  Box box(DType::f32, {2, 3, 2, 8}, layout, true);
  auto* data = static_cast<float*>(box.view().data);
  for (const std::ptrdiff_t stray :
       {std::ptrdiff_t{-1}, std::ptrdiff_t{8}, 2 * 3 * 2 * 11 + std::ptrdiff_t{0}}) {
    const float before = data[stray];
    data[stray] = 1.0F;
    EXPECT_NE(box.changed_outside(), "") << stray;
    data[stray] = before;
    EXPECT_EQ(box.changed_outside(), "");
  }
}

TEST(BoxDeathTest, TheGuardPageFaults) {
  Layout layout;
  layout.ends_at_guard = true;
  const Box box(DType::f32, {2, 8}, layout, false);
  EXPECT_DEATH(static_cast<volatile float*>(box.view().data)[16] = 1.0F, "");
}

TEST(Expect, ExactResultsPass) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    Call call(random_case(seed, 40));
    SCOPED_TRACE(call.spec.describe());
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (pass == Pass::backward && call.spec.dtype == DType::e4m3) continue;
      const Expected e = expect(call, pass);
      call.prepare(pass);
      write_exact(call, pass);
      EXPECT_TRUE(correct(call, pass, e));
    }
  }
}

TEST(Expect, UnwrittenAndWrongElementsFail) {
  Call call(with({}, {.dtype = DType::bf16, .out_dtype = DType::bf16}));
  const Expected e = expect(call, Pass::forward);
  call.prepare(Pass::forward);
  EXPECT_FALSE(correct(call, Pass::forward, e));  // nothing written
  write_exact(call, Pass::forward);
  EXPECT_TRUE(correct(call, Pass::forward, e));

  const double value = call.out.get(17);
  call.out.set(17, value + 3.0 * e.out.bound.absolute + 0.01);
  EXPECT_FALSE(correct(call, Pass::forward, e));
  call.out.set(17, NAN);
  EXPECT_FALSE(correct(call, Pass::forward, e));
  call.out.set(17, value);
  call.lse.set(3, -INFINITY);
  EXPECT_FALSE(correct(call, Pass::forward, e));
}

/// Where no key is seen LSE is -infinity, and nothing else.
TEST(Expect, OnlyInfinityIsInfinity) {
  Call call(with({}, {.dtype = DType::bf16, .out_dtype = DType::bf16, .seqlen_k = 0}));
  const Expected e = expect(call, Pass::forward);
  ASSERT_EQ(e.lse.values[3], -INFINITY);
  call.prepare(Pass::forward);
  EXPECT_FALSE(correct(call, Pass::forward, e));
  write_exact(call, Pass::forward);
  EXPECT_TRUE(correct(call, Pass::forward, e));
  for (const double wrong : {0.0, -1e30, static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
    call.lse.set(3, wrong);
    EXPECT_FALSE(correct(call, Pass::forward, e)) << wrong;
  }
}

TEST(Expect, ChangedInputsFail) {
  Call call(Case{});
  const Expected e = expect(call, Pass::forward);
  call.prepare(Pass::forward);
  write_exact(call, Pass::forward);
  call.k.set(0, 1234.0);
  EXPECT_FALSE(correct(call, Pass::forward, e));
}

TEST(Expect, SixteenBitBoundIsTight) {
  // The yardstick of the accuracy rule has to be about the dtype's precision, or the bound would allow
  // anything.
  for (const auto& [dtype, limit] : {std::pair{DType::bf16, 0.02}, std::pair{DType::f16, 0.0025}}) {
    const Call call(with({}, {.dtype = dtype, .seqlen = 256}));
    const Expected e = expect(call, Pass::forward);
    EXPECT_LT(e.out.bound.absolute, limit);
    EXPECT_GT(e.out.bound.absolute, 4e-5);
  }
}

/// What the largest error of an element allows, the RMS does not: out of many keys is small beside its
/// largest elements' roundings.
TEST(Expect, ResultsThatAreOffAsAWholeFail) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Call call(with({}, {.dtype = dtype, .seqlen = 300}));
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Expected e = expect(call, pass);
      call.prepare(pass);
      write_exact(call, pass);
      ASSERT_TRUE(correct(call, pass, e));
      const auto off = [](const char* name, Box& box, const Target& target, double by, bool alternating) {
        for (std::int64_t n = 0; n < box.numel(); ++n) {
          const double sign = alternating && n % 2 != 0 ? -1.0 : 1.0;
          box.set(n, target.values[static_cast<std::size_t>(n)] * (1.0 + sign * by));
        }
        return !matches(name, box, target);
      };
      using Output = std::tuple<const char*, Box*, const Target*>;
      const std::vector<Output> outputs =
          pass == Pass::forward
              ? std::vector<Output>{{"out", &call.out, &e.out}}
              : std::vector<Output>{
                    {"dq", &call.dq, &e.dq}, {"dk", &call.dk, &e.dk}, {"dv", &call.dv, &e.dv}};
      for (const auto& [name, box, target] : outputs) {
        for (const double by : {0.01, -0.01}) {
          EXPECT_TRUE(off(name, *box, *target, by, false)) << name << " times 1 + " << by;
          EXPECT_TRUE(off(name, *box, *target, by, true)) << name << ", elements in turn up and down";
        }
        EXPECT_FALSE(off(name, *box, *target, 0.0, false)) << name;
      }
    }
  }
}

/// A gradient that nearly cancels is mostly error: its RMS may be what fused attention's is, and its gain
/// anything that such errors make of it.
TEST(Expect, WhatIsLeftOfCancelledTermsHasNoGain) {
  Call call(with({}, {.dtype = DType::bf16, .out_dtype = DType::bf16, .seqlen = 100}));
  for (std::int64_t n = 0; n < call.v.numel(); ++n) call.v.set(n, 1.0 + 1e-3 * call.v.get(n));
  run_everywhere(call);
  const Expected e = expect(call, Pass::backward);
  const Deviation zero = compare(e.dq, [](std::int64_t) { return 0.0; });
  EXPECT_TRUE(zero.has_whole_bounds());
  EXPECT_GT(zero.gain_bound, 0.01);
}

TEST(Case, RowVisitorsCoverEveryRowOnce) {
  for (std::uint64_t seed = 100; seed < 130; ++seed) {
    const Call call(random_case(seed, 40));
    std::vector<int> visits(
        static_cast<std::size_t>((call.spec.packed_q ? 1 : call.spec.batch) * call.spec.rows_q()));
    for_each_query_row(call.spec, [&](std::int64_t b, std::int64_t row, bool) {
      ++visits[static_cast<std::size_t>(packed_index(call, b, row))];
    });
    for (const int n : visits) EXPECT_EQ(n, 1);
  }
}

}  // namespace
}  // namespace tandem::harness
