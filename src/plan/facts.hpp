// What is to be known of a call on a GPU before anything is chosen for it: derived once, at the top of
// planning, and passed down. Nothing below asks the problem, the device or the environment again.
#pragma once

#include <cstdint>
#include <string>

#include "config/types.hpp"
#include "gpu/device.hpp"
#include "problem/effective.hpp"
#include "problem/problem.hpp"

namespace tandem {

/// Queries that a tile of 64 rows holds.
constexpr int few = 64;

/// Shared memory of one Hopper SM, of which every CTA takes 1 KB for the system: one CTA can have 227 KB.
constexpr int hopper_shared_bytes_per_sm = 228 * 1024;
constexpr int reserved_shared_bytes = 1024;

/// Keys from which it is worth that CTAs share those of a tile, and tiles a multiprocessor from which it is
/// not, since whole tiles keep it busy.
constexpr int worth_sharing = 256;
constexpr int busy_tiles = 4;

/// Bytes a microsecond that one multiprocessor reads, and all of them together (an H200's).
constexpr double bytes_alone = 43e3;
constexpr double bytes_together = 4.1e6;
/// Microseconds that shares of a line of all keys take more than clusters, each with a tile (an H200's).
constexpr double sharing_takes = 5;

/// What plans depend on of a GPU. By default the one that the shipped set is chosen for, an H100 or H200.
struct DeviceFacts {
  const gpu::DeviceProperties* properties = nullptr;  ///< null of the default alone
  Family family = Family::sm90;                       ///< the kernels that serve it
  bool wished = false;                                ///< the family is TANDEM_KERNELS', not the GPU's own
  int multiprocessors = 132;
  int shared_bytes_per_sm = hopper_shared_bytes_per_sm;
};

/// Hopper has kernels of its own, which TANDEM_KERNELS=sm80 leaves aside for comparison; other GPUs have
/// those in the instructions that all from Ampere on have. Throws Error (unsupported) for a GPU without
/// kernels, and for a wish that it cannot fulfil.
DeviceFacts facts_of(const gpu::DeviceProperties& device);

struct CallFacts {
  explicit CallFacts(const Problem& asked, const DeviceFacts& device = {});

  /// That the kernels see: heads of single queries are rows, e4m3 queries by the exact formula are 16-bit
  /// ones, and so are k and v of 8 bits unless the forward kernel reads them where they are.
  Problem problem;
  DeviceFacts device;
  /// Gradients of what functions read are the kernels sm80's on Hopper too, where its own divide the work on
  /// heads of more than 128 dimensions so that no warpgroup has both S and dP.
  Family family;
  std::string portable;  ///< why its kernels are PTX that the driver compiles; empty where they are not
  Mask mask{};           ///< what bounds and lengths any of its queries feels
  bool wide_heads =
      false;  ///< wider than the products of one warpgroup: the kernel `forward_wide` takes them
  bool values_in_keys = false;  ///< wide heads alone: V is the first columns of K, in memory
  std::int64_t queries = 0;     ///< queries a sequence has; the mean, rounded up, where they are packed
  std::int64_t keys = 0;        ///< keys a sequence has; the mean where they are packed

  // Set for a forward call by the exact formula, else false.
  bool has_few_queries = false;
  /// A tile of 16 rows holds all queries that share keys, as the kernel `decode` has them. With a split size,
  /// a function, a gate or max_logits every row goes through the forward kernel's products.
  bool decodes = false;
  /// Heads that share keys are rows of one tile, where that makes fewer tiles than a tile a head: of the few
  /// queries that a sequence has, keys are then read once a KV head.
  bool heads_as_rows = false;
  HeadRows head_rows;  ///< the division of 64 rows, with heads_as_rows
  /// CTAs share the keys of a step of generation or of a few queries at once, or with a split size the
  /// splits.
  bool shares_keys = false;

  // How the problem differs from the one asked for.
  bool widens_queries = false;       ///< e4m3 queries become 16-bit ones
  bool dequantizes = false;          ///< k and v of 8 bits become 16-bit ones, in the workspace
  const char* unreadable = nullptr;  ///< "k" or "v", of 8 bits, that TMA cannot read where it is
  const char* objection = nullptr;   ///< why not
};

/// Why the call has kernels of its family: "compute capability 8.6 has no WGMMA".
std::string why_family(const CallFacts& facts);

}  // namespace tandem
