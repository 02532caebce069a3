// Functions of scores in the emulator beyond the contract's lines: wide heads, the staggered start, and that
// wrong text is noticed.
#include <gtest/gtest.h>

#include <functional>
#include <span>

#include "backward/gradients.hpp"
#include "contract/published_functions.hpp"
#include "forward/emulated_forward.hpp"
#include "functions/any_function.hpp"
#include "harness/changes.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Call;
using harness::Case;
using harness::Named;

Case case_of(const Named& f, int head_dim) {
  Case c = harness::with({}, {.dtype = DType::bf16, .batch = 2, .heads_q = 4, .heads_kv = 2});
  change(c, {.head_dim = head_dim, .seqlen_q = 75, .seqlen_k = 139, .score_function = f.score});
  c.mask_function = f.mask;
  c.captured = f.captured;
  return c;
}

std::vector<EmulatedBackward> every_backward() {
  std::vector<EmulatedBackward> all;
  for (const auto& kernels :
       {function_backwards(), function_backwards_of_lists(), dropout_backwards(), function_sm80_backwards(),
        function_sm80_backwards_of_lists(), dropout_sm80_backwards()})
    all.insert(all.end(), kernels.begin(), kernels.end());
  return all;
}

/// A kernel, by its place among all, with every function that it serves.
class EveryBackward : public testing::TestWithParam<std::size_t> {};

TEST_P(EveryBackward, GivesTheGradients) {
  const EmulatedBackward kernels = every_backward()[GetParam()];
  for (const Named& f : harness::crossed_functions()) {
    Case c = case_of(f, kernels.config.tiling.head_dim_qk);
    if (c.score_function.empty() == kernels.config.functions.score_function) continue;
    if (c.mask_function.empty() && kernels.config.functions.block_lists) continue;
    SCOPED_TRACE(kernels.config.describe() + ": " + f.name);
    c.dtype = kernels.config.tiling.element == Element::f16 ? DType::f16 : DType::bf16;
    c.options.softcap = kernels.config.transform == ScoreTransform::softcap ? 1.5F : 0.0F;
    c.options.deterministic = kernels.config.deterministic;
    c.options.dropout_p = kernels.config.functions.dropout ? 0.3F : 0.0F;
    if (kernels.config.functions.dropout_places) c.dropout_places = {8, 128, 64, 1, 3, 1001, 333, 1};
    EXPECT_TRUE(gradients_are_right(kernels, c));
  }
}
INSTANTIATE_TEST_SUITE_P(EmulatedFunctions, EveryBackward,
                         testing::Range<std::size_t>(0, every_backward().size()));

/// The contract has these calls of Hopper's kernels alone.
TEST(EmulatedFunctions, FewQueriesBySm80) {
  for (const EmulatedForward& kernel : function_sm80_forwards_of_few()) {
    for (const Named& f : harness::crossed_functions()) {
      Case c = with(case_of(f, 64), {.seqlen_q = 3, .seqlen_k = 300});
      EmulatorRunner runner(kernel);
      if (!runner.refuses(c).empty()) continue;
      SCOPED_TRACE(kernel.config.describe() + ": " + f.name);
      Call call(c);
      const harness::Expected expected = harness::expect(call, Pass::forward);
      call.prepare(Pass::forward);
      runner.forward(call);
      EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
    }
  }
}

/// Kernels of plain attention with functions are those of the tests.
const EmulatedForward& scored_forward() {
  const auto kernels = function_forwards();
  return *std::ranges::find_if(kernels, [](const EmulatedForward& kernel) {
    return kernel.config.functions.score_function && kernel.config.tiling.element == Element::bf16 &&
           kernel.config.transform == ScoreTransform::scaled;
  });
}
const EmulatedBackward& scored_backward() {
  const auto kernels = function_backwards();
  return *std::ranges::find_if(kernels, [](const EmulatedBackward& kernel) {
    return kernel.config.functions.score_function && kernel.config.mask.varlen &&
           kernel.config.transform != ScoreTransform::softcap &&
           kernel.config.tiling.element == Element::bf16;
  });
}

