// The forward pass as something to tune: the Configs of a shape, and a race among them.
#pragma once

#include <vector>

#include "kernels/config.hpp"
#include "plan/candidates.hpp"
#include "race.hpp"

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
};

struct ForwardCandidates {
  std::vector<ForwardConfig> configs;  ///< the planned one first
  std::size_t illegal = 0;             ///< combinations that cannot exist, left out
};

/// The planned Config and every legal combination of `fields` on top of it; fields that follow from the
/// shape may not be named. Throws Error (invalid_argument) for those, and where more than `most` are legal.
ForwardCandidates forward_candidates(const TuneShape& shape, const std::vector<FieldValues>& fields,
                                     std::size_t most);

/// The shape in GPU memory with normal random inputs. Throws Error (unsupported) without a GPU that the
/// kernels run on.
RaceCourse forward_course(const TuneShape& shape, const std::vector<ForwardConfig>& configs);

}  // namespace tandem::cli
