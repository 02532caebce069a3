#include "gpu_speed_inputs.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/common/convert.hpp"
#include "tandem/error.hpp"

namespace tandem::bench {
namespace {

/// The pages of K or V in the host's memory: where they begin, and their strides, in elements.
struct Pages {
  std::byte* data;
  std::int64_t page_stride, row_stride, head_stride;
};

/// Copies the contents of `from`, of the shape of `x`, to pages in the order of `table`.
void copy_rows(const ConstTensor& x, const gpu::DeviceBuffer& from, const std::vector<std::int32_t>& table,
               std::int64_t page_size, const Pages& to) {
  const std::int64_t heads = x.shape[2];
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  const std::int64_t bytes = x.shape[3] * size;
  std::vector<std::byte> rows(from.bytes());
  from.copy_to_host(rows.data(), rows.size());
  gpu::synchronize(0);
  for (std::int64_t r = 0; r < x.shape[0] * x.shape[1]; ++r) {
    const std::int64_t page = table[static_cast<std::size_t>(r / page_size)];
    const std::int64_t row = page * to.page_stride + r % page_size * to.row_stride;
    for (std::int64_t h = 0; h < heads; ++h)
      std::copy_n(rows.data() + (r * heads + h) * bytes, bytes, to.data + (row + h * to.head_stride) * size);
  }
}

}  // namespace

gpu::DeviceBuffer random_tensor(std::size_t elements, DType dtype, unsigned seed) {
  constexpr std::size_t period = (std::size_t{1} << 22) - 3;  // a prime
  const std::size_t size = size_of(dtype);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  const std::size_t drawn = std::min(elements, period);
  std::vector<std::byte> values(drawn * size);
  for (std::size_t i = 0; i < drawn; ++i) {
    const float x = normal(generator);
    if (dtype == DType::s8) {
      values[i] = static_cast<std::byte>(std::lround(std::clamp(32.0F * x, -127.0F, 127.0F)));
    } else {
      store_from_f32(values.data(), dtype, static_cast<std::int64_t>(i), x);
    }
  }
  gpu::DeviceBuffer buffer(0, elements * size);
  for (std::size_t at = 0; at < elements; at += period) {
    buffer.copy_from_host(values.data(), std::min(period, elements - at) * size, nullptr, at * size);
  }
  gpu::synchronize(0);
  return buffer;
}

std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> lengths;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const std::size_t times = part.find('x');
    const std::int64_t count = times == std::string::npos ? 1 : std::stoll(part.substr(0, times));
    const std::int64_t length = std::stoll(times == std::string::npos ? part : part.substr(times + 1));
    if (count < 1 || length < 0)
      throw Error(Status::invalid_argument, "lengths: " + part + " is not LENGTH or COUNTxLENGTH");
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), length);
  }
  return lengths;
}

KeyPages put_into_pages(ForwardArgs& args, const gpu::DeviceBuffer& k, const gpu::DeviceBuffer& v,
                        std::int64_t page_size, PageLayout layout) {
  const std::int64_t keys = args.k.shape[1];
  const bool known = layout >= PageLayout::rows_first && layout <= PageLayout::interleaved;
  if (page_size < 1 || keys % page_size != 0 || !known)
    throw Error(Status::invalid_argument, "page_size: one that divides seqlen_k, and layout 0, 1 or 2");
  const std::int64_t a_sequence = keys / page_size;
  const std::int64_t count = args.k.shape[0] * a_sequence;
  std::vector<std::int32_t> table(static_cast<std::size_t>(count));
  std::iota(table.begin(), table.end(), 0);
  std::ranges::shuffle(table, std::mt19937(1));

  std::vector<std::byte> pages(k.bytes() + v.bytes());
  KeyPages made{gpu::DeviceBuffer(0, pages.size()), gpu::DeviceBuffer(0, table.size() * sizeof(table[0]))};
  const std::int64_t k_page = page_size * args.k.shape[2] * args.k.shape[3];
  const std::int64_t v_page = page_size * args.v.shape[2] * args.v.shape[3];
  const bool interleaved = layout == PageLayout::interleaved;
  const auto put = [&](ConstTensor& x, const gpu::DeviceBuffer& from, std::int64_t begin, std::int64_t page) {
    const std::int64_t heads = x.shape[2];
    const std::int64_t dim = x.shape[3];
    const auto offset = static_cast<std::size_t>(begin) * size_of(x.dtype);
    const bool heads_first = layout == PageLayout::heads_first;
    const Pages to{.data = pages.data() + offset,
                   .page_stride = interleaved ? k_page + v_page : page,
                   .row_stride = heads_first ? dim : heads * dim,
                   .head_stride = heads_first ? page_size * dim : dim};
    copy_rows(x, from, table, page_size, to);
    x = ConstTensor(static_cast<const std::byte*>(made.rows.data()) + offset, x.dtype,
                    {count, page_size, heads, dim}, x.device);
    x.stride = {to.page_stride, to.row_stride, to.head_stride, 1};
  };
  put(args.k, k, 0, k_page);
  put(args.v, v, interleaved ? k_page : count * k_page, v_page);
  made.rows.copy_from_host(pages.data(), pages.size());
  made.table.copy_from_host(table.data(), made.table.bytes());
  gpu::synchronize(0);
  args.page_table = ConstTensor(made.table.data(), DType::i32, {args.q.shape[0], a_sequence}, args.q.device);
  return made;
}

}  // namespace tandem::bench
