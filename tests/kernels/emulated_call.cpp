#include "emulated_call.hpp"

#include <cmath>

#include "ops/pack/common/pack.cuh"
#include "ops/pack/launch.hpp"

namespace tandem::kernel_tests {

namespace {

emulator::Buffer buffer_of(const harness::Box& box, bool writable) {
  const auto* first = static_cast<const char*>(box.view().data);
  std::int64_t last = 0;
  for (int i = 0; i < box.view().rank; ++i) {
    const auto d = static_cast<std::size_t>(i);
    if (box.view().shape[d] == 0) return {};
    if (box.view().shape[d] > 1) last += (box.view().shape[d] - 1) * box.view().stride[d];
  }
  return {first, static_cast<std::size_t>(last + 1) * size_of(box.dtype()), writable};
}

}  // namespace

void choose_lengths(harness::Case& c, bool varlen, harness::Random& random) {
  if (!varlen) {
    c.packed_q = c.packed_k = false;
    c.used_q.clear();
    c.used_k.clear();
  } else if (!c.packed_q && !c.packed_k && c.used_q.empty() && c.used_k.empty()) {
    for (std::int64_t b = 0; b < c.batch; ++b) c.used_k.push_back(random.between(0, c.seqlen_k));
  }
}

void add_buffers(emulator::Options& options, const std::vector<harness::Box*>& boxes, bool writable) {
  for (const harness::Box* box : boxes) {
    if (box->given() && box->numel() > 0) options.buffers.push_back(buffer_of(*box, writable));
  }
}

void pack_in_emulator(Operand& o, std::vector<std::uint16_t>& target, std::int64_t batch, std::int64_t rows,
                      std::int64_t heads, std::int64_t head_dim, emulator::Options options) {
  const std::int64_t pitch = (head_dim + 7) / 8 * 8;
  target.assign(static_cast<std::size_t>(batch * rows * heads * pitch), 0x7fff);
  options.buffers.push_back(emulator::writable(target));
  const PackParams params{.source = o.data,
                          .stride = {.batch = o.batch_stride, .row = o.row_stride, .head = o.head_stride},
                          .target = target.data(),
                          .batch = static_cast<int>(batch),
                          .rows = static_cast<int>(rows),
                          .heads = static_cast<int>(heads),
                          .head_dim = static_cast<int>(head_dim),
                          .pitch = static_cast<int>(pitch)};
  const bool paired = reinterpret_cast<std::uintptr_t>(o.data) % 4 == 0 && head_dim % 2 == 0 &&
                      (o.row_stride | o.head_stride | o.batch_stride) % 2 == 0;
  const emulator::Grid grid{.blocks = 1, .threads = pack_threads, .shared_bytes = 0};
  emulator::launch(
      paired ? &tandem::pack<PackConfig{.paired = true}> : &tandem::pack<PackConfig{.paired = false}>, params,
      grid, options);
  o = {.data = target.data(),
       .dtype = o.dtype,
       .batch_stride = pitch * heads * rows,
       .row_stride = pitch * heads,
       .head_stride = pitch};
}

void widen_in_emulator(Problem& p, std::vector<std::uint16_t>& target, std::vector<float>& scales,
                       emulator::Options& options) {
  const gpu::LoadedTensor q = gpu::loaded_tensor(p, gpu::Loaded::q);
  target.assign(static_cast<std::size_t>(gpu::packed_bytes(q)) / 2, 0x7fff);
  scales.assign(static_cast<std::size_t>(p.batch * p.heads_kv), std::nanf(""));
  emulator::Options writing = options;
  writing.buffers.push_back(emulator::writable(target));
  writing.buffers.push_back(emulator::writable(scales));
  const bool f16 = p.out.dtype == DType::f16;
  const PackConfig config = gpu::pack_config(q, f16 ? Element::f16 : Element::bf16);
  constexpr auto kernel = []<bool paired>(bool half) {
    return half ? &tandem::pack<PackConfig{.paired = paired, .widens = true, .element = Element::f16}>
                : &tandem::pack<PackConfig{.paired = paired, .widens = true, .element = Element::bf16}>;
  };
  emulator::launch(config.paired ? kernel.operator()<true>(f16) : kernel.operator()<false>(f16),
                   gpu::make_widen_params(p, q, p.q_scale, target.data(), scales.data()),
                   {.blocks = 2, .threads = pack_threads, .shared_bytes = 0}, writing);
  Operand packed = gpu::packed_operand(q);
  packed.data = target.data();
  packed.dtype = p.out.dtype;
  p.q = packed;
  options.buffers.push_back(emulator::readable(target));
  if (!gpu::multiplies_scales(p.q_scale, p.k_scale)) return;
  p.q_scale = {.data = scales.data(), .batch_stride = p.heads_kv, .head_stride = 1};
  options.buffers.push_back(emulator::readable(scales));
}

}  // namespace tandem::kernel_tests
