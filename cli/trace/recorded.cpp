#include "trace/recorded.hpp"

#include <array>
#include <random>
#include <vector>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "launch.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/trace.hpp"
#include "tandem/attention.hpp"

namespace tandem::cli::trace {
namespace {

/// Values from -1 to 1, the same ones at each run.
std::vector<std::uint16_t> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::uint16_t& value : values) {
    const float x = static_cast<float>(static_cast<std::int32_t>(random())) * 0x1p-31F;
    value = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, x) >> 16);
  }
  return values;
}

/// The arguments of a call of `heads` heads on memory at these addresses.
ForwardArgs arguments(const ForwardConfig& config, const TracedShape& shape, std::int64_t heads,
                      Device device, const std::array<void*, 5>& memory) {
  const Tiling& tiling = config.tiling;
  const std::int64_t queries = shape.tiles * tiling.block_m;
  ForwardArgs args;
  args.q = ConstTensor(memory[0], DType::bf16, {1, queries, heads, tiling.head_dim_qk}, device);
  args.k = ConstTensor(memory[1], DType::bf16, {1, shape.keys, heads, tiling.head_dim_qk}, device);
  args.v = ConstTensor(memory[2], DType::bf16, {1, shape.keys, heads, tiling.head_dim_v}, device);
  args.out = Tensor(memory[3], DType::bf16, {1, queries, heads, tiling.head_dim_v}, device);
  args.lse = Tensor(memory[4], DType::f32, {1, heads, queries}, device);
  args.options.causal = config.mask.causal;
  return args;
}

}  // namespace

emulator::Recording record(const EmulatedKernel& kernel, const TracedShape& shape) {
  const Tiling& tiling = kernel.config.tiling;
  const std::int64_t queries = shape.tiles * tiling.block_m;
  std::vector<std::uint16_t> q = random_values(queries * tiling.head_dim_qk, 1);
  std::vector<std::uint16_t> k = random_values(shape.keys * tiling.head_dim_qk, 2);
  std::vector<std::uint16_t> v = random_values(shape.keys * tiling.head_dim_v, 3);
  std::vector<std::uint16_t> out(static_cast<std::size_t>(queries * tiling.head_dim_v));
  std::vector<float> lse(static_cast<std::size_t>(queries));
  const Problem problem = make_problem(
      arguments(kernel.config, shape, 1, {}, {q.data(), k.data(), v.data(), out.data(), lse.data()}));

  emulator::Recording recording;
  emulator::Options options;
  options.recording = &recording;
  options.buffers = {emulator::readable(q), emulator::readable(k), emulator::readable(v),
                     emulator::writable(out), emulator::writable(lse)};
  const ForwardParams params = gpu::make_forward_params(problem, tiling, gpu::forward_maps(problem, tiling),
                                                        &emulator::encode, 1, nullptr);
  emulator::launch(kernel.kernel, params,
                   {.blocks = 1,
                    .threads = static_cast<unsigned>(kernel.config.threads()),
                    .shared_bytes = static_cast<std::size_t>(forward_shared_bytes(kernel.config))},
                   options);
  return recording;
}

std::vector<std::vector<TraceRecord>> record_on_gpu(const ForwardConfig& config, const TracedShape& shape) {
  constexpr Device device{.kind = Device::Kind::cuda, .index = 0};
  const Tiling& tiling = config.tiling;
  const std::int64_t heads = gpu::properties(device.index).multiprocessors;
  const std::int64_t queries = heads * shape.tiles * tiling.block_m;
  const std::int64_t keys = heads * shape.keys;
  std::array<gpu::DeviceBuffer, 5> buffers;
  std::array<void*, 5> memory{};
  const std::array<std::int64_t, 5> words = {queries * tiling.head_dim_qk, keys * tiling.head_dim_qk,
                                             keys * tiling.head_dim_v, queries * tiling.head_dim_v,
                                             2 * queries};
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    buffers[i] = gpu::DeviceBuffer(device.index, static_cast<std::size_t>(words[i]) * sizeof(std::uint16_t));
    memory[i] = buffers[i].data();
    if (i > 2) continue;
    const std::vector<std::uint16_t> values = random_values(words[i], static_cast<unsigned>(i) + 1);
    buffers[i].copy_from_host(values.data(), values.size() * sizeof(std::uint16_t));
  }
  const Problem problem = make_problem(arguments(config, shape, heads, device, memory));
  return gpu::run_traced(problem, config, static_cast<unsigned>(heads));
}

}  // namespace tandem::cli::trace
