// The contract's tests with the GPU as the only backend: every case that is of 16 bits, each by the kernels
// that users get for it. Without a GPU every test is skipped, with the reason.
#include <gtest/gtest.h>

#include "gpu/gpu_runner.hpp"

namespace tandem::gpu {
namespace {

class CountingRunner : public GpuRunner {
 public:
  void forward(harness::Call& call) override {
    ++calls;
    GpuRunner::forward(call);
  }
  void append(harness::AppendCall& call) override {
    ++calls;
    GpuRunner::append(call);
  }
  void merge(harness::MergeCall& call) override {
    ++calls;
    GpuRunner::merge(call);
  }
  int calls = 0;  ///< of the test
};

/// Skips all tests before the first where there is no GPU, in words that ctest knows.
class Gpu : public testing::Environment {
 public:
  void SetUp() override {
    if (const std::string why_not = why_no_gpu(); !why_not.empty())
      GTEST_SKIP() << why_not << "\n\n[  SKIPPED ] all tests";
  }
};

/// A test that ran nothing would pass without having tried anything.
class EveryTestRuns : public testing::EmptyTestEventListener {
 public:
  explicit EveryTestRuns(CountingRunner& runner) : runner_(runner) {}
  void OnTestStart(const testing::TestInfo&) override { runner_.calls = 0; }
  void OnTestEnd(const testing::TestInfo& info) override {
    if (runner_.calls == 0 && !info.result()->Skipped()) ADD_FAILURE() << "nothing ran on the GPU";
  }

 private:
  CountingRunner& runner_;
};

/// What has nothing for this runner: bits of max_logits, for which kernels find other references, logits
/// beyond 2^27 of many queries, errors before a launch, f32 alone, calls past the runner, tensors larger than
/// their memory, which the runner cannot copy.
constexpr const char* left_out =
    "-Contract21_MaxLogits.OfOneKeyIsTheLse:Contract21_MaxLogits.ChangesNoBitOfTheOthers:"
    "Contract01_EveryElementWritten.EightBitInputs:*.EightBitQueriesAndF32OnRowsThatAreNoCache:"
    "Contract04_Masks.BelowMinusOneIsAnError:"
    "Contract08_NoSentinel.LogitsFrom1e9To1e12:Contract08_NoSentinel.ScaleOf1e30:"
    "Contract08_NoSentinel.*OfManyQueriesAreTheirMean:Contract08_NoSentinel.OneKeyWithAFarLogitIsItsValue:"
    "Contract09_Sizes.BatchBeyond65535:"
    "Contract09_Sizes.SequencesBeyond65535:Contract09_Sizes.TensorsBeyond2To31Elements:"
    "Contract10_Strides.FusedQkvAndItsGradientInOneBufferEach:"
    "Contract12_Metadata.StridedIsReadByItsStride:"
    "Contract12_Caches.ThirtyTwoThousandPagesOfALargeCache:Contract17_Append.KAndVInterleavedInOneTensor:"
    "Contract17_Append.WithCheckTwoTokens*:Contract19_Functions.PublishedMasks:"
    "Contract19_Functions.PublishedScores:Contract19_Functions.LongerThanARunOfKeys:"
    "Contract19_Functions.BitsOfASequenceWithSplitSize:Contract19_Functions.ThreadsChangeNoBit:"
    "Contract19_Functions.LogitsWithoutASentinel:Contract19_Dropout.ThreadsChangeNoBit:"
    "Contract19_FunctionGradients.ThreadsChangeNoBit";
/// The kernels sm80 lack keys of 8 bits, heads of more than 256 dimensions, and registers for logits beyond
/// 2^27 and for rows of -inf alone, and find no max_logits.
constexpr const char* left_out_of_sm80 =
    ":Contract21_*:*_GradientsIn8Bits.*:*.EightBitQueries*:*_RowScales.*:*.ScalesByRow*:"
    "Contract16_BatchInvariance.KeysOfEightBits:Contract17_Caches.EightBits*:Contract18_Caches.EightBit*:"
    "*_WideHeads.*:*.OfWideHeads:Contract07_NaN.*LowLogits*:"
    "Contract08_NoSentinel.EqualKeysWithGiantLogitsAreTheirMean";

}  // namespace
}  // namespace tandem::gpu

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tandem::gpu::CountingRunner gpu;
  // A caller's filter names what to run; if it has no negative part, these do not run then either.
  std::string& filter = testing::GTEST_FLAG(filter);
  if (filter.find('-') == std::string::npos) {
    filter += tandem::gpu::left_out;
    if (tandem::gpu::why_no_gpu().empty() && tandem::gpu::lacks_kernels())
      filter += tandem::gpu::left_out_of_sm80;
  }
  tandem::harness::use_only(gpu);
  testing::AddGlobalTestEnvironment(new tandem::gpu::Gpu);
  testing::UnitTest::GetInstance()->listeners().Append(new tandem::gpu::EveryTestRuns(gpu));
  return RUN_ALL_TESTS();
}
