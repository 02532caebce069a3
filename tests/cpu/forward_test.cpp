// The CPU forward pass of every instruction set that this processor runs, against the oracle, and what
// blocking, stacking and threading must not change.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "cpu/reference/reference.hpp"
#include "cpu/targets/kernels.hpp"
#include "harness/changes.hpp"
#include "harness/expect.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

void forward_everywhere(Call& call) {
  run_everywhere(call, false);
}
void forward_everywhere(const Case& spec) {
  Call call(spec);
  forward_everywhere(call);
}

void expect_bits_of_one_thread(Call& call, std::initializer_list<int> numbers_of_threads) {
  on_every_runner(call.spec, [&](Runner& runner) {
    std::vector<std::byte> first;
    for (const int threads : numbers_of_threads) {
      call.spec.threads = threads;
      call.prepare(Pass::forward);
      runner.forward(call);
      if (threads == 1) first = call.out.raw();
      EXPECT_EQ(call.out.raw(), first) << threads << " threads";
    }
  });
}

TEST(Forward, TileEdges) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t seqlen_q : {1, 2, 7, 8, 9, 16, 17, 47, 63, 64, 65, 129}) {
      for (const std::int64_t seqlen_k : {1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 257}) {
        for (const bool causal : {false, true}) {
          Case c = with({}, {.dtype = dtype, .head_dim_qk = 16, .head_dim_v = 24, .seqlen_q = seqlen_q});
          change(c, {.seqlen_k = seqlen_k, .causal = causal});
          forward_everywhere(c);
        }
      }
    }
  }
}

TEST(Forward, EveryHeadDimension) {
  for (std::int64_t head_dim = 1; head_dim <= 40; ++head_dim) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
      Case c = with({}, {.dtype = dtype, .head_dim_qk = head_dim, .head_dim_v = 41 - head_dim});
      change(c, {.seqlen_q = 37, .seqlen_k = 70});
      forward_everywhere(c);
    }
  }
}

/// Head dimensions below a register, of which the short kernel packs whole ones.
TEST(Forward, ShortQueriesOfTinyHeads) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    for (const std::int64_t head_dim : {1, 2, 3}) {
      for (const auto& [heads_q, heads_kv, seqlen_q] : {std::tuple{8, 1, 1}, {16, 8, 4}}) {
        Case c = with({}, {.dtype = dtype, .heads_q = heads_q, .heads_kv = heads_kv});
        change(c, {.head_dim_qk = head_dim, .head_dim_v = 1, .seqlen_q = seqlen_q, .seqlen_k = 100});
        forward_everywhere(c);
      }
    }
  }
}

/// Maxima that keep rising by more and by less than the threshold below which rows are not rescaled.
TEST(Forward, RisingMaxima) {
  for (const double step : {0.01, 0.06, 1.0}) {
    Call call(with({}, {.head_dim = 8, .seqlen_q = 20, .seqlen_k = 1000, .scale = 1.0F}));
    for (std::int64_t i = 0; i < call.q.numel(); ++i)
      call.q.set(i, i % 8 == 0 ? (i % 16 == 0 ? 1.0 : -1.0) : 0.0);
    for (std::int64_t i = 0; i < call.k.numel(); ++i) {
      call.k.set(i, i % 8 == 0 ? std::round(step * static_cast<double>(i / 8) * 64) / 64 : 0.5);
    }
    forward_everywhere(call);
  }
}

/// Maxima that cross 2^20 in units of log2, where exponents take another form, upwards and downwards in
/// magnitude, beside rows that stay below.
TEST(Forward, MaximaThatCrossIntoTheFarForm) {
  for (const auto& levels : {std::array{726810.0, 726816.0, 726823.0}, {-726823.0, -726816.0, -726810.0}}) {
    Case c = with({}, {.head_dim = 8, .seqlen_q = 20, .seqlen_k = 384, .scale = 1.0F});
    Call call(c);
    for (std::int64_t i = 0; i < call.q.numel(); ++i) {
      call.q.set(i, i % 8 == 0 ? (i % 16 == 0 ? 1.0 : 0x1p-10) : i % 8 == 1 ? 1.0 : 0.0);
    }
    for (std::int64_t i = 0; i < call.k.numel(); ++i) {
      const std::int64_t key = i / 8;
      const double level = levels[static_cast<std::size_t>(key / 128)];
      call.k.set(i, i % 8 == 0 ? level : i % 8 == 1 ? static_cast<double>(key % 16) / 16.0 : 0.0);
    }
    const reference::Forward exact = reference::forward(call.problem());
    forward_everywhere(call);
    on_every_runner(c, [&](Runner& runner) {
      call.prepare(Pass::forward);
      runner.forward(call);
      for (std::int64_t row = 0; row < c.seqlen_q; ++row) {
        const double lse = exact.lse[static_cast<std::size_t>(row)];
        EXPECT_NEAR(call.lse.get(row), lse, std::abs(lse) * 0x1p-23) << "row " << row;
      }
    });
  }
}

