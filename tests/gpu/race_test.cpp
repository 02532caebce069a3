// The race of `tandem tune` on the fake driver, whose device memory is the host's: the launches here write
// results themselves.
#include "race.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "gpu/kernels.hpp"
#include "ops/pack/launch.hpp"
#include "tandem/error.hpp"

namespace tandem::cli {
namespace {

constexpr std::size_t elements = 64;

/// Compiles two small kernels before the fake driver is opened, which NVRTC would take for the real one.
std::vector<gpu::KernelName> kernels() {
  std::vector<gpu::KernelName> names;
  for (const bool paired : {false, true})
    names.push_back(gpu::kernels::pack.name(PackConfig{.paired = paired}));
  for (const gpu::KernelName& name : names) gpu::find_kernel(name);
  return names;
}

class RaceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = gpu::why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) == nullptr &&
        dlopen("libcuda.so.1", RTLD_NOW) != nullptr)
      GTEST_SKIP() << "this machine has a driver of its own";
    names_ = kernels();
    ASSERT_NE(dlopen(TANDEM_FAKE_DRIVER, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  }

  /// Kernel i writes values[i]; a NaN is not written, an infinity is a driver error.
  std::vector<ItemReport> race_of(const std::vector<float>& values) {
    const auto worker = [&](const std::vector<ItemReport>& reports, const Reporter& reporter) {
      RaceCourse course;
      course.outputs.push_back({.name = "out",
                                .buffer = gpu::DeviceBuffer(0, elements * 4),
                                .dtype = DType::f32,
                                .tolerance = 0.01});
      for (std::size_t i = 0; i < values.size(); ++i) course.kernels.push_back(names_[i % 2]);
      auto* out = static_cast<float*>(course.outputs[0].buffer.data());
      course.launch = [&values, out](std::size_t i) {
        if (std::isinf(values[i])) throw Error(Status::runtime, "an illegal address");
        if (!std::isnan(values[i])) std::fill_n(out, elements, values[i]);
      };
      course.flops = 1e9;
      return race(course, {.rounds = 3, .burst_ms = 4.0, .compilers = 2}, reports, reporter);
    };
    return supervise(values.size(), std::chrono::seconds(60), worker, [](std::size_t) {});
  }

  std::vector<gpu::KernelName> names_;
};

TEST_F(RaceTest, TimesWhatIsRightAndSaysWhatIsWrongWithTheRest) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto reports = race_of({2.0F, 2.01F, nan, 2.1F, infinity, 1.99F});
  for (const std::size_t i : {0U, 1U, 5U}) {
    EXPECT_EQ(reports[i].failure, "") << i;
    EXPECT_GT(reports[i].facts["registers"], 0) << i;
    // The fake driver's clock says 1 ms for every burst, here of 4 calls.
    EXPECT_DOUBLE_EQ(reports[i].facts["us"], 250.0) << i;
    EXPECT_DOUBLE_EQ(reports[i].facts["tflops"], 4.0) << i;
  }
  EXPECT_NEAR(reports[1].facts["max_difference"], 0.5, 1e-4);
  EXPECT_EQ(reports[2].failure, "out[0] is NaN, or was not written");
  EXPECT_EQ(reports[3].failure, "out is off by 0.1, the bound is 0.02");
  EXPECT_EQ(reports[4].failure, "an illegal address");
}

TEST_F(RaceTest, WithoutTheFirstThereIsNothingToCompareWith) {
  EXPECT_THROW(race_of({std::numeric_limits<float>::quiet_NaN(), 1.0F}), Error);
  EXPECT_THROW(race_of({std::numeric_limits<float>::infinity(), 1.0F}), Error);
}

}  // namespace
}  // namespace tandem::cli
