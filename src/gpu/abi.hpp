// The part of the CUDA driver's binary interface that Tandem uses, declared here so that the build needs no
// CUDA headers. These layouts and numbers are frozen by NVIDIA (libcuda.so.1 keeps its ABI);
// tests/gpu/abi_test.cpp compares them with cuda.h wherever one is found.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::gpu::abi {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextOpaque*;
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using Stream = struct StreamOpaque*;
using Event = struct EventOpaque*;

constexpr Result success = 0;
constexpr Result error_out_of_memory = 2;
constexpr Result error_no_device = 100;
constexpr Result error_invalid_image = 200;
constexpr Result error_no_binary_for_gpu = 209;
constexpr Result error_unsupported_ptx_version = 222;

enum class DeviceAttribute : int {
  clock_rate = 13,
  multiprocessor_count = 16,
  memory_clock_rate = 36,
  memory_bus_width = 37,
  l2_cache_size = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  max_shared_memory_per_block_optin = 97,
};

enum class FunctionAttribute : int {
  local_size_bytes = 3,
  num_regs = 4,
  max_dynamic_shared_size_bytes = 8,
  preferred_shared_memory_carveout = 9,
  non_portable_cluster_size_allowed = 14,
};

enum class LaunchAttributeId : int {
  cooperative = 2,
  cluster_dimension = 4,
  programmatic_stream_serialization = 6,
};

union LaunchAttributeValue {
  char pad[64];
  struct {
    unsigned int x, y, z;
  } cluster;
  int cooperative;
  int programmatic_stream_serialization;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned int grid_x, grid_y, grid_z;
  unsigned int block_x, block_y, block_z;
  unsigned int shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned int attribute_count;
};

constexpr unsigned int stream_non_blocking = 1;

enum class TensorMapType : int { u8 = 0, f16 = 6, f32 = 7, bf16 = 9 };
enum class TensorMapSwizzle : int { none = 0, b32 = 1, b64 = 2, b128 = 3 };
constexpr int tensor_map_l2_promotion_128 = 2;
constexpr int tensor_map_l2_promotion_256 = 3;

}  // namespace tandem::gpu::abi
