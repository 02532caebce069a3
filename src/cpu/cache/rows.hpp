// What append.cpp and merge.cpp hand to their kernels (kernel.cpp): plain numbers and pointers, as in
// forward/tile.hpp.
#pragma once

#include <cstdint>

#include "tandem/tensor.hpp"

namespace tandem::cpu {

/// All heads of one row, on their way from a tensor of new rows to a cache (or of q to q_out).
struct AppendRow {
  const void* from = nullptr;
  DType from_dtype = DType::f32;
  std::int64_t from_stride = 0;  ///< elements from head to head
  void* to = nullptr;
  DType to_dtype = DType::f32;
  std::int64_t to_stride = 0;
  int heads = 0;
  int dim = 0;
  /// The row of the rotary embedding's tables; null: none.
  const void* cos = nullptr;
  const void* sin = nullptr;
  DType table_dtype = DType::f32;
  int rotary_dim = 0;
  bool interleaved = false;
  const float* scales = nullptr;  ///< the first head's, for 8-bit values; null: 1
  std::int64_t scale_stride = 0;  ///< from head to head
  float* found_scales = nullptr;  ///< in place of `scales`: each head's is found and written here
  std::int64_t found_stride = 0;
};

/// One row of one head, of which some parts are not empty.
struct MergeRow {
  const void* const* from = nullptr;  ///< by part
  const double* weights = nullptr;    ///< by part; their sum is 1
  int parts = 0;                      ///< at least 1
  DType from_dtype = DType::f32;
  void* to = nullptr;
  DType to_dtype = DType::f32;
  int dim = 0;
};

/// The kernels for one instruction set.
struct CacheKernel {
  void (*append)(const AppendRow& row) = nullptr;
  void (*merge)(const MergeRow& row) = nullptr;
};

}  // namespace tandem::cpu
