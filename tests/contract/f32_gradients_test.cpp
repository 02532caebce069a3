// Contract line 20 for gradients: in f32 beside inputs of 16 bits, and added to what there is, whatever else
// a call has.
#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// Each gradient in f32 alone and beside the others, written and added to.
void cross(const std::function<void(Case&)>& change) {
  struct Kind {
    unsigned f32, added;
  };
  for (const DType dtype : float_dtypes) {
    for (const Kind kind : {Kind{1, 0}, {2, 0}, {3, 0}, {1, 1}, {2, 2}, {3, 3}, {3, 1}}) {
      Case c = plain_case(dtype);
      c.f32_gradients = kind.f32;
      c.added = kind.added;
      change(c);
      run_everywhere(c);
    }
  }
}

TEST(Contract20_Gradients, InF32WithEveryMask) {
  cross([](Case&) {});
  cross([](Case& c) { c.options.causal = true; });
  cross(cap_a_window);
}

TEST(Contract20_Gradients, InF32OfEveryLength) {
  cross(pack_four_sequences);
  cross(use_fewer_rows);
  cross([](Case& c) { c.seqlen_q = 0; });
  cross([](Case& c) { c.seqlen_k = 0; });
  cross([](Case& c) {
    change(c, {.seqlen_q = 200, .seqlen_k = 30});
    c.options.causal = true;  // queries that see no key
  });
}

TEST(Contract20_Gradients, InF32OfHeadsOfEverySize) {
  for (const std::int64_t head_dim : {40, 64, 128, 256}) {
    cross([&](Case& c) { c.head_dim_qk = c.head_dim_v = head_dim; });
  }
  cross([](Case& c) { change(c, {.head_dim_qk = 33, .head_dim_v = 7}); });
}

TEST(Contract20_Gradients, InF32OfThoseThatAreWanted) {
  for (const unsigned unwanted : {1U, 2U, 4U, 6U}) {
    cross([&](Case& c) { c.unwanted = unwanted; });
  }
}

TEST(Contract20_Gradients, InF32OfAnyLayoutAndInAFixedOrder) {
  cross([](Case& c) {
    c.options.deterministic = true;
    c.dq.pad = 3;
    c.dk.slices = 2;
    c.dv.order = {0, 2, 1, 3};
  });
  cross([](Case& c) { change(c, {.sink = true, .dlse = true, .threads = 3, .workspace = false}); });
}

}  // namespace
}  // namespace tandem::harness
