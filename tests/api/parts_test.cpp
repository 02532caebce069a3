// Which call two pieces of a sequence make, and every message that a part can give, whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <type_traits>

#include "arguments.hpp"
#include "call_case.hpp"
#include "error_case.hpp"
#include "tandem/parts.hpp"

namespace tandem::test {
namespace {

/// Whether query i of the sequence sees key j.
bool sees(std::int64_t i, std::int64_t j, const PartOptions& o) {
  const std::int64_t right = o.causal ? 0 : o.window_right;
  return (o.window_left < 0 || j >= i - o.window_left) && (right < 0 || j <= i + right);
}

/// Whether row i of the pieces' queries sees row j of their keys, by what part_call says.
bool sees(std::int64_t i, std::int64_t j, const PartCall& c) {
  const std::int64_t query = i - c.queries.first, key = j - c.keys.first;
  if (query < 0 || query >= c.queries.count || key < 0 || key >= c.keys.count) return false;
  const std::int64_t diagonal = query + c.keys.count - c.queries.count;
  return (c.window_left < 0 || key >= diagonal - c.window_left) &&
         (c.window_right < 0 || key <= diagonal + c.window_right);
}

void expect_pairs(const Piece& queries, const Piece& keys, const PartOptions& o) {
  const PartCall c = part_call(queries, keys, o);
  EXPECT_EQ(c.empty(), c.keys.count == 0);
  std::int64_t first_seen = queries.count, last_seen = -1;
  for (std::int64_t i = 0; i < queries.count; ++i) {
    for (std::int64_t j = 0; j < keys.count; ++j) {
      const bool seen = sees(queries.first + i, keys.first + j, o);
      ASSERT_EQ(sees(i, j, c), seen) << "query " << queries.first << " + " << i << ", key " << keys.first
                                     << " + " << j << ", window " << o.window_left << " " << o.window_right;
      if (seen) first_seen = std::min(first_seen, i), last_seen = i;
    }
  }
  if (last_seen < 0) {
    EXPECT_TRUE(c.empty());
  } else {  // no row more than there must be
    EXPECT_EQ(c.queries, (Piece{first_seen, last_seen + 1 - first_seen}));
  }
}

TEST(PartCall, HasExactlyTheVisiblePairs) {
  for (const std::int64_t first : {0, 2, 5, 9}) {
    for (const std::int64_t first_key : {0, 3, 5, 11}) {
      for (const std::int64_t n : {0, 1, 4, 7}) {
        for (const std::int64_t m : {0, 1, 3, 8}) {
          for (const std::int64_t left : {-1, 0, 1, 4, 20}) {
            for (const std::int64_t right : {-1, 0, 2, 6, 20}) {
              PartOptions o;
              o.window_left = left;
              o.window_right = right;
              expect_pairs({first, n}, {first_key, m}, o);
              o.causal = true;
              expect_pairs({first, n}, {first_key, m}, o);
            }
          }
        }
      }
    }
  }
}

TEST(PartCall, TakesTheFarthestPlacesAndTheWidestWindows) {
  constexpr std::int64_t far = std::int64_t{1} << 60, widest = std::numeric_limits<std::int64_t>::max();
  PartOptions o;
  o.window_left = o.window_right = widest;
  EXPECT_EQ(part_call({far, 4}, {0, 3}, o).keys, (Piece{0, 3}));
  EXPECT_EQ(part_call({0, far}, {far, far}, o).queries, (Piece{0, far}));
  o.causal = true;
  EXPECT_TRUE(part_call({0, 4}, {far, 3}, o).empty());
  EXPECT_EQ(part_call({far, 4}, {far, 4}, o).queries, (Piece{0, 4}));
}

std::string message_of(const Piece& queries, const Piece& keys, const PartOptions& options) {
  try {
    part_call(queries, keys, options);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument);
    return e.what();
  }
  return "no error";
}

TEST(PartCall, NamesWhatIsWrong) {
  constexpr std::int64_t far = std::int64_t{1} << 60;
  EXPECT_EQ(message_of({-1, 4}, {0, 4}, {}),
            "queries.first is -1; places in a sequence, and counts, are from 0 to 2^60");
  EXPECT_EQ(message_of({0, -4}, {0, 4}, {}),
            "queries.count is -4; places in a sequence, and counts, are from 0 to 2^60");
  EXPECT_EQ(message_of({0, 4}, {far + 1, 4}, {}),
            "keys.first is 1152921504606846977; places in a sequence, and counts, are from 0 to 2^60");
  EXPECT_EQ(message_of({0, 4}, {0, -1}, {}),
            "keys.count is -1; places in a sequence, and counts, are from 0 to 2^60");
  PartOptions o;
  o.window_left = -2;
  EXPECT_EQ(message_of({0, 4}, {0, 4}, o),
            "window_left is -2; it must be at least 0, or -1 for unbounded: FlashAttention takes any "
            "negative bound for unbounded, pass -1");
}

/// batch 2, 5 queries behind 7 keys, heads 4 over 2, head_dim 16 and 8, bf16.
ForwardPartArgs forward_part_args() {
  ForwardPartArgs a;
  a.q = tensor(0, DType::bf16, {2, 5, 4, 16});
  a.k = tensor(1, DType::bf16, {2, 7, 2, 16});
  a.v = tensor(2, DType::bf16, {2, 7, 2, 8});
  a.out = tensor(3, DType::f32, {2, 5, 4, 8});
  a.lse = tensor(4, DType::f32, {2, 4, 5});
  a.first_query = 7;
  return a;
}

BackwardPartArgs backward_part_args() {
  BackwardPartArgs a;
  static_cast<PartInputs&>(a) = forward_part_args();
  a.out = tensor(3, DType::bf16, {2, 5, 4, 8});
  a.lse = tensor(4, DType::f32, {2, 4, 5});
  a.dout = tensor(5, DType::bf16, {2, 5, 4, 8});
  a.dq = tensor(6, DType::f32, {2, 5, 4, 16});
  a.dk = tensor(7, DType::f32, {2, 7, 2, 16});
  a.dv = tensor(8, DType::f32, {2, 7, 2, 8});
  return a;
}

void run(const ForwardPartArgs& a) {
  forward_part(a);
}
void run(const BackwardPartArgs& a) {
  backward_part(a);
}

template <typename Args>
void expect_part_message(const CallCase<Args>& c) {
  Args args = c.legal();
  ASSERT_NO_THROW(run(args)) << "the arguments are wrong before they are broken";
  c.break_it(args);
  try {
    run(args);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), c.message);
    EXPECT_EQ(e.status() == Status::unsupported, args.q.device.kind == Device::Kind::cuda);
  }
}

