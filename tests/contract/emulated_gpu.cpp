#include "emulated_gpu.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <vector>

#include "cpu/cpu.hpp"
#include "harness/pairwise.hpp"

namespace tandem::kernel_tests {
namespace {

/// Picks a kernel for each case.
class EmulatedGpu : public harness::Runner {
 public:
  explicit EmulatedGpu(const EmulatedKernels& kernels)
      : name_(kernels.name), backward_(kernels.backward), eight_bit_backward_(kernels.eight_bit_backward) {
    add(runners_, kernels.whole);
    add(sharing_, kernels.sharing);
    add(sharing_, kernels.whole);
    add(grouped_, kernels.grouped);
    add(decoding_, kernels.decoding);
    add(wide_, kernels.wide);
    add(listed_, kernels.listed);
    add(maxima_, kernels.maxima);
  }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::string refuses(const harness::Case& spec) const override {
    // The lines are many: a case of nine tiles takes 20 to 50 ms. A test's first may be larger.
    const double too_many_scores = choice.all().pairs() == 0 ? 6e5 : 1.5e5;
    constexpr double too_many_heads = 64;
    const double heads =
        static_cast<double>(spec.heads_q) * (spec.packed_q ? 1.0 : static_cast<double>(spec.batch));
    const double scores = heads * static_cast<double>(spec.rows_q()) * static_cast<double>(spec.rows_k());
    if (heads > too_many_heads || spec.batch > 64 || scores > too_many_scores) return "too large to emulate";
    const bool found = in_8_bits(spec) ? find_eight_bit_backward(spec) != nullptr : find(spec) != nullptr;
    if (!found) return "no kernel was compiled for it";
    return choice.take(spec) ? "" : "other cases have its pairs of features";
  }
  [[nodiscard]] std::string refuses_max_logits(const harness::Case& spec) const override {
    return find_with_maxima(spec) != nullptr ? "" : "no kernel that finds them was compiled for it";
  }
  void forward(harness::Call& call) override {
    ++calls;
    emulated.add(harness::features_of(call.spec));
    if (in_8_bits(call.spec)) {
      // Gradients are what is emulated: 8-bit forward kernels have tests of their own.
      tandem::forward(call.forward_args(), {.threads = 1});
    } else if (call.max_logits.given()) {
      find_with_maxima(call.spec)->forward(call);
    } else {
      pick(call).forward(call);
    }
  }
  [[nodiscard]] harness::Accumulators accumulators() const override {
    return harness::Accumulators::tensor_cores;
  }
  void backward(harness::Call& call) override {
    if (in_8_bits(call.spec)) {
      ++gradients;
      return run_eight_bit_backward(*find_eight_bit_backward(call.spec), call, {});
    }
    if (const EmulatedBackward* const kernels = find_backward(call.spec)) {
      ++gradients;
      return run_backward(*kernels, call, {});
    }
    on_cpu.push_back(call.spec.describe());
    pick(call).backward(call);
  }

  mutable harness::PairwiseChoice choice;  ///< of the test's cases that could be emulated
  harness::PairwiseCover emulated;         ///< what those had that were
  int calls = 0;
  bool clusters = false;            ///< the test takes kernels `decode` in clusters, where there are some
  std::size_t gradients = 0;        ///< calls of the test's whose gradients were emulated
  std::vector<std::string> on_cpu;  ///< those that no kernel was compiled for

 private:
  using Runners = std::vector<std::unique_ptr<EmulatorRunner>>;

