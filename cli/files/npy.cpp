#include "files/npy.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

namespace tandem::files {
namespace {

constexpr std::string_view magic = "\x93NUMPY";
constexpr std::size_t version_bytes = 2;
// Real headers have about a hundred bytes; NumPy itself refuses more than 10,000 unless told otherwise.
constexpr std::uint64_t largest_header = 10'000;
constexpr std::size_t alignment = 64;

struct NumpyDType {
  std::string_view descr;
  DType dtype;
  bool by_request;  ///< read only where the caller says that the elements are of this dtype
};
constexpr std::array numpy_dtypes{NumpyDType{"<f4", DType::f32, false}, NumpyDType{"<f2", DType::f16, false},
                                  NumpyDType{"<i4", DType::i32, false}, NumpyDType{"<i8", DType::i64, false},
                                  NumpyDType{"|i1", DType::s8, false},  NumpyDType{"<u2", DType::bf16, true},
                                  NumpyDType{"<V2", DType::bf16, true}, NumpyDType{"|V2", DType::bf16, true},
                                  NumpyDType{"|u1", DType::e4m3, true}, NumpyDType{"<V1", DType::e4m3, true},
                                  NumpyDType{"|V1", DType::e4m3, true}};

DType find_dtype(const std::string& file, const std::string& descr, std::optional<DType> stored_as) {
  const auto* found = std::ranges::find(numpy_dtypes, descr, &NumpyDType::descr);
  if (found == numpy_dtypes.end()) {
    refuse(file, "has dtype {}; Tandem reads i1 and little-endian f4, f2, i4 and i8, convert it with .astype",
           in_quotes(descr));
  }
  if (found->by_request && stored_as != found->dtype) {
    refuse(file, "has dtype {}; if its elements are {}, say so with --npy-as {}", in_quotes(descr),
           name_of(found->dtype), name_of(found->dtype));
  }
  return found->dtype;
}

struct Header {
  std::string text;
  std::uint64_t data_start = 0;
};

Header read_header(const Source& source) {
  const std::string& file = source.name();
  std::array<std::byte, magic.size() + version_bytes> start{};
  if (source.size() < start.size()) {
    refuse(file, "has {} bytes, an .npy file starts with {}; it is empty or cut short", source.size(),
           start.size());
  }
  source.read(0, start);
  if (std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
    refuse(file,
           "does not start with \\x93NUMPY; is it an .npy file? (.npz archives must be unpacked first)");
  }
  const auto major = std::to_integer<int>(start[magic.size()]);
  if (major < 1 || major > 3) {
    refuse(file, "is of .npy version {}, versions 1 to 3 are known; save it again with numpy.save", major);
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  std::array<std::byte, 4> encoded{};
  if (source.size() - start.size() < length_bytes)
    refuse(file, "ends inside its header; it was cut short, save it again");
  source.read(start.size(), std::span(encoded).first(length_bytes));
  std::uint64_t length = 0;
  for (std::size_t i = length_bytes; i-- > 0;)
    length = length << 8U | std::to_integer<std::uint64_t>(encoded[i]);
  if (length > largest_header) {
    refuse(file, "claims a header of {} bytes, at most {} are read; is it an .npy file?", length,
           largest_header);
  }
  Header header;
  header.data_start = start.size() + length_bytes + length;
  if (header.data_start > source.size())
    refuse(file, "ends inside its header; it was cut short, save it again");
  header.text.resize(static_cast<std::size_t>(length));
  source.read(start.size() + length_bytes, std::as_writable_bytes(std::span(header.text)));
  return header;
}

}  // namespace

ArrayDescription read_npy_description(const Source& source) {
  return parse_array_description(source.name(), read_header(source).text);
}

TensorData read_npy(const Source& source, std::optional<DType> stored_as) {
  const std::string& file = source.name();
  const Header header = read_header(source);
  const ArrayDescription array = parse_array_description(file, header.text);
  const DType dtype = find_dtype(file, array.descr, stored_as);
  if (array.shape.empty() || array.shape.size() > static_cast<std::size_t>(ConstTensor::max_rank)) {
    refuse(file, "has {} dimensions, 1 to {} are allowed; reshape it", array.shape.size(),
           ConstTensor::max_rank);
  }
  if (array.fortran_order && array.shape.size() > 1) {
    refuse(file, "is in Fortran order; save numpy.ascontiguousarray(x) instead");
  }
  const std::uint64_t present = source.size() - header.data_start;
  std::uint64_t wanted = size_of(dtype);
  for (const std::int64_t n : array.shape) {
    if (__builtin_mul_overflow(wanted, static_cast<std::uint64_t>(n), &wanted)) {
      wanted = std::numeric_limits<std::uint64_t>::max();
      break;
    }
  }
  if (wanted != present) {
    refuse(file, "has {} bytes of elements, its dtype and shape call for {}; it was {}", present,
           wanted == std::numeric_limits<std::uint64_t>::max() ? "more than 2^64" : std::to_string(wanted),
           present < wanted ? "cut short, save it again" : "added to, give one array a file");
  }
  TensorData data(dtype, array.shape);
  source.read(header.data_start, data.bytes());
  return data;
}

void write_npy(AtomicFile& file, const ConstTensor& tensor) {
  const auto* dtype = std::ranges::find(numpy_dtypes, tensor.dtype, &NumpyDType::dtype);
  std::string shape;
  for (int i = 0; i < tensor.rank; ++i)
    shape += fmt::format("{}, ", tensor.shape[static_cast<std::size_t>(i)]);
  std::string text =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", dtype->descr, shape);
  // Spaces and a newline bring the elements to a multiple of 64 bytes, as numpy.save does.
  const std::size_t before = magic.size() + version_bytes + 2;
  const std::size_t total = (before + text.size() + 1 + alignment - 1) / alignment * alignment;
  text.resize(total - before - 1, ' ');
  text += '\n';
  std::string start(magic);
  start += {'\x01', '\x00', static_cast<char>(text.size() & 0xFFU), static_cast<char>(text.size() >> 8U)};
  file.write(std::as_bytes(std::span(start)));
  file.write(std::as_bytes(std::span(text)));
  file.write({static_cast<const std::byte*>(tensor.data),
              static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype)});
}

}  // namespace tandem::files