/// A function that the printed text computes wrongly: `change` makes it of the right one.
struct Fault {
  AnyFunctions wrong;
  explicit Fault(const Case& c, void (*change)(AnyFunctions&)) : wrong(*text_of(c)) {
    right = text_of(c);
    change(wrong);
  }
  static const AnyFunctions* text_of(const Case& c) {
    const Call call(c);
    return printed_functions(digest_of(call));
  }
  static inline const AnyFunctions* right = nullptr;
};

testing::AssertionResult output_is_right(const Case& c, const AnyFunctions* instead) {
  Call call(c);
  const harness::Expected expected = harness::expect(call, Pass::forward);
  call.prepare(Pass::forward);
  EmulatorRunner runner(scored_forward());
  runner.functions = instead;
  runner.forward(call);
  return harness::correct(call, Pass::forward, expected);
}
testing::AssertionResult gradients_with(const Case& c, const AnyFunctions* instead) {
  return gradients_are_right(scored_backward(), c, {.functions = instead});
}

const Named& published(const char* name);

constexpr int window_queries = 300;
constexpr int window_keys = 500;

/// A sliding window of so many keys, of more than one tile: of any width it has the text of the published
/// one.
Case sliding_window(int width) {
  Case c = with(case_of(published("sliding window"), 64), {.seqlen_q = window_queries});
  c.seqlen_k = window_keys;
  c.mask_function = "$0=sub(q, k); and(le(0, $0), lt($0, " + std::to_string(width) + "))";
  return c;
}

/// The list of tile `tile` of `tile_rows` rows: by the formula, the blocks of `block_rows` rows of the other
/// side that see any pair of the window's, with a mark on those that see all. `sees(row, other)`.
template <typename Sees>
std::vector<unsigned int> seen_blocks(int tile, int tile_rows, int rows, int block_rows, int others,
                                      Sees sees) {
  std::vector<unsigned int> blocks;
  for (int n = 0; n * block_rows < others; ++n) {
    bool some = false;
    bool all = true;
    for (int row = tile * tile_rows; row < std::min((tile + 1) * tile_rows, rows); ++row) {
      for (int other = n * block_rows; other < std::min((n + 1) * block_rows, others); ++other) {
        some = some || sees(row, other);
        all = all && sees(row, other);
      }
    }
    if (some) blocks.push_back(static_cast<unsigned>(2 * n + (all ? 1 : 0)));
  }
  return blocks;
}
bool in_window(int query, int key, int width) {
  return query >= key && query - key < width;
}
constexpr int widths[] = {20, 190};

/// Lists as kernels wrote them: of each tile its length and entries, with room for all blocks.
template <typename Expected>
void expect_lists(std::span<const unsigned int> lists, int tiles, int blocks, Expected expected) {
  ASSERT_EQ(lists.size(), static_cast<std::size_t>(tiles * (blocks + 1)));  // one for all heads
  for (int tile = 0; tile < tiles; ++tile) {
    const auto list = lists.subspan(static_cast<std::size_t>(tile * (blocks + 1)));
    EXPECT_EQ(std::vector<unsigned int>(list.begin() + 1, list.begin() + 1 + list[0]), expected(tile))
        << "tile " << tile;
  }
}
int blocks_of(int rows, int block) {
  return (rows + block - 1) / block;
}

/// The listed blocks, and which of them the mask leaves whole, are those of the formula: a kernel that
/// visited others would only be slower.
TEST(EmulatedFunctions, ListsHaveTheBlocksThatAreSeen) {
  const EmulatedForward& kernel = function_forwards_of_lists().front();
  for (const int width : widths) {
    const Case c = sliding_window(width);
    Call call(c);
    call.prepare(Pass::forward);
    EmulatorRunner runner(kernel);
    ASSERT_EQ(runner.refuses(c), "");
    runner.forward(call);
    const Tiling& tiling = kernel.config.tiling;
    expect_lists(runner.lists, blocks_of(window_queries, tiling.block_m),
                 blocks_of(window_keys, tiling.block_n), [&](int m) {
                   return seen_blocks(m, tiling.block_m, window_queries, tiling.block_n, window_keys,
                                      [&](int query, int key) { return in_window(query, key, width); });
                 });
  }
}

/// The lists of the backward pass of a sliding window, and its gradients once
/// `change` has had them.
testing::AssertionResult gradients_by_lists(int width,
                                            const std::function<void(std::span<unsigned int>)>& change) {
  return gradients_are_right(function_backwards_of_lists().front(), sliding_window(width),
                             {.with_lists = change});
}

