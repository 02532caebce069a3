#include "verification.hpp"
#include "api/make_problem.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "cpu/common/convert.hpp"

namespace tandem::cli {

std::vector<Verdict> compare_outputs(const TensorSet& outputs, const harness::Expected& expected, Pass pass) {
  std::vector<Verdict> verdicts;
  struct Named {
    const char* name;
    const harness::Target* target;
  };
  const std::vector<Named> targets =
      pass == Pass::forward
          ? std::vector<Named>{{"out", &expected.out}, {"lse", &expected.lse}}
          : std::vector<Named>{
                {"dq", &expected.dq}, {"dk", &expected.dk}, {"dv", &expected.dv}, {"dsink", &expected.dsink}};
  for (const auto& [name, target] : targets) {
    const auto found = outputs.find(name);
    if (found == outputs.end()) continue;
    const files::TensorData& tensor = found->second;
    if (static_cast<std::size_t>(tensor.numel()) != target->values.size()) {
      throw Error(Status::internal, fmt::format("{} has {} elements, the oracle {}; please report this", name,
                                                tensor.numel(), target->values.size()));
    }
    Verdict verdict;
    verdict.output = name;
    verdict.bound = target->bound;
    verdict.elements = tensor.numel();
    verdict.deviation = harness::compare(*target, [&tensor](std::int64_t n) {
      return static_cast<double>(load_as_f32(tensor.bytes().data(), tensor.dtype(), n));
    });
    verdicts.push_back(verdict);
  }
  return verdicts;
}

namespace {

void append(std::vector<Verdict>& verdicts, const std::vector<Verdict>& more) {
  verdicts.insert(verdicts.end(), more.begin(), more.end());
}

/// A forward call whose keys and values lie as its oracle reads them: row after row of one entry a sequence.
/// Rows that no page and no entry of a cache gives are 0.
class Gathered {
 public:
  explicit Gathered(const Problem& problem) : p_(problem) {
    if (!p_.pages.given() && !p_.cache_batch_idx.given()) return;
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      const Rows rows = key_rows(problem, b);
      longest = std::max(longest, rows.begin + rows.used);
    }
    p_.rows_k = longest;
    p_.pages = {};
    p_.cache_batch_idx = {};
    k_ = gather(problem, p_.k, p_.head_dim_qk);
    v_ = gather(problem, p_.v, p_.head_dim_v);
    p_.k = dense(p_.k, *k_, p_.head_dim_qk);
    p_.v = dense(p_.v, *v_, p_.head_dim_v);
  }

  [[nodiscard]] const Problem& problem() const { return p_; }

 private:
  [[nodiscard]] files::TensorData gather(const Problem& p, const Operand& cache, std::int64_t dim) const {
    files::TensorData rows(cache.dtype, {p.batch, p_.rows_k, p.heads_kv, dim});
    const std::size_t size = size_of(cache.dtype);
    const std::size_t bytes = static_cast<std::size_t>(dim) * size;
    std::memset(rows.bytes().data(), 0, rows.bytes().size());
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const Rows used = key_rows(p, b);
      for (std::int64_t row = used.begin; row < used.begin + used.used; ++row) {
        const KeyPlace from = key_place(p, b, row);
        if (from.batch < 0) continue;
        for (std::int64_t head = 0; head < p.heads_kv; ++head) {
          const auto to = static_cast<std::size_t>(((b * p_.rows_k + row) * p.heads_kv + head) * dim) * size;
          const auto at = static_cast<std::size_t>(cache.offset(from.batch, from.row, head)) * size;
          std::memcpy(rows.bytes().data() + to, static_cast<const std::byte*>(cache.data) + at, bytes);
        }
      }
    }
    return rows;
  }

  [[nodiscard]] Operand dense(Operand like, files::TensorData& rows, std::int64_t dim) const {
    like.data = rows.bytes().data();
    like.batch_stride = p_.rows_k * p_.heads_kv * dim;
    like.row_stride = p_.heads_kv * dim;
    like.head_stride = dim;
    return like;
  }

  Problem p_;
  std::optional<files::TensorData> k_, v_;
};

}  // namespace

bool Verification::right() const {
  return std::ranges::all_of(verdicts, &Verdict::right);
}

Verification verify(Call& call) {
  call.poison_outputs();
  Verification result;
  result.forward_seconds = call.run_forward();
  const DType dtype = call.forward_args().out.dtype;
  const Gathered forward(make_problem(call.forward_args()));
  append(result.verdicts,
         compare_outputs(call.fetch_outputs(), harness::expect(forward.problem(), dtype, Pass::forward),
                         Pass::forward));
  if (call.has_backward()) {
    result.backward_seconds = call.run_backward();
    append(result.verdicts,
           compare_outputs(call.fetch_outputs(),
                           harness::expect(make_problem(call.backward_args()), dtype, Pass::backward),
                           Pass::backward));
  }
  return result;
}

std::string describe(const harness::Bound& bound) {
  return bound.relative > 0 ? fmt::format("{:.1e} relative", bound.relative)
                            : fmt::format("{:.2e}", bound.absolute);
}

std::string describe_whole(const Verdict& v) {
  const harness::Deviation& d = v.deviation;
  if (!d.has_whole_bounds()) return {};
  return fmt::format("gain {:.5f}, RMS {:.1e} of {:.1e}", d.sums.gain(), d.sums.rms(), d.rms_bound);
}

Json to_json(const Verdict& v) {
  Json json{{"output", v.output},
            {"right", v.right()},
            {"elements", v.elements},
            {"wrong", v.deviation.wrong},
            {"largest_error", v.deviation.largest},
            {"bound_absolute", v.bound.absolute},
            {"bound_relative", v.bound.relative},
            {"share_of_bound", v.deviation.share},
            {"worst_element", v.deviation.worst}};
  if (v.deviation.has_whole_bounds()) {
    json.update(Json{{"rms_error", v.deviation.sums.rms()},
                     {"rms_bound", v.deviation.rms_bound},
                     {"gain", v.deviation.sums.gain()},
                     {"gain_bound", v.deviation.gain_bound}});
  }
  return json;
}

}  // namespace tandem::cli
