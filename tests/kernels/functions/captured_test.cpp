// Gradients of captured tensors in the emulator: every kernel that adds to them with every kind of read, and
// that what would be wrong is noticed: gradients that nobody cleared, elements outside of the tensor, missing
// additions, and pairs that are taken to read one element.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "backward/gradients.hpp"
#include "contract/published_functions.hpp"
#include "emulator/emulator.hpp"
#include "functions/any_function.hpp"
#include "harness/changes.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Call;
using harness::Case;
using harness::Named;

Case case_of(const Named& f, const EmulatedBackwardConfig& config) {
  Case c = harness::with({}, {.dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16});
  c.batch = 2;
  c.heads_q = 4;  // that the functions' tensors are for
  change(c, {.heads_kv = 2, .head_dim = config.tiling.head_dim_qk, .seqlen_q = 75, .seqlen_k = 139});
  c.options.softcap = config.transform == ScoreTransform::softcap ? 1.5F : 0.0F;
  c.options.dropout_p = config.functions.dropout ? 0.3F : 0.0F;
  change(c, {.score_function = f.score, .mask_function = f.mask});
  c.captured = f.captured;
  c.differentiated = harness::real_captured(f);
  return c;
}

/// Every function on the first kernel of any lengths; a third of them on each of the others.
void expect_every_function(std::span<const EmulatedBackward> all) {
  const std::vector<Named> functions = harness::differentiated_functions();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const EmulatedBackward& kernels = all[i];
    const bool lists = kernels.config.functions.block_lists;
    for (std::size_t n = 0; n < functions.size(); ++n) {
      const Named& f = functions[n];
      if (lists ? f.mask.empty() : i != 1 && n % 3 != i % 3) continue;
      SCOPED_TRACE(kernels.config.describe() + ": " + f.name);
      EXPECT_TRUE(gradients_are_right(kernels, case_of(f, kernels.config)));
    }
  }
}

TEST(EmulatedCapturedGradients, OfEveryKernelForHopper) {
  expect_every_function(captured_backwards());
}
TEST(EmulatedCapturedGradients, OfEveryKernelOfSm80) {
  expect_every_function(captured_sm80_backwards());
}

/// A kernel of any lengths in bf16, and a function by its name.
const EmulatedBackward& general() {
  const auto kernels = captured_backwards();
  return *std::ranges::find_if(kernels, [](const EmulatedBackward& kernel) {
    return kernel.config.tiling.element == Element::bf16 && kernel.config.mask.varlen &&
           kernel.config.transform != ScoreTransform::softcap && !kernel.config.functions.dropout;
  });
}
Case differentiated(const char* name) {
  static const std::vector<Named> all = harness::differentiated_functions();
  return case_of(*std::ranges::find_if(all, [&](const Named& f) { return f.name == name; }),
                 general().config);
}

/// The function's text with a mistake in what it says of gradients.
struct Fault {
  AnyFunctions wrong;
  Fault(const Case& c, void (*change)(AnyFunctions&)) : wrong(*text_of(c)) {
    right = text_of(c);
    change(wrong);
  }
  static const AnyFunctions* text_of(const Case& c) {
    const Call call(c);
    return printed_functions(digest_of(call, Pass::backward));
  }
  static inline const AnyFunctions* right = nullptr;
};

TEST(EmulatedCapturedGradients, MustBeCleared) {
  const Case c = differentiated("by key");
  EXPECT_TRUE(gradients_are_right(general(), c));
  EXPECT_FALSE(gradients_are_right(general(), c, {.clears = false}));
}

TEST(EmulatedCapturedGradients, LieInsideTheTensor) {
  const Case c = differentiated("by key");
  const Fault outside(c, [](AnyFunctions& f) {
    f.gradient = [](const tile::FunctionSequence& sequence, const CapturedGradient(&gradients)[most_captured],
                    const void* row, const void* key, float score, int g) {
      tile::ElementSlope slope = Fault::right->gradient(sequence, gradients, row, key, score, g);
      slope.address += 210 * static_cast<i64>(sizeof(float));  // the tensor has 210 elements
      return slope;
    };
  });
  EXPECT_THROW(gradients_are_right(general(), c, {.functions = &outside.wrong}), emulator::Fault);
}

TEST(EmulatedCapturedGradients, NeedEveryAddition) {
  const Case c = differentiated("by query and key");
  const Fault missing(c, [](AnyFunctions& f) {
    f.gradient = [](const tile::FunctionSequence& sequence, const CapturedGradient(&gradients)[most_captured],
                    const void* row, const void* key, float score, int g) {
      tile::ElementSlope slope = Fault::right->gradient(sequence, gradients, row, key, score, g);
      if (slope.address == reinterpret_cast<i64>(gradients[0].data)) slope.value = 0.0F;
      return slope;
    };
  });
  EXPECT_FALSE(gradients_are_right(general(), c, {.functions = &missing.wrong}));
}

/// Each says that pairs read one element which do not.
TEST(EmulatedCapturedGradients, AreAddedUpWherePairsReadOneElement) {
  for (const char* const name : {"by key", "by query and key", "a table by distance, with clamped indices"}) {
    SCOPED_TRACE(name);
    const Case c = differentiated(name);
    const Fault one(c, [](AnyFunctions& f) { f.pattern = [](int /*g*/) { return tile::ElementPattern{}; }; });
    EXPECT_FALSE(gradients_are_right(general(), c, {.functions = &one.wrong}));
    // What is added pair by pair is right for every read.
    const Fault each(c, [](AnyFunctions& f) {
      f.pattern = [](int /*g*/) { return tile::ElementPattern{true, true, true}; };
    });
    EXPECT_TRUE(gradients_are_right(general(), c, {.functions = &each.wrong}));
  }
}

}  // namespace
}  // namespace tandem::kernel_tests
