// What a machine without a GPU says: a clear Error, before anything is written.
#include <gtest/gtest.h>

#include <array>

#include "gpu/driver.hpp"
#include "tandem/parts.hpp"

namespace tandem::gpu {
namespace {

TEST(WithoutDriver, TensorsOnCudaAreAClearError) {
  if (why_no_driver().empty()) GTEST_SKIP() << "this machine has a GPU";
  std::array<std::uint16_t, 2 * 4 * 64> memory{};  // q, k and v; then out
  const Device cuda{.kind = Device::Kind::cuda, .index = 0};
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(memory.data(), DType::bf16, {1, 4, 1, 64}, cuda);
  args.out = Tensor(memory.data() + 4 * 64, DType::bf16, {1, 4, 1, 64}, cuda);
  try {
    forward(args);
    FAIL() << "ran without a driver";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::unsupported) << e.what();
    EXPECT_NE(std::string(e.what()).find("driver"), std::string::npos) << e.what();
  }
}

TEST(WithoutDriver, PartsOnCudaAreTheSameError) {
  if (why_no_driver().empty()) GTEST_SKIP() << "this machine has a GPU";
  std::array<float, 4 * 64 + 4> memory{};
  const Device cuda{.kind = Device::Kind::cuda, .index = 0};
  ForwardPartArgs args;
  args.q = args.k = args.v = ConstTensor(memory.data(), DType::bf16, {1, 4, 1, 64}, cuda);
  std::array<float, 4 * 64 + 4> results{};
  args.out = Tensor(results.data(), DType::f32, {1, 4, 1, 64}, cuda);
  args.lse = Tensor(results.data() + 4 * 64, DType::f32, {1, 1, 4}, cuda);
  for (const bool accumulate : {false, true}) {
    args.accumulate = accumulate;
    try {
      forward_part(args);
      FAIL() << "ran without a driver";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::unsupported) << e.what();
      EXPECT_NE(std::string(e.what()).find("driver"), std::string::npos) << e.what();
    }
  }
}

TEST(WithoutDriver, AFailedCallNamesTheCall) {
  try {
    check(2, "cuMemAlloc");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_memory);
    EXPECT_NE(std::string(e.what()).find("cuMemAlloc"), std::string::npos);
  }
}

}  // namespace
}  // namespace tandem::gpu
