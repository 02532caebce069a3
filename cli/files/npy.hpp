// NumPy's .npy format, versions 1 to 3 (NEP 1; numpy.lib.format): a magic string, a Python literal with
// dtype, order and shape, then the elements.
#pragma once

#include <optional>

#include "files/atomic_write.hpp"
#include "files/python_literal.hpp"
#include "files/source.hpp"
#include "files/tensor_data.hpp"

namespace tandem::files {

/// What the header says, of any array that NumPy writes. Throws Error for a malformed header.
ArrayDescription read_npy_description(const Source& source);

/// Reads one array of i1 or little-endian f4, f2, i4 or i8 in C order. NumPy has no bf16 or e4m3: `stored_as`
/// says what 2-byte (u2, V2) or 1-byte (u1, V1) elements are. Throws Error for anything else: other dtypes,
/// Fortran order of more than one dimension, no or more than four dimensions, fewer or more bytes than the
/// shape calls for.
TensorData read_npy(const Source& source, std::optional<DType> stored_as = std::nullopt);

/// Writes a contiguous tensor, bf16 as u2, e4m3 as u1 and s8 as i1.
void write_npy(AtomicFile& file, const ConstTensor& tensor);

}  // namespace tandem::files
