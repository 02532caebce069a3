#include "files/safetensors.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>

#include "files/safetensors_header.hpp"

namespace tandem::files {
namespace {

struct FormatDType {
  std::string_view name;
  std::uint64_t bytes;
  std::optional<DType> dtype;  ///< unset: the format knows it, Tandem has no use for it
};
constexpr std::array format_dtypes{
    FormatDType{"F32", 4, DType::f32},      FormatDType{"F16", 2, DType::f16},
    FormatDType{"BF16", 2, DType::bf16},    FormatDType{"F8_E4M3", 1, DType::e4m3},
    FormatDType{"I32", 4, DType::i32},      FormatDType{"I64", 8, DType::i64},
    FormatDType{"F64", 8, std::nullopt},    FormatDType{"C64", 8, std::nullopt},
    FormatDType{"U64", 8, std::nullopt},    FormatDType{"U32", 4, std::nullopt},
    FormatDType{"I16", 2, std::nullopt},    FormatDType{"U16", 2, std::nullopt},
    FormatDType{"I8", 1, DType::s8},        FormatDType{"U8", 1, std::nullopt},
    FormatDType{"BOOL", 1, std::nullopt},   FormatDType{"F8_E5M2", 1, std::nullopt},
    FormatDType{"F8_E8M0", 1, std::nullopt}};
constexpr const char* supported = "F32, F16, BF16, F8_E4M3, I8, I32, I64";

// The reference implementation's limit, so that a lying length cannot ask for all memory.
constexpr std::uint64_t largest_header = 100'000'000;
constexpr std::uint64_t prefix_bytes = 8;

const FormatDType* find_dtype(std::string_view name) {
  const auto* found = std::ranges::find(format_dtypes, name, &FormatDType::name);
  return found == format_dtypes.end() ? nullptr : found;
}

std::string_view format_name(DType dtype) {
  return std::ranges::find(format_dtypes, std::optional(dtype), &FormatDType::dtype)->name;
}

/// Bytes that dtype and shape call for.
std::uint64_t declared_bytes(const std::string& file, const std::string& tensor,
                             const SafetensorsEntry& entry) {
  const FormatDType* dtype = find_dtype(entry.dtype_name);
  if (dtype == nullptr) {
    refuse(file,
           "tensor {} has dtype {}, which is not a safetensors dtype this program knows; convert it to one "
           "of {}",
           in_quotes(tensor), in_quotes(entry.dtype_name), supported);
  }
  std::uint64_t bytes = dtype->bytes;
  for (const std::uint64_t n : entry.shape) {
    // Shapes and strides are signed 64-bit from here on.
    if (__builtin_mul_overflow(bytes, n, &bytes) || bytes > std::numeric_limits<std::int64_t>::max() ||
        n > std::numeric_limits<std::int64_t>::max()) {
      refuse(
          file,
          "tensor {} has a shape whose size exceeds 2^63 bytes; the header is damaged, write the file again",
          in_quotes(tensor));
    }
  }
  return bytes;
}

void check_entries(const std::string& file, const std::map<std::string, SafetensorsEntry>& entries,
                   std::uint64_t data_bytes) {
  using Item = std::pair<const std::string, SafetensorsEntry>;
  std::vector<const Item*> order;
  order.reserve(entries.size());
  for (const Item& item : entries) {
    const auto& [tensor, entry] = item;
    if (entry.begin > entry.end || entry.end > data_bytes) {
      refuse(file,
             "tensor {} claims bytes [{}, {}) of {}; offsets must ascend and stay inside the file, write it "
             "again",
             in_quotes(tensor), entry.begin, entry.end, data_bytes);
    }
    const std::uint64_t wanted = declared_bytes(file, tensor, entry);
    if (wanted != entry.end - entry.begin) {
      refuse(file,
             "tensor {} has {} bytes, its dtype {} and shape call for {}; the header is damaged, write the "
             "file again",
             in_quotes(tensor), entry.end - entry.begin, entry.dtype_name, wanted);
    }
    order.push_back(&item);
  }
  std::ranges::sort(order, [](const Item* a, const Item* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t covered = 0;
  for (const Item* item : order) {
    const SafetensorsEntry& entry = item->second;
    if (entry.begin != covered) {
      refuse(file,
             "tensor {} starts at byte {}, the one before it ends at {}; tensors must neither overlap nor "
             "leave holes",
             in_quotes(item->first), entry.begin, covered);
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    refuse(file, "tensors end at byte {} of {}; the rest belongs to none, write the file again", covered,
           data_bytes);
  }
}

}  // namespace

Safetensors::Safetensors(std::unique_ptr<Source> source) : source_(std::move(source)) {
  if (source_->size() < prefix_bytes) {
    refuse(name(),
           "has {} bytes, a safetensors file starts with 8 bytes of header length; it is empty or cut short",
           source_->size());
  }
  std::array<std::byte, prefix_bytes> prefix{};
  source_->read(0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = prefix_bytes; i-- > 0;)
    length = length << 8U | std::to_integer<std::uint64_t>(prefix[i]);
  if (length > largest_header) {
    refuse(name(), "claims a header of {} bytes, at most {} are allowed; is it a safetensors file?", length,
           largest_header);
  }
  if (length > source_->size() - prefix_bytes) {
    refuse(name(),
           "claims a header of {} bytes and has {} after the length; it was cut short, write it again",
           length, source_->size() - prefix_bytes);
  }
  std::string header(static_cast<std::size_t>(length), '\0');
  source_->read(prefix_bytes, std::as_writable_bytes(std::span(header)));
  data_start_ = prefix_bytes + length;
  parse_safetensors_header(name(), header, entries_, metadata_);
  check_entries(name(), entries_, source_->size() - data_start_);
}

TensorData Safetensors::load(const std::string& tensor) const {
  const auto found = entries_.find(tensor);
  if (found == entries_.end()) {
    refuse(name(), "has no tensor {}; `tandem info FILE` lists what it has", in_quotes(tensor));
  }
  const SafetensorsEntry& entry = found->second;
  const FormatDType* dtype = find_dtype(entry.dtype_name);
  if (!dtype->dtype) {
    refuse(name(), "tensor {} has dtype {}, which Tandem does not compute with; convert it to one of {}",
           in_quotes(tensor), entry.dtype_name, supported);
  }
  if (entry.shape.empty() || entry.shape.size() > static_cast<std::size_t>(ConstTensor::max_rank)) {
    refuse(name(), "tensor {} has {} dimensions, 1 to {} are allowed; reshape it", in_quotes(tensor),
           entry.shape.size(), ConstTensor::max_rank);
  }
  TensorData data(*dtype->dtype, std::vector<std::int64_t>(entry.shape.begin(), entry.shape.end()));
  source_->read(data_start_ + entry.begin, data.bytes());
  return data;
}

void write_safetensors(AtomicFile& file, std::vector<NamedTensor> tensors, const Metadata& metadata) {
  std::ranges::sort(tensors, [](const NamedTensor& a, const NamedTensor& b) {
    const std::size_t width_a = size_of(a.tensor.dtype), width_b = size_of(b.tensor.dtype);
    return width_a != width_b ? width_a > width_b : a.name < b.name;
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const std::uint64_t begin = end;
    end += static_cast<std::uint64_t>(tensor.numel()) * size_of(tensor.dtype);
    header[name] = {{"dtype", format_name(tensor.dtype)},
                    {"shape", std::vector(tensor.shape.begin(), tensor.shape.begin() + tensor.rank)},
                    {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + prefix_bytes - 1) / prefix_bytes * prefix_bytes, ' ');
  std::array<std::byte, prefix_bytes> prefix{};
  for (std::size_t i = 0; i < prefix_bytes; ++i)
    prefix[i] = static_cast<std::byte>(text.size() >> 8 * i & 0xFFU);
  file.write(prefix);
  file.write(std::as_bytes(std::span(text)));
  for (const NamedTensor& t : tensors) {
    file.write({static_cast<const std::byte*>(t.tensor.data),
                static_cast<std::size_t>(t.tensor.numel()) * size_of(t.tensor.dtype)});
  }
}

}  // namespace tandem::files
