// Lines of the contract that need a GPU to be tried: what a graph and device memory do to a call.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "gpu/device.hpp"
#include "gpu_cases.hpp"
#include "harness/error_of.hpp"
#include "tandem/attention.hpp"

namespace tandem::gpu {
namespace {

constexpr Device cuda{.kind = Device::Kind::cuda, .index = 0};

/// bf16 numbers in [-1, 1), the same for the same seed.
std::vector<std::uint16_t> numbers(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) {
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    // Sign and 7 bits of mantissa at random, exponents 2^-4 to 2^-1.
    value = static_cast<std::uint16_t>((seed >> 48 & 0x80ff) | (0x3d80 + (seed >> 40 & 1) * 0x80));
  }
  return values;
}

/// q, k, v and out of one shape, (batch, rows, heads, dim), with strides of their own.
struct Tensors {
  std::int64_t batch, rows, heads, dim, batch_stride;
  DeviceBuffer q, k, v, out;

  Tensors(std::int64_t batch_, std::int64_t rows_, std::int64_t heads_, std::int64_t dim_,
          std::int64_t batch_stride_)
      : batch(batch_), rows(rows_), heads(heads_), dim(dim_), batch_stride(batch_stride_) {
    const std::size_t elements = static_cast<std::size_t>((batch - 1) * batch_stride + rows * heads * dim);
    std::uint64_t seed = 1;
    for (DeviceBuffer* buffer : {&q, &k, &v, &out}) {
      *buffer = DeviceBuffer(0, elements * 2);
      const auto values = numbers(static_cast<std::size_t>(batch * rows * heads * dim), seed++);
      for (std::int64_t b = 0; b < batch; ++b) {
        buffer->copy_from_host(values.data() + b * rows * heads * dim,
                               static_cast<std::size_t>(rows * heads * dim) * 2, nullptr,
                               static_cast<std::size_t>(b * batch_stride) * 2);
      }
    }
    synchronize(0);
  }

