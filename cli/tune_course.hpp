// A pass as something to tune: the Configs of a shape, and a race among them.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "candidates.hpp"
#include "gpu/device.hpp"
#include "gpu/kernel_spec.hpp"
#include "race.hpp"
#include "tandem/attention.hpp"

namespace tandem::cli {

struct TuneShape {
  DType dtype = DType::bf16;
  std::int64_t batch = 1;
  std::int64_t seqlen = 0;
  std::int64_t heads = 0;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t queries = 0;    ///< a sequence, which has `seqlen` keys
  std::int64_t page_size = 0;  ///< k and v are a cache in pages of so many rows; 0: they are not
  bool v_in_k = false;         ///< v is the first columns of k
};

template <typename Config>
struct Candidates {
  std::vector<Config> configs;  ///< the planned one first
  std::size_t illegal = 0;      ///< combinations that cannot exist, left out
};

/// The planned Config of a call.
gpu::KernelConfig planned_forward(const TuneShape& shape);
gpu::KernelConfig planned_backward(const TuneShape& shape);

/// The shape in GPU memory with normal random inputs. Throws Error (unsupported) without a GPU that the
/// kernels run on.
template <typename Config>
RaceCourse forward_course(const TuneShape& shape, const std::vector<Config>& configs);
template <typename Config>
RaceCourse backward_course(const TuneShape& shape, const std::vector<Config>& configs);

// What both passes share.

constexpr Device tuned_device{.kind = Device::Kind::cuda, .index = 0};
/// A GPU that plans can be made for without a driver, which a process that forks must not open.
constexpr Device described_device{.kind = Device::Kind::cuda, .index = gpu::first_described};

/// A call of the shape without memory: on contiguous tensors, but for what v_in_k and page_size say of k and
/// v.
ForwardArgs forward_args(const TuneShape& shape, Device device);
/// Its backward, with all gradients.
BackwardArgs backward_args(const TuneShape& shape, Device device);

/// A tensor of `shape` in GPU memory: normal numbers, four million drawn, then repeated.
gpu::DeviceBuffer random_tensor(DType dtype, std::int64_t elements, std::uint64_t seed);

/// Throws Error (unsupported) where the GPU is none that the kernels run on.
void require_hopper();

/// A result of `elements`, with the tolerance that its type allows for.
RaceOutput race_output(const char* name, DType dtype, std::int64_t elements);

/// What the shape decides, or the problem's features.
constexpr std::string_view fixed_fields[] = {"element", "head_dim_qk", "head_dim_v", "causal",
                                             "local",   "transform",   "varlen"};

/// `planned`, and every combination of `fields` on top of it that has no `objection`. Throws Error
/// (invalid_argument) for fixed_fields, and where more than `most` are legal.
template <typename Config, typename Objection>
Candidates<Config> legal_candidates(const Config& planned, Objection&& objection,
                                    const std::vector<FieldValues>& fields, std::size_t most) {
  for (const FieldValues& wanted : fields) {
    if (std::ranges::find(fixed_fields, wanted.field) != std::end(fixed_fields)) {
      throw Error(Status::invalid_argument,
                  fmt::format("the field {} follows from the shape; leave it out", wanted.field));
    }
  }
  Candidates<Config> found;
  found.configs = {planned};
  for (const Config& config : combinations(planned, fields)) {
    if (!objection(config).empty()) {
      ++found.illegal;
    } else if (std::ranges::find(found.configs, config) == found.configs.end()) {
      found.configs.push_back(config);
    }
  }
  if (found.configs.size() > most) {
    throw Error(Status::invalid_argument,
                fmt::format("{} Configs are legal, more than --most {}; name fewer values, or raise it",
                            found.configs.size(), most));
  }
  return found;
}

}  // namespace tandem::cli
