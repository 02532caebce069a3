// Contract line 20: results computed in parts are those of one call.
#include <cmath>
#include <cstring>
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Skipped where no runner merges, with its reason.
class Contract20_Merge : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    for (const Runner* runner : runners()) {
      reason = runner->refuses_merge(MergeCase{});
      if (reason.empty()) return;
    }
    GTEST_SKIP() << reason;
  }
};

TEST_F(Contract20_Merge, AnyNumberOfPartsInEveryDtypeAndLayout) {
  for (const DType dtype : float_dtypes) {
    for (const DType out_dtype : float_dtypes) {
      for (const std::int64_t parts : {1, 2, 3, 7, 16, 40}) {
        Random random(static_cast<std::uint64_t>(parts));
        MergeCase c;
        c.seed = static_cast<std::uint64_t>(parts);
        c.dtype = dtype;
        c.out_dtype = out_dtype;
        c.parts = parts;
        c.packed = parts % 2 == 0;
        c.batch = c.packed ? 1 : 2;
        c.rows = 1 + parts % 5;
        c.heads = 1 + parts % 3;
        c.head_dim = random.pick<std::int64_t>({8, 40, 128, 77, 200});
        c.empty = 0.3;
        c.layout = random_layout(random, c.packed ? 3 : 4, false);
        c.out_layout = random_layout(random, c.packed ? 3 : 4, false);
        c.lse_layout = random_layout(random, c.packed ? 2 : 3, false);
        run_everywhere(c);
      }
    }
  }
}

TEST_F(Contract20_Merge, FarLogitsAreSafe) {
  for (const double center : {-1e4, 1e4, -3e38, 88.0, 3e38}) {
    for (const double spread : {0.0, 1.0, 300.0, 1e4}) {
      MergeCase c;
      c.parts = 5;
      c.lse_center = center;
      c.lse_spread = std::abs(center) > 1e30 ? 0.0 : spread;
      c.seed = static_cast<std::uint64_t>(spread) + 3;
      run_everywhere(c);
    }
  }
}

TEST_F(Contract20_Merge, AllEmptyIsZeroAndMinusInfinity) {
  for (const DType dtype : float_dtypes) {
    MergeCase c;
    c.dtype = c.out_dtype = dtype;
    c.parts = 3;
    c.empty = 1.0;
    run_everywhere(c);
    c.parts = 1;
    run_everywhere(c);
    c.rows = 0;
    run_everywhere(c);
  }
}

/// One part, or one that is not empty beside any number of empty ones: its bits, those of -0 and NaN too.
TEST_F(Contract20_Merge, OnePartIsCopiedBitForBit) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t parts : {1, 4}) {
      MergeCase c;
      c.dtype = c.out_dtype = dtype;
      c.parts = parts;
      c.head_dim = 72;
      MergeCall call(c);
      const auto only = static_cast<std::size_t>(parts / 2);
      for (std::size_t i = 0; i < call.lses.size(); ++i) {
        for (std::int64_t n = 0; i != only && n < call.lses[i].numel(); ++n) call.lses[i].set(n, -infinity);
      }
      for (std::int64_t n = 0; n < call.outs[only].numel(); n += 5) {
        call.outs[only].set(n, n % 2 == 0 ? -0.0 : std::nan(""));
      }
      on_every_runner(c, [&](Runner& runner) {
        call.prepare();
        runner.merge(call);
        EXPECT_TRUE(same_bits(call.out.raw(), call.outs[only].raw()));
        EXPECT_TRUE(same_bits(call.lse.raw(), call.lses[only].raw()));
      });
    }
  }
}

/// An lse of NaN or +inf makes its row NaN, and a NaN in a part that counts its element; no other.
TEST_F(Contract20_Merge, NaNStaysInItsRow) {
  MergeCase c;
  c.parts = 4;
  c.rows = 7;
  c.heads = 3;
  MergeCall call(c);
  call.lses[1].set(2, std::nan(""));
  call.lses[3].set(9, infinity);
  call.lses[0].set(9, infinity);
  call.outs[2].set(70, std::nan(""));
  call.outs[2].set(400, infinity);
  run_everywhere(call);
}

TEST_F(Contract20_Merge, WithoutAnLse) {
  MergeCase c;
  c.lse = false;
  c.dtype = DType::f32;
  c.out_dtype = DType::bf16;
  run_everywhere(c);
}

/// Attention over 1 to 16 pieces of the keys, merged, against the oracle of one call.
TEST_F(Contract20_Merge, KeysInPartsGiveOneCall) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    c.seqlen_q = 9;
    c.seqlen_k = 330;
    Call call(c);
    const Expected expected = expect(call, Pass::forward);
    for (const std::int64_t parts : {1, 2, 3, 5, 8, 16}) {
      MergeCase m;
      m.dtype = m.out_dtype = dtype;
      m.parts = parts;
      m.batch = c.batch;
      m.rows = c.seqlen_q;
      m.heads = c.heads_q;
      m.head_dim = c.head_dim_v;
      MergeCall merge(m);
      for (std::int64_t i = 0; i < parts; ++i) {
        const auto edge = [&](std::int64_t n) {  // the third of many pieces is empty
          if (n == parts) return c.seqlen_k;
          return (parts > 4 && n == 3 ? 2 : n) * (c.seqlen_k / parts);
        };
        ForwardArgs args = call.forward_args();
        for (ConstTensor* t : {&args.k, &args.v}) {
          t->data = static_cast<const std::byte*>(t->data) +
                    edge(i) * t->stride[1] * static_cast<std::int64_t>(size_of(dtype));
          t->shape[1] = edge(i + 1) - edge(i);
        }
        args.out = merge.outs[static_cast<std::size_t>(i)].view();
        args.lse = merge.lses[static_cast<std::size_t>(i)].view();
        forward(args);
      }
      on_every_runner(m, [&](Runner& runner) {
        merge.prepare();
        runner.merge(merge);
        EXPECT_TRUE(matches("out", merge.out, expected.out)) << parts << " parts";
        EXPECT_TRUE(matches("lse", merge.lse, expected.lse)) << parts << " parts";
      });
    }
  }
}

}  // namespace
}  // namespace tandem::harness