  [[nodiscard]] Tensor view(const DeviceBuffer& buffer) const {
    Tensor t(buffer.data(), DType::bf16, {batch, rows, heads, dim}, cuda);
    t.stride[0] = batch_stride;
    return t;
  }
  [[nodiscard]] ForwardArgs args() const {
    ForwardArgs a;
    a.q = view(q);
    a.k = view(k);
    a.v = view(v);
    a.out = view(out);
    return a;
  }
  [[nodiscard]] std::vector<std::uint16_t> result() const {
    std::vector<std::uint16_t> values(static_cast<std::size_t>(batch * rows * heads * dim));
    for (std::int64_t b = 0; b < batch; ++b) {
      out.copy_to_host(values.data() + b * rows * heads * dim,
                       static_cast<std::size_t>(rows * heads * dim) * 2, nullptr,
                       static_cast<std::size_t>(b * batch_stride) * 2);
    }
    synchronize(0);
    return values;
  }
};

class GpuContract : public GpuTest {};

TEST_F(GpuContract, TensorsBeyondTwoToThe31ElementsGiveTheSameBits) {
  const Tensors compact(2, 300, 2, 64, 300 * 2 * 64);
  forward(compact.args());
  const std::int64_t far = (std::int64_t{1} << 31) + 4096;
  const Tensors wide(2, 300, 2, 64, far);
  forward(wide.args());
  EXPECT_EQ(wide.result(), compact.result());
}

TEST_F(GpuContract, ACheckedCallNamesWhatIsWrongInDeviceMemory) {
  const Tensors t(1, 100, 1, 64, 100 * 64);
  const std::int32_t offsets[3] = {0, 60, 40};
  DeviceBuffer cu(0, sizeof(offsets));
  cu.copy_from_host(offsets, sizeof(offsets));
  ForwardArgs args = t.args();
  for (ConstTensor* tensor : {&args.q, &args.k, &args.v})
    *tensor = ConstTensor(tensor->data, DType::bf16, {100, 1, 64}, cuda);
  args.out = Tensor(args.out.data, DType::bf16, {100, 1, 64}, cuda);
  args.cu_seqlens_q = args.cu_seqlens_k = ConstTensor(cu.data(), DType::i32, {3}, cuda);
  args.options.check = true;
  const std::string error = error_of(Status::invalid_argument, [&] { forward(args); });
  EXPECT_NE(error.find("cu_seqlens_q[2]"), std::string::npos) << error;
  args.options.check = false;
  forward(args);  // garbage in, but nothing out of bounds
  synchronize(0);
}

/// The driver's graph functions, which only these tests need.
struct Graphs {
  static constexpr int thread_local_mode = 1;
  static constexpr int kernel_node = 0;
  template <typename F>
  static F* find(const char* name) {
    return reinterpret_cast<F*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), name));
  }
  int (*begin)(abi::Stream, int) = find<int(abi::Stream, int)>("cuStreamBeginCapture_v2");
  int (*end)(abi::Stream, void**) = find<int(abi::Stream, void**)>("cuStreamEndCapture");
  int (*nodes)(void*, void**, std::size_t*) = find<int(void*, void**, std::size_t*)>("cuGraphGetNodes");
  int (*type)(void*, int*) = find<int(void*, int*)>("cuGraphNodeGetType");

  /// The kinds of what `call` puts into `stream`.
  template <typename F>
  [[nodiscard]] std::vector<int> nodes_of(F call, abi::Stream stream) const {
    void* graph = nullptr;
    check(begin(stream, thread_local_mode), "cuStreamBeginCapture");
    call();
    check(end(stream, &graph), "cuStreamEndCapture");
    std::size_t count = 0;
    check(nodes(graph, nullptr, &count), "cuGraphGetNodes");
    std::vector<void*> all(count);
    check(nodes(graph, all.data(), &count), "cuGraphGetNodes");
    std::vector<int> kinds(count);
    for (std::size_t i = 0; i < count; ++i) check(type(all[i], &kinds[i]), "cuGraphNodeGetType");
    return kinds;
  }
};

/// A captured call shows what it asks of the device, whatever other processes allocate meanwhile.
TEST_F(GpuContract, WithAWorkspaceACallAllocatesNothing) {
  const Tensors t(1, 100, 1, 64, 100 * 64);
  ForwardArgs args = t.args();
  args.q.data = static_cast<const std::uint16_t*>(args.q.data) + 1;  // must be packed
  args.q.shape[1] = 99;
  args.out.shape[1] = 99;
  const Stream stream(0);
  Execution execution{.stream = stream.get()};
  execution.workspace_bytes = workspace_bytes(args);
  ASSERT_GE(execution.workspace_bytes, 99U * 64 * 2);
  DeviceBuffer workspace(0, execution.workspace_bytes);
  execution.workspace = workspace.data();
  forward(args, execution);  // loads the kernels
  stream.synchronize();

  const Graphs graphs;
  const ContextGuard guard(0);
  const std::vector<int> kernels = {Graphs::kernel_node, Graphs::kernel_node};
  EXPECT_EQ(graphs.nodes_of([&] { forward(args, execution); }, stream.get()), kernels);
  // And without one its allocation is seen.
  execution.workspace = nullptr;
  execution.workspace_bytes = 0;
  EXPECT_EQ(graphs.nodes_of([&] { forward(args, execution); }, stream.get()).size(), kernels.size() + 2);
}

TEST_F(GpuContract, WhatTheGpuCannotRunIsAnErrorThatSaysSo) {
  static float memory[2 * 256];  // never read
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(memory, DType::f32, {1, 4, 1, 64}, cuda);
  args.out = Tensor(memory + 256, DType::f32, {1, 4, 1, 64}, cuda);
  EXPECT_THROW(forward(args), Error);
  args.q.device.index = args.k.device.index = args.v.device.index = args.out.device.index = 99;
  EXPECT_THROW(forward(args), Error);
}

}  // namespace
}  // namespace tandem::gpu