  static void add(Runners& runners, const std::vector<std::span<const EmulatedForward>>& families) {
    for (const auto& kernels : families) {
      for (const EmulatedForward& kernel : kernels)
        runners.push_back(std::make_unique<EmulatorRunner>(kernel));
    }
  }
  /// Lists are of mask functions on equal lengths, for additions in any order.
  static bool suits_lists(const EmulatedBackwardConfig& config, const harness::Case& c) {
    const bool varlen = c.packed_q || c.packed_k || !c.used_q.empty() || !c.used_k.empty();
    return !c.mask_function.empty() && !varlen && !c.of_cache() && !c.options.deterministic &&
           (config.mask.causal || !windowed(c));
  }
  static bool windowed(const harness::Case& c) {
    return c.options.causal || c.options.window_left >= 0 || c.options.window_right >= 0;
  }
  /// One kernel with functions knows no mask and no lengths.
  static bool suits_mask(const Mask& mask, const harness::Case& c) {
    const bool varlen = c.packed_q || c.packed_k || !c.used_q.empty() || !c.used_k.empty();
    return mask.varlen || (!varlen && (mask.causal || !windowed(c)) && !c.of_cache());
  }
  /// The general kernels know every mask and any lengths, and pad head dimensions.
  static bool suits(const EmulatedBackwardConfig& config, const harness::Case& c) {
    return c.dtype == (config.tiling.element == Element::f16 ? DType::f16 : DType::bf16) &&
           c.head_dim_qk <= config.tiling.head_dim_qk && c.head_dim_v <= config.tiling.head_dim_v &&
           (config.transform == ScoreTransform::softcap) == (c.options.softcap > 0.0F) &&
           config.f32_dq == (c.f32_gradients % 2 == 1) && config.f32_dk_dv == (c.f32_gradients / 2 == 1) &&
           config.functions.score_function == !c.score_function.empty() &&
           config.functions.dropout == (c.options.dropout_p > 0.0F) &&
           config.functions.dropout_places != c.dropout_places.empty() && suits_mask(config.mask, c);
  }
  static bool in_8_bits(const harness::Case& c) { return c.options.backward_precision != Precision::exact; }
  static bool suits(const EightBitBackwardConfig& config, const harness::Case& c) {
    return c.dtype == (config.tiling.element == Element::f16 ? DType::f16 : DType::bf16) &&
           c.head_dim_qk == config.tiling.head_dim_qk && c.head_dim_v == config.tiling.head_dim_v &&
           config.schedule.deterministic == c.options.deterministic && !c.options.strict &&
           f32_gradients_of(config) == (c.f32_gradients | (c.f32_gradients & 2U) << 1U) &&
           suits_mask(config.mask, c);
  }
  [[nodiscard]] const EmulatedEightBitBackward* find_eight_bit_backward(const harness::Case& c) const {
    for (const auto& family : eight_bit_backward_) {
      for (const EmulatedEightBitBackward& kernels : family) {
        if (suits(kernels.config, c)) return &kernels;
      }
    }
    return nullptr;
  }
  [[nodiscard]] const EmulatedBackward* find_backward(const harness::Case& c) const {
    const bool functions =
        !c.score_function.empty() || !c.mask_function.empty() || c.options.dropout_p > 0.0F;
    for (const auto& family : backward_) {
      for (const EmulatedBackward& kernels : family) {
        if (kernels.config.functions.given() != functions || !suits(kernels.config, c)) continue;
        if (kernels.config.functions.captured_gradients == c.differentiated.empty()) continue;
        if (kernels.config.functions.block_lists && !suits_lists(kernels.config, c)) continue;
        return &kernels;
      }
    }
    return nullptr;
  }
  /// Few queries take the kernels that share keys, those of grouped heads the kernels with heads as rows, and
  /// the fewest the kernel `decode`, as the plan has it. Functions on equal lengths take listed key blocks.
  [[nodiscard]] harness::Runner* find(const harness::Case& spec) const {
    const std::int64_t batch = std::max<std::int64_t>(spec.batch, 1);
    const bool few = spec.rows_q() <= 64 * batch;
    const std::int64_t group = spec.heads_kv > 0 ? spec.heads_q / spec.heads_kv : 1;
    if (std::max(spec.head_dim_qk, spec.head_dim_v) > 256) return find_in(wide_, spec, few);
    for (const auto& runner : listed_) {
      if (runner->refuses(spec).empty()) return runner.get();
    }
    harness::Runner* decoding = nullptr;
    for (const auto& runner : decoding_) {
      if (spec.rows_q() * group > decode_rows * batch || !runner->refuses(spec).empty()) continue;
      // Tests compare the bits of pages with those of rows: both are in clusters or neither. f16 has none of
      // rows.
      if (clusters && spec.dtype != DType::f16 && runner->in_cluster()) return runner.get();
      if (decoding == nullptr) decoding = runner.get();
    }
    if (decoding != nullptr) return decoding;
    for (const auto& runner : grouped_) {
      if (few && spec.heads_q > spec.heads_kv && runner->refuses(spec).empty()) return runner.get();
    }
    for (const auto& runner : few ? sharing_ : runners_) {
      if (runner->refuses(spec).empty()) return runner.get();
    }
    return nullptr;
  }
  static harness::Runner* find_in(const Runners& runners, const harness::Case& spec, bool few) {
    for (const auto& runner : runners) {
      if ((few || !runner->splits()) && runner->refuses(spec).empty()) return runner.get();
    }
    return nullptr;
  }
  [[nodiscard]] harness::Runner* find_with_maxima(const harness::Case& spec) const {
    return find_in(maxima_, spec, spec.rows_q() <= 64 * std::max<std::int64_t>(spec.batch, 1));
  }
  harness::Runner& pick(const harness::Call& call) const {
    if (harness::Runner* const runner = find(call.spec)) return *runner;
    throw std::logic_error("no kernel was compiled for it");
  }

