// Properties that hold for any problem, on problems that RapidCheck draws: agreement with the oracle, and
// laws that need no oracle. A failure prints the case's seed; `random_case(seed, size)` makes it again.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// Checks `property` of a seed for about `count` seeds. Sizes grow with RapidCheck's size, so failures come
/// out small.
void check(const char* name, int count,
           const std::function<void(std::uint64_t seed, std::int64_t size)>& property) {
  rc::detail::TestMetadata metadata;
  metadata.id = name;
  metadata.description = name;
  rc::detail::TestParams params;
  params.seed = 20240708;  // the same cases every time; change it to look elsewhere
  params.maxSuccess = effort(count);
  params.maxSize = 100;
  const auto result = rc::detail::checkTestable(
      [&] {
        const auto seed = *rc::gen::noShrink(rc::gen::inRange<std::uint64_t>(0, 1U << 30));
        const auto size = *rc::gen::withSize([](int n) { return rc::gen::just<std::int64_t>(10 + 2 * n); });
        // GoogleTest's failures are caught here, so that RapidCheck can try smaller sizes and report the
        // last.
        testing::TestPartResultArray failures;
        {
          const testing::ScopedFakeTestPartResultReporter reporter(&failures);
          property(seed, size);
        }
        if (failures.size() > 0) RC_FAIL(std::string(failures.GetTestPartResult(0).message()));
      },
      metadata, params);
  if (result.template is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  FAIL() << text.str();
}

TEST(Property, ForwardAndBackwardMatchTheOracle) {
  check("random problems", 250,
        [](std::uint64_t seed, std::int64_t size) { run_everywhere(random_case(seed, size)); });
}

/// A small random case without layouts, as a base for the laws below.
Case simple_case(std::uint64_t seed, std::int64_t size) {
  Case c = random_case(seed, size);
  c.q = c.k = c.v = c.out = c.dout = c.dq = c.dk = c.dv = Layout{};
  change(c, {.deterministic = true, .unwanted = 0});
  if (c.dtype == DType::e4m3) c.dtype = DType::bf16;
  change(c, {.scales = 0, .amplitude = 1.0});
  return c;
}

Case dense_case(std::uint64_t seed, std::int64_t size) {
  Case c = with(simple_case(seed, size), {.packed = false, .slack_q = 0, .slack_k = 0});
  c.used_q.clear();
  c.used_k.clear();
  return c;
}

TEST(Property, LinearInV) {
  // out(v1 + 2 v2) = out(v1) + 2 out(v2): exactly linear in fp64, and in fp32 up to rounding.
  check("linear in v", 40, [](std::uint64_t seed, std::int64_t size) {
    Case c = with(dense_case(seed, size), {.dtype = DType::f32});
    Call first(c);
    c.seed += 1;
    Call second(c);
    Call both(c);
    copy(first.q, second.q);
    copy(first.q, both.q);
    copy(first.k, second.k);
    copy(first.k, both.k);
    if (first.sink.given()) {
      copy(first.sink, second.sink);
      copy(first.sink, both.sink);
    }
    for (std::int64_t n = 0; n < both.v.numel(); ++n) both.v.set(n, first.v.get(n) + 2.0 * second.v.get(n));
    on_every_runner(c, [&](Runner& runner) {
      for (Call* call : {&first, &second, &both}) run(runner, *call, false);
      for (std::int64_t n = 0; n < both.out.numel(); ++n) {
        const double expected = first.out.get(n) + 2.0 * second.out.get(n);
        ASSERT_NEAR(both.out.get(n), expected, 4e-5 * std::max(1.0, std::abs(expected)));
      }
    });
  });
}

TEST(Property, OrderOfUnmaskedKeysDoesNotMatter) {
  check("permuting keys", 40, [](std::uint64_t seed, std::int64_t size) {
    Case c = with(dense_case(seed, size), {.causal = false, .window = -1});
    Call call(c);
    Call permuted(c);
    std::vector<std::int64_t> order(static_cast<std::size_t>(c.seqlen_k));
    std::iota(order.begin(), order.end(), 0);
    Random random(seed);
    for (std::size_t n = order.size(); n > 1; --n) {
      std::swap(order[n - 1],
                order[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(n) - 1))]);
    }
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t j = 0; j < c.seqlen_k; ++j) {
        const std::int64_t from = b * c.seqlen_k + order[static_cast<std::size_t>(j)];
        const std::int64_t to = b * c.seqlen_k + j;
        const std::int64_t width = c.heads_kv * c.head_dim_qk;
        const std::int64_t width_v = c.heads_kv * c.head_dim_v;
        copy(call.k, permuted.k, from * width, to * width, width);
        copy(call.v, permuted.v, from * width_v, to * width_v, width_v);
      }
    }
    // The permuted call against the oracle of the original one.
    const Expected expected = expect(call, Pass::forward);
    on_every_runner(c, [&](Runner& runner) {
      permuted.prepare(Pass::forward);
      runner.forward(permuted);
      EXPECT_TRUE(matches("out", permuted.out, expected.out));
      EXPECT_TRUE(matches("lse", permuted.lse, expected.lse));
    });
  });
}

