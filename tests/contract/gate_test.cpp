// Contract line 23: an output gate multiplies out by its sigmoid, before out is rounded, and has a gradient.
#include <limits>

#include "contract/contract.hpp"
#include "contract/published_functions.hpp"

namespace tandem::harness {
namespace {

Case gated(DType dtype) {
  return with(plain_case(dtype), {.gate = true});
}

void cross(const std::function<void(Case&)>& change) {
  for (const DType dtype : float_dtypes) {
    Case c = gated(dtype);
    change(c);
    run_everywhere(c);
  }
}

TEST(Contract23_Gate, WithEveryMask) {
  cross([](Case&) {});
  cross([](Case& c) { c.options.causal = true; });
  cross(cap_a_window);
}

TEST(Contract23_Gate, OfEveryLength) {
  cross(pack_four_sequences);
  cross(use_fewer_rows);
  cross([](Case& c) { c.seqlen_q = 0; });
  cross([](Case& c) { c.seqlen_k = 0; });
  cross([](Case& c) { change(c, {.seqlen_q = 200, .seqlen_k = 30, .causal = true}); });
}

TEST(Contract23_Gate, OfHeadsOfEverySize) {
  for (const std::int64_t head_dim : {40, 64, 128, 256}) {
    cross([&](Case& c) { change(c, {.head_dim = head_dim}); });
  }
  cross([](Case& c) { change(c, {.head_dim_qk = 33, .head_dim_v = 7}); });
  cross([](Case& c) { change(c, {.head_dim_qk = 192, .head_dim_v = 128}); });
}

/// Steps of generation and few queries, whose keys may be shared and whose heads may be rows of a tile.
TEST(Contract23_Gate, OfFewQueries) {
  for (const std::int64_t rows : {1, 3}) {
    for (const std::int64_t split_size : {0, 256}) {
      cross([&](Case& c) {
        change(c, {.batch = 1, .heads_q = 6, .seqlen_q = rows, .seqlen_k = 3000});
        change(c, {.split_size = split_size, .threads = 3});
      });
    }
  }
}

TEST(Contract23_Gate, OfCaches) {
  cross([](Case& c) { change(c, {.seqlen_k = 160, .used_k = {139, 60}, .page_size = 16}); });
}

TEST(Contract23_Gate, WithSinksAndDlse) {
  cross([](Case& c) { change(c, {.causal = true, .sink = true, .dlse = true}); });
}

TEST(Contract23_Gate, WithFunctionsAndDropout) {
  for (const Named& f : crossed_functions()) {
    SCOPED_TRACE(f.name);
    cross([&](Case& c) {
      change(c, {.score_function = f.score, .mask_function = f.mask});
      c.captured = f.captured;
    });
  }
  cross([](Case& c) { c.options.dropout_p = 0.3F; });
}

TEST(Contract23_Gate, WithGradientsInF32AndThoseThatAreWanted) {
  for (const unsigned unwanted : {1U, 6U, 7U, 8U}) {
    cross([&](Case& c) { c.unwanted = unwanted; });
  }
  cross([](Case& c) {
    c.f32_gradients = c.added = 3;
    c.options.deterministic = true;
  });
  cross([](Case& c) { change(c, {.threads = 3, .workspace = false}); });
}

TEST(Contract23_Gate, InAnyLayout) {
  cross([](Case& c) {
    c.gate_layout.pad = 3;
    c.dout.order = {0, 2, 1, 3};
  });
  cross([](Case& c) { c.gate_layout.slices = 2; });
  cross([](Case& c) { c.gate_layout.order = {0, 2, 1, 3}; });
}

TEST(Contract23_Gate, OutInF32) {
  cross([](Case& c) { c.f32_out = c.dtype != DType::f32; });
}

/// Sigmoids of 0 and 1, and gates that are NaN where a query sees no key.
TEST(Contract23_Gate, OfAnyValue) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : float_dtypes) {
    Call call(with(gated(dtype), {.seqlen_q = 200, .seqlen_k = 30, .causal = true}));
    const std::int64_t width = call.spec.heads_q * call.spec.head_dim_v;
    for (std::int64_t n = 0; n < 170 * width; ++n) call.gate.set(n, std::nan(""));
    const std::int64_t last = 199 * width;
    for (const double value : {-infinity, -200.0, -20.0, 0.0, 20.0, 200.0, infinity}) {
      for (std::int64_t n = 0; n < 9; ++n) call.gate.set(last + 10 * n, value);
      run_everywhere(call);
    }
    call.gate.set(last, std::nan(""));
    run_everywhere(call, false);
  }
}

}  // namespace
}  // namespace tandem::harness