/// So are the query blocks of a tile of keys.
TEST(EmulatedFunctions, BackwardListsHaveTheBlocksThatAreSeen) {
  const EmulatedBackwardConfig& config = function_backwards_of_lists().front().config;
  const int keys = config.tile_keys;
  const int queries = config.tiling.block_m;
  for (const int width : widths) {
    EXPECT_TRUE(gradients_by_lists(width, [&](std::span<unsigned int> lists) {
      expect_lists(lists, blocks_of(window_keys, keys), blocks_of(window_queries, queries), [&](int n) {
        return seen_blocks(n, keys, window_keys, queries, window_queries,
                           [&](int key, int query) { return in_window(query, key, width); });
      });
    }));
  }
}

/// A block that is not listed is not computed: without its last entry a list
/// gives other gradients.
TEST(EmulatedFunctions, BackwardVisitsWhatIsListedAlone) {
  EXPECT_FALSE(gradients_by_lists(widths[0], [](std::span<unsigned int> lists) {
    ASSERT_GT(lists.front(), 1U);
    --lists.front();
  }));
}

const Named& published(const char* name) {
  static const std::vector<Named> all = harness::tested_functions();
  return *std::ranges::find_if(all, [&](const Named& f) { return f.name == name; });
}

/// Functions that differ in their numbers have one text, and each gives what its own numbers say.
TEST(EmulatedFunctions, NumbersAreParameters) {
  const Case first = case_of(published("softcap and prefix"), 64);
  Case second = with(first, {.score_function = "mul(tanh(div(s, 0.7)), 0.7)"});
  second.mask_function = "or(lt(k, 60), le(k, q))";
  Case third = with(first, {.score_function = "mul(tanh(div(s, -3.0)), -3.0)"});
  for (const Case& c : {first, second, third}) {
    ASSERT_EQ(Fault::text_of(c), Fault::text_of(first));
    EXPECT_TRUE(output_is_right(c, nullptr));
    EXPECT_TRUE(gradients_with(c, nullptr));
  }
}

/// The printed text with a mistake of each kind: a row's head, its query, a key, and the slope.
TEST(EmulatedFunctions, WrongTextIsNoticed) {
  const Case alibi = case_of(published("ALiBi"), 64);
  EXPECT_TRUE(output_is_right(alibi, nullptr));
  EXPECT_TRUE(gradients_with(alibi, nullptr));
  const Fault head(alibi, [](AnyFunctions& f) {
    f.row = [](void* row, const tile::FunctionSequence& sequence, i32 h, i32 query) {
      Fault::right->row(row, sequence, h ^ 1, query);
    };
  });
  EXPECT_FALSE(output_is_right(alibi, &head.wrong));
  EXPECT_FALSE(gradients_with(alibi, &head.wrong));
  const Fault query(alibi, [](AnyFunctions& f) {
    f.row = [](void* row, const tile::FunctionSequence& sequence, i32 h, i32 q) {
      Fault::right->row(row, sequence, h, q == 70 ? q + 30 : q);
    };
  });
  // A constant that is added to all scores of a row changes the LSE alone.
  EXPECT_FALSE(output_is_right(alibi, &query.wrong));
  const Fault key(alibi, [](AnyFunctions& f) {
    f.key = [](void* made, const tile::FunctionSequence& sequence, i32 position) {
      Fault::right->key(made, sequence, position + position % 2);
    };
  });
  EXPECT_FALSE(output_is_right(alibi, &key.wrong));
  EXPECT_FALSE(gradients_with(alibi, &key.wrong));
  const Case softcap = case_of(published("softcap by tanh"), 64);
  EXPECT_TRUE(gradients_with(softcap, nullptr));
  const Fault slope(softcap, [](AnyFunctions& f) {
    f.pair = [](const tile::FunctionSequence& sequence, const void* row, const void* made, float score) {
      tile::Logit logit = Fault::right->pair(sequence, row, made, score);
      logit.slope = 1.0F;
      return logit;
    };
  });
  EXPECT_TRUE(output_is_right(softcap, &slope.wrong));
  EXPECT_FALSE(gradients_with(softcap, &slope.wrong));
}

}  // namespace
}  // namespace tandem::kernel_tests