/// Entry `b` of every tensor of a dense call, as a call of batch 1.
Call batch_entry(const Call& call, std::int64_t b) {
  Call single(with(call.spec, {.batch = 1}));
  const auto take = [&](const Box& from, Box& to) {
    if (from.given()) copy(from, to, b * to.numel(), 0, to.numel());
  };
  take(call.q, single.q);
  take(call.k, single.k);
  take(call.v, single.v);
  take(call.dout, single.dout);
  take(call.dlse, single.dlse);
  if (call.sink.given()) copy(call.sink, single.sink);
  return single;
}

TEST(Property, SplittingABatchGivesTheSameBits) {
  check("splitting a batch", 40, [](std::uint64_t seed, std::int64_t size) {
    const Case c = dense_case(seed, size);
    Call whole(c);
    on_every_runner(c, [&](Runner& runner) {
      run(runner, whole);
      for (std::int64_t b = 0; b < c.batch; ++b) {
        Call single = batch_entry(whole, b);
        run(runner, single);
        const auto same = [&](const char* name, const Box& all, const Box& one) {
          EXPECT_TRUE(same_bits(part(all, b * one.numel(), one.numel()), one.raw()))
              << name << " of batch entry " << b;
        };
        same("out", whole.out, single.out);
        same("lse", whole.lse, single.lse);
        same("dq", whole.dq, single.dq);
        same("dk", whole.dk, single.dk);
        same("dv", whole.dv, single.dv);
      }
    });
  });
}

TEST(Property, ConcatenatedSequencesGiveTheBitsOfADenseBatch) {
  check("varlen equals dense", 40, [](std::uint64_t seed, std::int64_t size) {
    Case dense = dense_case(seed, size);
    dense.dlse = false;  // its layout differs between the two
    Case packed = with(dense, {.packed = true});
    packed.lengths_q.assign(static_cast<std::size_t>(dense.batch), dense.seqlen_q);
    packed.lengths_k.assign(static_cast<std::size_t>(dense.batch), dense.seqlen_k);
    Call a(dense);
    Call b(packed);  // the same memory order: (batch, seqlen, ...) is (total, ...)
    copy(a.q, b.q);
    copy(a.k, b.k);
    copy(a.v, b.v);
    copy(a.dout, b.dout);
    if (a.sink.given()) copy(a.sink, b.sink);
    on_every_runner(dense, [&](Runner& runner) {
      run(runner, a);
      run(runner, b);
      EXPECT_TRUE(same_bits(a.out.raw(), b.out.raw())) << "out";
      EXPECT_TRUE(same_bits(a.dq.raw(), b.dq.raw())) << "dq";
      EXPECT_TRUE(same_bits(a.dk.raw(), b.dk.raw())) << "dk";
      EXPECT_TRUE(same_bits(a.dv.raw(), b.dv.raw())) << "dv";
    });
  });
}

/// sum(out * dout) + sum(lse * dlse) by the oracle's forward, with f32 inputs: what the gradients are of.
double loss(const Call& call) {
  const reference::Forward f = reference::forward(call.problem());
  double sum = 0.0;
  for (std::size_t n = 0; n < f.out.size(); ++n)
    sum += f.out[n] * call.dout.get(static_cast<std::int64_t>(n));
  for (std::size_t n = 0; call.dlse.given() && n < f.lse.size(); ++n) {
    if (std::isfinite(f.lse[n])) sum += f.lse[n] * call.dlse.get(static_cast<std::int64_t>(n));
  }
  return sum;
}

TEST(Property, GradientsAreFiniteDifferencesOfTheForward) {
  check("finite differences", 25, [](std::uint64_t seed, std::int64_t) {
    Case c = with(dense_case(seed, 6), {.dtype = DType::f32, .batch = 1, .head_dim_qk = 8, .head_dim_v = 16});
    c.seqlen_q = std::clamp<std::int64_t>(c.seqlen_q, 1, 6);
    c.seqlen_k = std::clamp<std::int64_t>(c.seqlen_k, 1, 6);
    Call call(c);
    struct Input {
      Box* value;
      Box* gradient;
    };
    Random random(seed);
    for (const auto& [value, gradient] : {Input{&call.q, &call.dq}, Input{&call.k, &call.dk},
                                          Input{&call.v, &call.dv}, Input{&call.sink, &call.dsink}}) {
      if (!value->given()) continue;
      for (int n = 0; n < 4; ++n) {
        const std::int64_t at = random.between(0, value->numel() - 1);
        const double centre = value->get(at);
        value->set(at, centre + 0x1p-9);
        const double above = value->get(at);
        const double loss_above = loss(call);
        value->set(at, centre - 0x1p-9);
        const double slope = (loss_above - loss(call)) / (above - value->get(at));
        value->set(at, centre);
        on_every_runner(c, [&](Runner& runner) {
          run(runner, call);
          ASSERT_NEAR(gradient->get(at), slope, 2e-3 * std::max(1.0, std::abs(slope)));
        });
      }
    }
  });
}

}  // namespace
}  // namespace tandem::harness
