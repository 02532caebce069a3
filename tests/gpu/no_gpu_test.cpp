// What a machine without a GPU says: a clear Error, before anything is written.
#include <gtest/gtest.h>

#include <array>

#include "gpu/driver.hpp"
#include "harness/error_of.hpp"
#include "tandem/attention.hpp"

namespace tandem::gpu {
namespace {

TEST(WithoutDriver, TensorsOnCudaAreAClearError) {
  if (why_no_driver().empty()) GTEST_SKIP() << "this machine has a GPU";
  std::array<std::uint16_t, 2 * 4 * 64> memory{};  // q, k and v; then out
  const Device cuda{.kind = Device::Kind::cuda, .index = 0};
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(memory.data(), DType::bf16, {1, 4, 1, 64}, cuda);
  args.out = Tensor(memory.data() + 4 * 64, DType::bf16, {1, 4, 1, 64}, cuda);
  const std::string error = error_of(Status::unsupported, [&] { forward(args); });
  EXPECT_NE(error.find("driver"), std::string::npos) << error;
}

TEST(WithoutDriver, AFailedCallNamesTheCall) {
  const std::string error = error_of(Status::out_of_memory, [] { check(2, "cuMemAlloc"); });
  EXPECT_NE(error.find("cuMemAlloc"), std::string::npos) << error;
}

}  // namespace
}  // namespace tandem::gpu
