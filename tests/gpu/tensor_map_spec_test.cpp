// Which tensors TMA can move.
#include "config/tensor_map_spec.hpp"

#include <gtest/gtest.h>

namespace tandem {
namespace {

const void* at(std::uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

/// (batch 2, rows 100, heads 8, head_dim 64) as (head_dim, rows, heads, batch).
TensorMapSpec plain() {
  return {.base = at(0x1000),
          .rank = 4,
          .dims = {64, 100, 8, 2},
          .strides = {8 * 64 * 2, 64 * 2, 100 * 8 * 64 * 2},
          .box = {64, 128, 1, 1},
          .swizzle = Swizzle::b128};
}

TEST(TensorMap, ReadsContiguousTensors) {
  EXPECT_TRUE(tma_can_read(plain()));
}

TEST(TensorMap, ReadsStridesInAnyOrderAndZeroOnes) {
  TensorMapSpec s = plain();
  s.strides = {64 * 2, 100 * 64 * 2, 0};
  EXPECT_TRUE(tma_can_read(s));
}

TEST(TensorMap, WantsSixteenByteBaseAndStrides) {
  for (const std::uintptr_t offset : {2, 4, 8, 14}) {
    TensorMapSpec s = plain();
    s.base = at(0x1000 + offset);
    EXPECT_FALSE(tma_can_read(s)) << offset;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    TensorMapSpec s = plain();
    s.strides[i] += 8;
    EXPECT_FALSE(tma_can_read(s)) << i;
  }
  TensorMapSpec null = plain();
  null.base = nullptr;
  EXPECT_FALSE(tma_can_read(null));
}

TEST(TensorMap, BoundsStrides) {
  TensorMapSpec s = plain();
  s.strides[2] = (std::int64_t{1} << 40) - 16;
  EXPECT_TRUE(tma_can_read(s));
  s.strides[2] += 16;
  EXPECT_FALSE(tma_can_read(s));
  s.strides[2] = -1024;
  EXPECT_FALSE(tma_can_read(s));
}

TEST(TensorMap, BoundsDimensions) {
  TensorMapSpec s = plain();
  s.dims[3] = std::int64_t{1} << 32;
  EXPECT_TRUE(tma_can_read(s));
  s.dims[3] += 1;
  EXPECT_FALSE(tma_can_read(s));
  s.dims[3] = 0;
  EXPECT_FALSE(tma_can_read(s));
}

TEST(TensorMap, BoundsTheBox) {
  TensorMapSpec s = plain();
  s.box[1] = 256;
  EXPECT_TRUE(tma_can_read(s));
  s.box[1] = 257;
  EXPECT_FALSE(tma_can_read(s));
  s.box[1] = 0;
  EXPECT_FALSE(tma_can_read(s));
}

TEST(TensorMap, FitsTheBoxIntoTheSwizzle) {
  TensorMapSpec s = plain();
  s.swizzle = Swizzle::b64;
  EXPECT_FALSE(tma_can_read(s));
  s.box[0] = 32;
  EXPECT_TRUE(tma_can_read(s));
  s.box[0] = 28;
  EXPECT_FALSE(tma_can_read(s));
}

TEST(TensorMap, KnowsRanksAndElementSizes) {
  TensorMapSpec s = plain();
  s.rank = 0;
  EXPECT_FALSE(tma_can_read(s));
  s.rank = 6;
  EXPECT_FALSE(tma_can_read(s));
  s = plain();
  s.element_bytes = 8;
  EXPECT_FALSE(tma_can_read(s));
}

}  // namespace
}  // namespace tandem
