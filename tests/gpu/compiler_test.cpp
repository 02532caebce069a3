// NVRTC at work: it needs no GPU. Skipped, with the reason, where there is no NVRTC.
#include "gpu/compiler.hpp"
#include "ops/forward/launch.hpp"

#include <gtest/gtest.h>

#include "gpu/kernel_spec.hpp"
#include "harness/error_of.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

class Compiler : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  }
};

constexpr Source doubling[] = {{"kernels/double.cuh", R"(
    struct Config { int factor = 1; };
    template <Config C> __global__ void scale(float* x) { x[threadIdx.x] *= C.factor; }
)"}};
const KernelName doubled{.header = "kernels/double.cuh", .expression = "scale<Config{.factor = 2}>"};

TEST_F(Compiler, SaysWhichItIs) {
  EXPECT_GE(compiler().major, 12);
  EXPECT_NE(compiler().path.find("nvrtc"), std::string::npos) << compiler().path;
}

TEST_F(Compiler, MakesACubinNamesItsKernelAndCountsItsRegisters) {
  const CompiledKernel kernel = compile(doubled, doubling);
  ASSERT_GT(kernel.image.size(), 4U);
  EXPECT_EQ(std::string(kernel.image.data() + 1, 3), "ELF");
  EXPECT_NE(kernel.symbol.find("scale"), std::string::npos);
  EXPECT_GT(kernel.usage.registers, 0);
  EXPECT_EQ(kernel.usage.stack_bytes, 0);
}

TEST_F(Compiler, MakesPtxForAVirtualArchitecture) {
  KernelName name = doubled;
  name.architecture = portable_architecture;
  const CompiledKernel kernel = compile(name, doubling);
  ASSERT_TRUE(kernel.is_ptx());
  EXPECT_EQ(kernel.image.back(), '\0');
  const std::string text = kernel.image.data();
  EXPECT_EQ(text.size() + 1, kernel.image.size());
  EXPECT_NE(text.find("\n.version "), std::string::npos) << text;
  EXPECT_NE(text.find(".target sm_80"), std::string::npos) << text;
  EXPECT_NE(text.find(".entry " + kernel.symbol), std::string::npos) << text;
  EXPECT_FALSE(compile(doubled, doubling).is_ptx());
}

TEST_F(Compiler, SaysWhatItDoesNotKnow) {
  for (const char* known : {"sm_80", "sm_90a", "compute_80"}) EXPECT_EQ(why_not_compiled_for(known), "");
  EXPECT_TRUE(why_not_compiled_for("sm_999").ends_with(" does not know sm_999"));
}

TEST_F(Compiler, HandsTheLogOnWhenItRefuses) {
  const KernelName wrong{.header = "kernels/double.cuh", .expression = "scale<Config{.divisor = 2}>"};
  const std::string error = error_of(Status::runtime, [&] { compile(wrong, doubling); });
  EXPECT_NE(error.find("divisor"), std::string::npos) << error;
}

TEST_F(Compiler, CompilesTheForwardKernel) {
  ForwardConfig config;
  config.tiling.head_dim_qk = config.tiling.head_dim_v = 64;
  config.tiling.block_n = 64;
  const CompiledKernel kernel = compile(kernel_of(config).name(config));
  EXPECT_NE(kernel.symbol.find("forward"), std::string::npos);
  EXPECT_GT(kernel.usage.registers, 0);
  EXPECT_EQ(kernel.usage.spill_store_bytes, 0);
}

TEST(CompilerLog, YieldsRegistersStackAndSpills) {
  const KernelUsage u = parse_usage(
      "ptxas info    : (C7519) warpgroup.arrive is injected in to allow use of registers in GMMA in function "
      "'f'\n"
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function '_Z1f' for 'sm_90a'\n"
      "ptxas info    : Function properties for _Z1f\n"
      "    64 bytes stack frame, 128 bytes spill stores, 256 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 7 barriers, 64 bytes cumulative stack size\n");
  EXPECT_EQ(u.registers, 168);
  EXPECT_EQ(u.stack_bytes, 64);
  EXPECT_EQ(u.spill_store_bytes, 128);
  EXPECT_EQ(u.spill_load_bytes, 256);
  EXPECT_EQ(u.serialised, 0);
}

TEST(CompilerLog, TellsThatTensorCoreProductsAreSerialised) {
  const KernelUsage u = parse_usage(
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
      "to "
      "insufficient register resources for the wgmma pipeline in the function 'f'\n");
  EXPECT_EQ(u.serialised, 1);
}

TEST(KernelExpression, NamesEveryField) {
  ForwardConfig config;
  config.tiling.element = Element::f16;
  config.mask.causal = true;
  config.transform = ScoreTransform::softcap;
  const std::string text = expression_of(config);
  EXPECT_TRUE(text.starts_with(
      "tandem::ForwardConfig{.tiling = tandem::Tiling{.element = tandem::Element::f16, .head_dim_qk = 128, "))
      << text;
  EXPECT_NE(text.find(", .mask = tandem::Mask{.causal = true, .local = false, .varlen = false, .by_sequence "
                      "= false}, .keys = "
                      "tandem::KeySource::rows, .transform = tandem::ScoreTransform::softcap, "),
            std::string::npos)
      << text;
  EXPECT_TRUE(text.ends_with(
      ", .pingpong = true, .output_late = false, .own_blocks = false, .finds_maxima = false, .split = false, "
      ".invariant = "
      "false}, "
      ".key_type = tandem::OperandType::input, .row_scales = false, "
      ".functions = tandem::Functions{.digest = 0x0ULL, .score_function = "
      "false, "
      ".mask_function = false, .block_lists = false, .dropout = false, .dropout_places = false, "
      ".captured_gradients = false}}"))
      << text;
}

TEST(Sources, AreEmbedded) {
  bool forward = false;
  for (const Source& source : device_sources())
    forward |= std::string(source.name) == "ops/forward/sm90/forward.cuh";
  EXPECT_TRUE(forward);
}

TEST(SourcesDigest, DependsOnWhatAKernelIncludesAlone) {
  const auto digests = [](const char* changed) {
    std::vector<Source> sources{{"entry", "#pragma once\n#include \"a\"\n#include \"b\"\n"},
                                {"a", "#include \"c\"\n"},
                                {"b", "#include \"c\"\n#include \"a\"\n"},
                                {"c", "int x;\n"},
                                {"other", "#include \"c\"\n"}};
    for (Source& source : sources) {
      if (source.name == std::string_view(changed)) source.text = "#include \"c\"\n// a comment\n";
    }
    return std::pair{sources_digest("entry", sources), sources_digest("other", sources)};
  };
  const auto before = digests("");
  EXPECT_NE(before.first, before.second);
  for (const char* included : {"a", "b"}) {
    EXPECT_NE(digests(included).first, before.first) << included;
    EXPECT_EQ(digests(included).second, before.second) << included;
  }
  EXPECT_NE(digests("c").first, before.first);
  EXPECT_NE(digests("c").second, before.second);
  EXPECT_EQ(digests("other").first, before.first);
  // And of the library's own: a kernel's text does not reach another's key.
  std::vector<Source> sources(device_sources().begin(), device_sources().end());
  const std::string header = kernels::forward.name(ForwardConfig{}).header;
  for (Source& source : sources) {
    if (source.name == std::string_view("ops/cache/common/append.cuh")) source.text = "// a comment";
  }
  EXPECT_EQ(sources_digest(header, sources), sources_digest(header));
  EXPECT_NE(sources_digest("ops/cache/common/append.cuh", sources),
            sources_digest("ops/cache/common/append.cuh"));
}

}  // namespace
}  // namespace tandem::gpu