/// A row's one visible key gives it the LSE that its logit is in f32, rounded once, from every kernel: what
/// the backward pass subtracts from that logit. At 7e7 f32 steps by 8.
TEST(Forward, TheOnlyKeyOfARowLeavesItsLogitAsLse) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [batch, rows] : {std::pair{60, 1}, {10, 8}, {3, 40}}) {
      for (const float scale : {0.17677669F, -1.0F, 3.3F}) {
        Case c = with({}, {.dtype = dtype, .batch = batch, .seqlen = rows, .scale = scale, .window = 0});
        Call call(c);
        // One product a dot product: whatever the order of its additions, the sum is the same.
        for (Box* box : {&call.q, &call.k}) {
          const double size = box == &call.q ? 1.0 : 7e7 / static_cast<double>(scale);
          for (std::int64_t n = 0; n < box->numel(); ++n) {
            box->set(n, n % c.head_dim_qk == 0 ? size * (1.0 + std::abs(box->get(n)) / 8.0) : 0.0);
          }
        }
        on_every_runner(c, [&](Runner& runner) {
          call.prepare(Pass::forward);
          runner.forward(call);
          for (std::int64_t row = 0; row < batch * rows; ++row) {
            const std::int64_t n = row * c.head_dim_qk;
            const auto product = static_cast<float>(call.q.get(n) * call.k.get(n));
            ASSERT_EQ(call.lse.get(row), static_cast<double>(product * scale)) << "row " << row;
          }
        });
      }
    }
  }
}

/// The largest softcap that is taken caps nothing.
TEST(Forward, ASoftcapOf1e30ChangesNothing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t seqlen_q : {1, 70}) {
      run_everywhere(with({}, {.dtype = dtype, .seqlen_q = seqlen_q, .seqlen_k = 200, .softcap = 1e30F}));
    }
  }
}

TEST(Forward, ThreadsDoNotChangeABit) {
  for (std::uint64_t seed = 100; seed < 106; ++seed) {
    Case c = random_case(seed, 300);
    Call call(c);
    expect_bits_of_one_thread(call, {1, 2, 5});
  }
}

/// Short queries against many keys: split over threads or not, the same bits, and right.
TEST(Forward, ShortQueriesAgainstManyKeys) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    for (const std::int64_t seqlen_q : {1, 2, 3}) {
      Case c = with({}, {.dtype = dtype, .heads_q = 4, .heads_kv = 2, .head_dim_qk = 72, .head_dim_v = 40});
      change(c, {.seqlen_q = seqlen_q, .seqlen_k = 3333, .softcap = seqlen_q == 3 ? 20.0F : 0.0F});
      change(c, {.causal = true, .window_left = seqlen_q == 2 ? 1500 : -1, .sink = seqlen_q == 1});
      Call call(c);
      forward_everywhere(call);
      // One thread has enough heads to itself, three share the splits.
      expect_bits_of_one_thread(call, {1, 2, 3});
    }
  }
}

/// A larger tile, as larger problems get, changes no bit of a row.
TEST(Forward, TileSizeDoesNotChangeABit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case c = with({}, {.dtype = dtype, .seqlen_q = 300, .seqlen_k = 450, .window_left = 130});
    c.options.window_right = 10;
    Call call(c);
    const Problem problem = make_problem(call.forward_args());
    for (const cpu::Target target : cpu::available_targets()) {
      cpu::Config config = cpu::choose(problem, 1);
      config.target = target;
      std::vector<std::byte> first;
      for (const int stripes : {1, 2, 3}) {
        config.block_q = stripes * cpu::kernels(target).forward.stripe;
        call.prepare(Pass::forward);
        const cpu::Plan plan(problem, config);
        std::vector<std::byte> workspace(plan.workspace_bytes);
        cpu::run(plan, workspace);
        if (first.empty()) first = call.out.raw();
        EXPECT_EQ(call.out.raw(), first) << cpu::name_of(target);
      }
    }
  }
}

TEST(Forward, ThousandsOfShortSequences) {
  Case c = with({}, {.batch = 3000, .heads_q = 4, .heads_kv = 2, .head_dim = 8, .packed = true});
  Random random(1);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    c.lengths_q.push_back(random.between(0, 3));
    c.lengths_k.push_back(random.between(0, 5));
  }
  c.threads = 2;
  forward_everywhere(c);
}

}  // namespace
}  // namespace tandem::harness
