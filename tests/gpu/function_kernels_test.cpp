// What ptxas makes of kernels with the usual functions: it needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "gpu/function_source.hpp"
#include "gpu/kernels.hpp"
#include "kernel_sample.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/plan.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/functions/plan.hpp"
#include "problem/mask_window.hpp"

namespace tandem::gpu {
namespace {

struct Usual {
  const char* name;
  const char* score;
  const char* mask;
  /// Bytes of local memory, stack, stores or loads, whichever are most. Where an element is read for every
  /// pair, the loads in flight take the registers of what a tile begins and ends with: those words are stored
  /// once a kernel and read once a tile. Backward with a list or dropout they are read in the loop too: for
  /// documents 20 words among 2,000 instructions.
  int local_bytes = 0;
  int backward_of_64 = 0;  ///< head dimensions: 128 queries at a time, where the function is light
  int backward_of_128 = 0;
  /// The same of the family sm80. Backward there are none.
  int sm80_local_bytes = 0;
  float dropout = 0.0F;
  bool captured_gradients = false;  ///< backward: of all tensors of reals
  bool placed = false;              ///< dropout of parts of sequences
};

/// t0: f32 (4 heads); t1: i32 by position; t2: bf16 (batch, head, query, key); t3: booleans (query, key); t4:
/// f32 (head, relative position); t5: i64 by position; t6: i64 (batch). Causal masks are the window's where
/// it can say so, as in a call.
constexpr Usual usual[] = {
    {"Identity", "s", "", 0, 224, 36, 0},
    {"Everything", "", "true", 0, 0, 36, 0},
    {"Chunked", "", "eq(floordiv(k, 256), floordiv(q, 256))", 0, 0, 52, 0},
    {"Document", "", "and(eq(t1[q], t1[k]), le(k, q))", 0, 0, 168, 0},
    {"PrefixLm", "", "or(lt(k, 100), le(k, q))", 0, 0, 72, 0},
    {"Alibi", "add(s, mul(t0[h], real(sub(k, q))))", "", 0, 324, 40, 8},
    {"RelativeBias", "add(s, t4[h, add(sub(q, k), 4095)])", "", 0, 0, 28, 132},
    {"Softcap", "mul(tanh(div(s, 20.0)), 20.0)", "", 0, 272, 36, 0},
    {"SoftcapAlibiCausal", "add(mul(tanh(div(s, 20.0)), 20.0), mul(t0[h], real(sub(k, q))))", "le(k, q)", 0,
     0, 40, 8},
    {"BiasTensor", "add(s, t2[b, h, q, k])", "", 20, 0, 116, 120},
    {"MaskTensor", "", "ne(t3[q, k], 0)", 64, 0, 180, 60},
    {"Dropout", "", "", 0, 0, 56, 88, 0.1F},
    {"DropoutCausal", "", "le(k, q)", 0, 0, 88, 80, 0.1F},
    {"DropoutAlibi", "add(s, mul(t0[h], real(sub(k, q))))", "", 0, 0, 112, 44, 0.1F},
    {"GradientOfAlibi", "add(s, mul(t0[h], real(sub(k, q))))", "", 0, 0, 8, 0, 0.0F, true},
    {"GradientOfAlibiCausal", "add(s, mul(t0[h], real(sub(k, q))))", "le(k, q)", 0, 0, 20, 0, 0.0F, true},
    {"GradientOfRelativeBias", "add(s, t4[h, add(sub(q, k), 4095)])", "", 0, 0, 8, 0, 0.0F, true},
    {"GradientOfBuckets", "$0=abs(sub(q, k)); add(s, t4[h, where(lt($0, 8), $0, 8)])", "", 0, 0, 8, 0, 0.0F,
     true},
    {"GradientOfBiasTensor", "add(s, t2[b, h, q, k])", "", 0, 0, 8, 0, 0.0F, true},
    {"GradientOfBiasCausal", "add(s, t2[b, h, q, k])", "le(k, q)", 0, 0, 88, 0, 0.0F, true},
    {"GradientOfGate", "mul(s, sigmoid(mul(t0[h], s)))", "", 0, 0, 124, 0, 0.0F, true},
    {"WideDocument", "", "eq(t5[q], t5[k])", 0, 0, 148, 0},
    {"WidePrefix", "", "or(lt(k, t6[b]), le(k, q))", 0, 0, 72, 0},
    {"DropoutOfParts", "", "", 0, 0, 56, 0, 0.1F, false, true},
};

class UsualFunctions : public testing::TestWithParam<Usual> {
 protected:
  /// One of two kernels of each function, from function to function the other one.
  static bool is_compiled(bool first) {
    const auto* const found = std::ranges::find(usual, std::string_view(GetParam().name), &Usual::name);
    return is_in_sample(static_cast<std::size_t>(found - usual) + (first ? 0 : 1), 2);
  }

  void SetUp() override {
    if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
    const std::vector<ConstTensor> captured{ConstTensor(this, DType::f32, {4}),
                                            ConstTensor(this, DType::i32, {4096}),
                                            ConstTensor(this, DType::bf16, {2, 4, 4096, 4096}),
                                            ConstTensor(this, DType::s8, {4096, 4096}),
                                            ConstTensor(this, DType::f32, {4, 8191}),
                                            ConstTensor(this, DType::i64, {4096}),
                                            ConstTensor(this, DType::i64, {2})};
    const Usual& f = GetParam();
    constexpr int reals[] = {0, 2, 4};
    if (*f.score != '\0') score_ = Function::parse(f.score, Function::Kind::score, captured, reals);
    if (*f.mask != '\0') mask_ = Function::parse(f.mask, Function::Kind::mask, captured);
  }

