// Every call is a range in the timeline of a profiler that asks for ranges, ended where the call fails too.
#include "gpu/nvtx.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include "tandem/attention.hpp"

namespace tandem::gpu {
namespace {

TEST(Nvtx, ACallIsARange) {
  setenv("NVTX_INJECTION64_PATH", TANDEM_FAKE_NVTX, 1);  // NOLINT(concurrency-mt-unsafe): the only thread
  ASSERT_TRUE(ranges_are_watched());
  std::array<float, 2 * 4 * 8> q{};
  std::array<float, 2 * 4 * 8> out{};
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(q.data(), DType::f32, {1, 4, 2, 8});
  args.out = Tensor(out.data(), DType::f32, {1, 4, 2, 8});
  args.options.window_left = 1;
  forward(args, {.threads = 1});
  alignas(256) std::array<char, 256> small{};
  EXPECT_THROW(forward(args, {.threads = 1, .workspace = small.data(), .workspace_bytes = 1}), Error);
  void* tool = dlopen(TANDEM_FAKE_NVTX, RTLD_NOW);
  ASSERT_NE(tool, nullptr);
  const auto seen = reinterpret_cast<const char* (*)()>(dlsym(tool, "fake_nvtx_seen"));
  EXPECT_STREQ(seen(),
               "tandem forward f32 b1 q4 k4 h2/2 d8/8 window 1,-1[]tandem forward f32 b1 q4 k4 h2/2 d8/8 "
               "window 1,-1[]");
}

}  // namespace
}  // namespace tandem::gpu