  std::string name_;
  std::vector<std::span<const EmulatedBackward>> backward_;
  std::vector<std::span<const EmulatedEightBitBackward>> eight_bit_backward_;
  Runners runners_, sharing_, grouped_, decoding_, wide_, listed_, maxima_;
};

/// A test of which no case was small enough would pass without having tried anything; one whose cases were
/// left out, without having tried all that they try. Gradients that the CPU computes, from what was emulated,
/// are counted and reported.
class EveryTestRuns : public testing::EmptyTestEventListener {
 public:
  explicit EveryTestRuns(EmulatedGpu& gpu) : gpu_(gpu) {}
  void OnTestStart(const testing::TestInfo& info) override {
    gpu_.calls = 0;
    gpu_.clusters = std::strlen(info.name()) % 2 == 0;  // one of two tests
    gpu_.gradients = 0;
    gpu_.on_cpu.clear();
    gpu_.choice = {};
    gpu_.emulated = {};
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    if (gpu_.calls == 0 && !info.result()->Skipped()) ADD_FAILURE() << "nothing was emulated";
    const std::vector<std::string> missing = gpu_.emulated.missing(gpu_.choice.all());
    if (!missing.empty()) ADD_FAILURE() << missing.size() << " pairs were not tried: " << missing.front();
    report_gradients(std::string(info.test_suite_name()) + "." + info.name());
  }
  void OnTestProgramEnd(const testing::UnitTest&) override {
    std::cout << "gradients: " << emulated_ << " calls emulated, " << on_cpu_ << " on the CPU\n";
  }

 private:
  /// No test passes off the CPU's gradients as a kernel's.
  void report_gradients(const std::string& test) {
    emulated_ += gpu_.gradients;
    on_cpu_ += gpu_.on_cpu.size();
    if (gpu_.on_cpu.empty()) return;
    testing::Test::RecordProperty("gradients_on_the_cpu", static_cast<int>(gpu_.on_cpu.size()));
    std::cout << test << ": the CPU computed the gradients of " << gpu_.on_cpu.size()
              << " calls, which no kernel was compiled for: " << gpu_.on_cpu.front() << "\n";
  }

  EmulatedGpu& gpu_;
  std::size_t emulated_ = 0;
  std::size_t on_cpu_ = 0;
};

/// What has nothing for the emulator: bits of max_logits, for which kernels find other references, logits
/// beyond 2^27 of many queries, errors before a launch, other element types, sizes beyond its patience, calls
/// past the runner.
constexpr const char* filter =
    "-Contract01_EveryElementWritten.EightBitInputs:*.EightBitQueriesAndF32OnRowsThatAreNoCache:"
    "Contract04_Masks.BelowMinusOneIsAnError:Contract08_NoSentinel.LogitsFrom1e9To1e12:Contract08_NoSentinel."
    "ScaleOf1e30:"
    "Contract08_NoSentinel.*OfManyQueriesAreTheirMean:Contract08_NoSentinel.OneKeyWithAFarLogitIsItsValue:"
    "Contract09_Sizes.*Beyond65535:Contract10_Strides.FusedQkvAndItsGradientInOneBufferEach:"
    "Contract12_Metadata.StridedIsReadByItsStride:"
    "Contract18_Caches.ARequestDoesNot*";

}  // namespace

int run_contract(int argc, char** argv, const EmulatedKernels& kernels) {
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(filter) == "*") testing::GTEST_FLAG(filter) = std::string(filter) + kernels.without;
  EmulatedGpu gpu(kernels);
  harness::use_only(gpu);
  testing::UnitTest::GetInstance()->listeners().Append(new EveryTestRuns(gpu));
  return RUN_ALL_TESTS();
}

}  // namespace tandem::kernel_tests
