// The values in a tensor: other dtypes, random numbers.
#pragma once

#include <cstdint>

#include "files/tensor_data.hpp"

namespace tandem::cli {

/// The tensor's values times `factor` in another floating-point dtype, rounded to nearest even.
files::TensorData converted(const files::TensorData& tensor, DType dtype, float factor = 1.0F);

struct Quantized {
  files::TensorData quantized;  ///< e4m3
  files::TensorData scale;      ///< (1) f32: element = quantized value * scale
};
/// Quantizes with one scale for all of the tensor: the largest finite magnitude becomes e4m3's largest code.
Quantized quantized_e4m3(const files::TensorData& tensor);

/// Fills a floating-point tensor with normal numbers of mean 0 and standard deviation 1, the same for a seed
/// everywhere.
void fill_normal(files::TensorData& tensor, std::uint64_t seed);

}  // namespace tandem::cli
