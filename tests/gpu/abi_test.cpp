// Our declarations of the driver's binary interface against NVIDIA's own header. Built only where cuda.h is
// found.
#include <cuda.h>
#include <gtest/gtest.h>

#include "config/types.hpp"
#include "gpu/abi.hpp"

namespace tandem::gpu {
namespace {

template <typename Ours, typename Theirs>
constexpr int difference(Ours ours, Theirs theirs) {
  return static_cast<int>(ours) - static_cast<int>(theirs);
}

TEST(Abi, HandlesHaveTheDriversSizes) {
  EXPECT_EQ(sizeof(abi::Result), sizeof(CUresult));
  EXPECT_EQ(sizeof(abi::Device), sizeof(CUdevice));
  EXPECT_EQ(sizeof(abi::DevicePointer), sizeof(CUdeviceptr));
  EXPECT_EQ(sizeof(abi::Context), sizeof(CUcontext));
  EXPECT_EQ(sizeof(TensorMap), sizeof(CUtensorMap));
}

TEST(Abi, LaunchStructuresHaveTheDriversLayout) {
  EXPECT_EQ(sizeof(abi::LaunchConfig), sizeof(CUlaunchConfig));
  EXPECT_EQ(offsetof(abi::LaunchConfig, grid_x), offsetof(CUlaunchConfig, gridDimX));
  EXPECT_EQ(offsetof(abi::LaunchConfig, block_x), offsetof(CUlaunchConfig, blockDimX));
  EXPECT_EQ(offsetof(abi::LaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
  EXPECT_EQ(offsetof(abi::LaunchConfig, stream), offsetof(CUlaunchConfig, hStream));
  EXPECT_EQ(offsetof(abi::LaunchConfig, attributes), offsetof(CUlaunchConfig, attrs));
  EXPECT_EQ(offsetof(abi::LaunchConfig, attribute_count), offsetof(CUlaunchConfig, numAttrs));
  EXPECT_EQ(sizeof(abi::LaunchAttribute), sizeof(CUlaunchAttribute));
  EXPECT_EQ(offsetof(abi::LaunchAttribute, value), offsetof(CUlaunchAttribute, value));
  EXPECT_EQ(sizeof(abi::LaunchAttributeValue), sizeof(CUlaunchAttributeValue));
}

TEST(Abi, NumbersAreTheDrivers) {
  using A = abi::DeviceAttribute;
  EXPECT_EQ(abi::error_out_of_memory, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(abi::error_no_device, CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(abi::error_invalid_image, CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(abi::error_no_binary_for_gpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(abi::error_unsupported_ptx_version, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  EXPECT_EQ(difference(A::clock_rate, CU_DEVICE_ATTRIBUTE_CLOCK_RATE), 0);
  EXPECT_EQ(difference(A::multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 0);
  EXPECT_EQ(difference(A::memory_clock_rate, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE), 0);
  EXPECT_EQ(difference(A::memory_bus_width, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH), 0);
  EXPECT_EQ(difference(A::l2_cache_size, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE), 0);
  EXPECT_EQ(difference(A::compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), 0);
  EXPECT_EQ(difference(A::compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), 0);
  EXPECT_EQ(
      difference(A::max_shared_memory_per_block_optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
      0);
  using F = abi::FunctionAttribute;
  EXPECT_EQ(difference(F::local_size_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES), 0);
  EXPECT_EQ(difference(F::num_regs, CU_FUNC_ATTRIBUTE_NUM_REGS), 0);
  EXPECT_EQ(
      difference(F::preferred_shared_memory_carveout, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT), 0);
  EXPECT_EQ(difference(F::max_dynamic_shared_size_bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES), 0);
  using L = abi::LaunchAttributeId;
  EXPECT_EQ(difference(L::cooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE), 0);
  EXPECT_EQ(difference(L::cluster_dimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION), 0);
  EXPECT_EQ(
      difference(L::programmatic_stream_serialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
      0);
  EXPECT_EQ(difference(abi::TensorMapType::u8, CU_TENSOR_MAP_DATA_TYPE_UINT8), 0);
  EXPECT_EQ(difference(abi::TensorMapType::f16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16), 0);
  EXPECT_EQ(difference(abi::TensorMapType::f32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32), 0);
  EXPECT_EQ(difference(abi::TensorMapType::bf16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16), 0);
  EXPECT_EQ(difference(abi::TensorMapSwizzle::b32, CU_TENSOR_MAP_SWIZZLE_32B), 0);
  EXPECT_EQ(difference(abi::TensorMapSwizzle::b64, CU_TENSOR_MAP_SWIZZLE_64B), 0);
  EXPECT_EQ(difference(abi::TensorMapSwizzle::b128, CU_TENSOR_MAP_SWIZZLE_128B), 0);
  EXPECT_EQ(abi::tensor_map_l2_promotion_128, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  EXPECT_EQ(abi::tensor_map_l2_promotion_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  EXPECT_EQ(abi::stream_non_blocking, static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
}

}  // namespace
}  // namespace tandem::gpu