class ForwardPartError : public testing::TestWithParam<CallCase<ForwardPartArgs>> {};
TEST_P(ForwardPartError, NamesRuleValueAndRemedy) {
  expect_part_message(GetParam());
}

const CallCase<ForwardPartArgs> forward_cases[] = {
    {"Out16", forward_part_args, [](ForwardPartArgs& a) { a.out.dtype = DType::bf16; },
     "out is bf16; convert it to f32"},
    {"NoLse", forward_part_args, [](ForwardPartArgs& a) { a.lse = {}; },
     "lse is missing; pass a tensor of shape (batch, heads_q, seqlen_q)"},
    {"ShapeOfLse", forward_part_args, [](ForwardPartArgs& a) { a.lse.shape[2] = 4; },
     "lse has shape (2, 4, 4); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
    {"FirstQuery", forward_part_args, [](ForwardPartArgs& a) { a.first_query = -7; },
     "first_query is -7; places in a sequence, and counts, are from 0 to 2^60"},
    {"FirstKey", forward_part_args, [](ForwardPartArgs& a) { a.first_key = -1; },
     "first_key is -1; places in a sequence, and counts, are from 0 to 2^60"},
    {"Window", forward_part_args, [](ForwardPartArgs& a) { a.options.window_right = -3; },
     "window_right is -3; it must be at least 0, or -1 for unbounded: FlashAttention takes any negative "
     "bound for unbounded, pass -1"},
};
INSTANTIATE_TEST_SUITE_P(Api, ForwardPartError, testing::ValuesIn(forward_cases),
                         name_of_case<ForwardPartArgs>);

class BackwardPartError : public testing::TestWithParam<CallCase<BackwardPartArgs>> {};
TEST_P(BackwardPartError, NamesRuleValueAndRemedy) {
  expect_part_message(GetParam());
}

const CallCase<BackwardPartArgs> backward_cases[] = {
    {"Gradients16", backward_part_args,
     [](BackwardPartArgs& a) {
       for (Tensor* t : {&a.dq, &a.dk, &a.dv}) t->dtype = DType::bf16;
     },
     "dq is bf16; convert it to f32"},
    {"OutF32", backward_part_args,
     [](BackwardPartArgs& a) {
       a.out = tensor(3, DType::f32, {2, 5, 4, 8});
     },
     "out is f32 but q is bf16; convert it to bf16"},
    {"NothingWanted", backward_part_args, [](BackwardPartArgs& a) { a.dq = a.dk = a.dv = {}; },
     "dq, dk, dv and dsink are all missing; pass those that are wanted"},
    {"FirstKey", backward_part_args, [](BackwardPartArgs& a) { a.first_key = -1; },
     "first_key is -1; places in a sequence, and counts, are from 0 to 2^60"},
};
INSTANTIATE_TEST_SUITE_P(Api, BackwardPartError, testing::ValuesIn(backward_cases),
                         name_of_case<BackwardPartArgs>);

template <typename Args>
std::string message_of(const Args& args, void* workspace, std::size_t bytes) {
  try {
    Execution execution;
    execution.workspace = workspace;
    execution.workspace_bytes = bytes;
    if constexpr (std::is_same_v<Args, ForwardPartArgs>) {
      forward_part(args, execution);
    } else {
      backward_part(args, execution);
    }
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument);
    return e.what();
  }
  return "no error";
}

TEST(PartWorkspace, TooSmallOrMisalignedIsAnErrorAndNothingIsWritten) {
  ForwardPartArgs args = forward_part_args();
  alignas(256) static std::array<std::byte, 1 << 20> memory;
  const std::size_t bytes = workspace_bytes(args);
  ASSERT_LE(bytes, memory.size());
  ASSERT_GE(bytes, 2U * (2 * 5 * 4 * 8 * 4 + 2 * 4 * 5 * 4));  // the part and the sum
  auto* const lse = static_cast<float*>(args.lse.data);
  std::fill(lse, lse + 40, 3.0F);
  const std::string text = message_of(args, memory.data(), bytes - 1);
  EXPECT_EQ(text, "workspace has " + std::to_string(bytes - 1) + " bytes but this call needs " +
                      std::to_string(bytes) + "; ask workspace_bytes() with the same arguments");
  EXPECT_NE(message_of(args, memory.data() + 64, bytes).find("it must be a multiple of 256"),
            std::string::npos);
  EXPECT_EQ(std::count(lse, lse + 40, 3.0F), 40);
  EXPECT_EQ(message_of(args, memory.data(), bytes), "no error");
  EXPECT_EQ(std::count(lse, lse + 40, 3.0F), 0);
  args.first_query = 0;
  args.first_key = 100;
  args.options.causal = true;
  EXPECT_EQ(workspace_bytes(args), 0U);  // no pair is visible
}

}  // namespace
}  // namespace tandem::test