  [[nodiscard]] Problem problem(int head_dim, Pass pass) const {
    Problem p;
    p.pass = pass;
    p.batch = 2;
    p.heads_q = p.heads_kv = 4;
    p.head_dim_qk = p.head_dim_v = head_dim;
    p.rows_q = p.rows_k = 4096;
    p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::bf16;
    p.score_function = score_ ? &*score_ : nullptr;
    p.mask_function = mask_ ? &*mask_ : nullptr;
    p.dropout = make_dropout(GetParam().dropout, 1, 2, 4);
    if (pass == Pass::backward && GetParam().captured_gradients) p.captured_gradients = gradients_;
    if (GetParam().placed) p.dropout.places = places_.data();
    fold_mask_window(p);
    return p;
  }

  /// No more local memory, and products that overlap.
  static void expect_fast(const Problem& p, KernelName name, int local_bytes, const char* architecture = "") {
    name.functions = function_source(functions_of(p));
    if (*architecture != '\0') name.architecture = architecture;
    const FoundKernel found = find_kernel(name);
    const KernelUsage& usage = found.kernel->usage;
    EXPECT_GT(usage.registers, 0);
    EXPECT_LE(usage.stack_bytes, local_bytes);
    EXPECT_LE(usage.spill_store_bytes, local_bytes);
    EXPECT_LE(usage.spill_load_bytes, local_bytes);
    EXPECT_EQ(usage.serialised, 0) << "ptxas serialises the products";
  }

 private:
  std::optional<Function> score_, mask_;
  const std::vector<Tensor> gradients_ = std::vector<Tensor>(5, Tensor(nullptr, DType::f32, {1}));
  std::array<std::int32_t, 8> places_{};
};

TEST_P(UsualFunctions, ForwardHasItsLocalMemory) {
  if (GetParam().captured_gradients) return;  // forward there are none
  for (const int head_dim : {64, 128}) {
    SCOPED_TRACE(head_dim);
    if (!is_compiled(head_dim == 64)) continue;
    const Problem p = problem(head_dim, Pass::forward);
    const ForwardConfig config = with_functions(choose_forward_config(CallFacts(p)), p);
    ASSERT_EQ(forward_objection(config), "");
    ASSERT_TRUE(config.functions.given());
    expect_fast(p, kernel_of(config).name(config), GetParam().local_bytes);
    ASSERT_EQ(config.functions.block_lists, p.mask_function != nullptr);
    if (config.functions.block_lists) expect_fast(p, kernels::list_blocks.name(config), 0);
  }
}

TEST_P(UsualFunctions, BackwardHasItsLocalMemory) {
  for (const int head_dim : {64, 128}) {
    SCOPED_TRACE(head_dim);
    if (!is_compiled(head_dim == 64)) continue;
    const Problem p = problem(head_dim, Pass::backward);
    const BackwardConfig config = choose_backward_config(CallFacts(p));
    ASSERT_EQ(backward_objection(config), "");
    ASSERT_TRUE(config.functions.given());
    expect_fast(p, kernels::backward.name(config),
                head_dim == 64 ? GetParam().backward_of_64 : GetParam().backward_of_128);
    ASSERT_EQ(config.functions.block_lists, p.mask_function != nullptr);
    if (config.functions.block_lists) expect_fast(p, kernels::list_query_blocks.name(config), 0);
  }
}

constexpr struct {
  const char* name;
  int shared_bytes;  ///< of an SM
  int head_dim;
} sm80_architectures[] = {{"sm_80", 164 * 1024, 128}, {"sm_86", 100 * 1024, 64}};

/// The family sm80.
TEST_P(UsualFunctions, Sm80ForwardHasItsLocalMemory) {
  if (GetParam().captured_gradients) return;  // forward there are none
  for (const auto& [name, shared_bytes, head_dim] : sm80_architectures) {
    SCOPED_TRACE(name);
    if (!is_compiled(head_dim == 128)) continue;
    const Problem p = problem(head_dim, Pass::forward);
    const Sm80ForwardConfig config =
        with_functions(choose_sm80_forward_config(
                           CallFacts(p, {.family = Family::sm80, .shared_bytes_per_sm = shared_bytes})),
                       p);
    ASSERT_TRUE(config.functions.given());
    ASSERT_EQ(forward_objection(config, shared_bytes), "");
    expect_fast(p, kernel_of(config).name(config), GetParam().sm80_local_bytes, name);
    ASSERT_EQ(config.functions.block_lists, p.mask_function != nullptr);
    if (config.functions.block_lists) expect_fast(p, kernels::list_blocks.name(config), 0, name);
  }
}

TEST_P(UsualFunctions, Sm80BackwardHasItsLocalMemory) {
  for (const auto& [name, shared_bytes, head_dim] : sm80_architectures) {
    SCOPED_TRACE(name);
    if (!is_compiled(head_dim == 128)) continue;
    const Problem p = problem(head_dim, Pass::backward);
    const Sm80BackwardConfig config = choose_sm80_backward_config(
        CallFacts(p, {.family = Family::sm80, .shared_bytes_per_sm = shared_bytes}));
    ASSERT_TRUE(config.functions.given());
    ASSERT_EQ(backward_objection(config, shared_bytes), "");
    expect_fast(p, kernel_of(config).name(config), 0, name);
    ASSERT_EQ(config.functions.block_lists, p.mask_function != nullptr);
    if (config.functions.block_lists) expect_fast(p, kernels::list_query_blocks.name(config), 0, name);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, UsualFunctions, testing::ValuesIn(usual),
                         [](const auto& f) { return f.param.name; });

}  // namespace
}  // namespace tandem::gpu
