// Attention as targets of XLA's foreign function interface. A call's buffers come in any number; the
// attributes `inputs` and `outputs` name them, comma after comma, as tandem.attention names its arguments.
#include "jax.hpp"

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "arrays.hpp"
#include "fields.hpp"
#include "gpu/device.hpp"
#include "gpu/driver.hpp"
#include "signals.hpp"
#include "tandem/attention.hpp"

namespace tandem::python {
namespace {

namespace ffi = xla::ffi;

struct Wish {
  std::string_view inputs, outputs;
  AttentionOptions options;
  Execution execution;
  Device device;
  std::string_view score_function, mask_function;
};

// The place of `name` in a list with commas, or -1.
std::ptrdiff_t place_of(std::string_view name, std::string_view list) {
  for (std::ptrdiff_t place = 0; !list.empty(); ++place) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == name) return place;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return -1;
}

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return DType::f32;
    case ffi::DataType::F16: return DType::f16;
    case ffi::DataType::BF16: return DType::bf16;
    case ffi::DataType::F8E4M3FN: return DType::e4m3;
    case ffi::DataType::S8: return DType::s8;
    case ffi::DataType::S32: return DType::i32;
    case ffi::DataType::S64: return DType::i64;
    default: throw Error(Status::invalid_argument, "an array's dtype is none that Tandem has; convert it");
  }
}

// XLA hands over row-major buffers: the layout that jax.ffi asks for unless told otherwise.
Tensor view(ffi::AnyBuffer buffer, Device device) {
  Tensor t;
  const auto shape = buffer.dimensions();
  t.data = buffer.untyped_data();
  t.dtype = dtype_of(buffer.element_type());
  t.rank = static_cast<int>(shape.size());
  t.device = device;
  std::int64_t step = 1;
  for (std::size_t i = std::min(shape.size(), t.shape.size()); i-- > 0;) {
    t.shape[i] = shape[i];
    t.stride[i] = step;
    step *= shape[i];
  }
  one_dimension_at_least(t);
  return t;
}

template <typename Args, typename Table>
void take(Args& args, const ffi::RemainingArgs& buffers, const Wish& wish, const Table& table) {
  for (const auto& [name, field] : table) {
    const auto place = place_of(name, wish.inputs);
    if (place < 0) continue;
    args.*field = view(buffers.get<ffi::AnyBuffer>(static_cast<std::size_t>(place)).value(), wish.device);
  }
}

template <typename Args, typename Table>
void take(Args& args, const ffi::RemainingRets& buffers, const Wish& wish, const Table& table) {
  for (const auto& [name, field] : table) {
    const auto place = place_of(name, wish.outputs);
    if (place < 0) continue;
    args.*field = view(*buffers.get<ffi::AnyBuffer>(static_cast<std::size_t>(place)).value(), wish.device);
  }
}

// A call's functions, and what they read: inputs t0, t1, ..., whose gradients are outputs dt0, dt1, ...
struct Functions {
  std::optional<Function> score, mask;
  std::vector<Tensor> gradients;

  Functions(const ffi::RemainingArgs& inputs, const ffi::RemainingRets& outputs, const Wish& wish) {
    if (wish.score_function.empty() && wish.mask_function.empty()) return;
    std::vector<ConstTensor> read;
    std::vector<int> wanted;
    for (int n = 0; n < static_cast<int>(Function::max_captured); ++n) {
      const std::string name = "t" + std::to_string(n);
      const auto place = place_of(name, wish.inputs);
      if (place < 0) break;
      read.emplace_back(
          view(inputs.get<ffi::AnyBuffer>(static_cast<std::size_t>(place)).value(), wish.device));
      Tensor& gradient = gradients.emplace_back();
      const auto of_gradient = place_of("d" + name, wish.outputs);
      if (of_gradient < 0) continue;
      gradient =
          view(*outputs.get<ffi::AnyBuffer>(static_cast<std::size_t>(of_gradient)).value(), wish.device);
      wanted.push_back(n);
    }
    using Kind = Function::Kind;
    if (!wish.score_function.empty()) score = Function::parse(wish.score_function, Kind::score, read, wanted);
    if (!wish.mask_function.empty()) mask = Function::parse(wish.mask_function, Kind::mask, read);
  }

  void give(AttentionInputs& args) const {
    args.score_function = score ? &*score : nullptr;
    args.mask_function = mask ? &*mask : nullptr;
  }
};

// The seed of dropout that the input `dropout_seed` holds: a key of jax.random, the high word first, as
// jax.random.key makes it of an integer. On a GPU the host waits for the stream: kernels take it by value.
std::optional<std::uint64_t> seed_of(const ffi::RemainingArgs& inputs, const Wish& wish) {
  const auto place = place_of("dropout_seed", wish.inputs);
  if (place < 0) return std::nullopt;
  const auto key = inputs.get<ffi::AnyBuffer>(static_cast<std::size_t>(place)).value();
  std::array<std::uint32_t, 2> words{};
  if (key.element_type() != ffi::DataType::U32 || key.element_count() != words.size()) {
    throw Error(Status::invalid_argument, "dropout_seed must be two words of 32 bits");
  }
  if (wish.device.kind == Device::Kind::cuda) {
    const gpu::ContextGuard guard(wish.device.index);
    const auto from = reinterpret_cast<gpu::abi::DevicePointer>(key.untyped_data());
    auto* const stream = static_cast<gpu::abi::Stream>(wish.execution.stream);
    gpu::check(gpu::driver().copy_to_host_async(words.data(), from, sizeof(words), stream),
               "cuMemcpyDtoHAsync");
    gpu::synchronize(wish.device.index, stream);
  } else {
    std::memcpy(words.data(), key.untyped_data(), sizeof(words));
  }
  return std::uint64_t{words[0]} << 32U | words[1];
}

// Where the call's rows and heads lie in a whole, of which dropout keeps entries.
ConstTensor places_of(const ffi::RemainingArgs& inputs, const Wish& wish) {
  const auto place = place_of("dropout_places", wish.inputs);
  if (place < 0) return {};
  return view(inputs.get<ffi::AnyBuffer>(static_cast<std::size_t>(place)).value(), wish.device);
}

template <typename Args>
void give_options(Args& args, const ffi::RemainingArgs& inputs, const Wish& wish) {
  args.options = wish.options;
  args.options.dropout_seed = seed_of(inputs, wish).value_or(wish.options.dropout_seed);
  args.dropout_places = places_of(inputs, wish);
}

ffi::ErrorCode code_of(Status status) {
  switch (status) {
    case Status::invalid_argument: return ffi::ErrorCode::kInvalidArgument;
    case Status::unsupported: return ffi::ErrorCode::kUnimplemented;
    case Status::out_of_memory: return ffi::ErrorCode::kResourceExhausted;
    case Status::interrupted: return ffi::ErrorCode::kCancelled;
    default: return ffi::ErrorCode::kInternal;
  }
}

template <bool backward_pass>
ffi::Error run(const ffi::RemainingArgs& inputs, const ffi::RemainingRets& outputs, const Wish& wish) try {
  const Functions functions(inputs, outputs, wish);
  if constexpr (backward_pass) {
    BackwardArgs args;
    functions.give(args);
    args.captured_gradients = functions.gradients;
    take(args, inputs, wish, input_fields);
    take(args, inputs, wish, backward_inputs);
    take(args, outputs, wish, backward_outputs);
    give_options(args, inputs, wish);
    backward(args, wish.execution);
  } else {
    ForwardArgs args;
    functions.give(args);
    take(args, inputs, wish, input_fields);
    take(args, outputs, wish, forward_outputs);
    give_options(args, inputs, wish);
    forward(args, wish.execution);
  }
  return ffi::Error::Success();
} catch (const Error& error) {
  if (error.status() == Status::interrupted) raise_later();
  return {code_of(error.status()), error.what()};
} catch (const std::exception& error) {
  return {ffi::ErrorCode::kInternal, error.what()};
}

// An attribute of the type that tandem.jax gives it.
template <typename T>
T attribute(const ffi::Dictionary& attributes, std::string_view name) {
  return attributes.get<T>(name).value();
}

template <typename T>
requires std::is_arithmetic_v<T>
void read(const ffi::Dictionary& attributes, std::string_view name, T& place) {
  place = attribute<T>(attributes, name);
}

void read(const ffi::Dictionary& attributes, std::string_view name, std::optional<float>& place) {
  place = attribute<float>(attributes, name);
}

void read(const ffi::Dictionary& attributes, std::string_view name, int& place) {
  place = static_cast<int>(attribute<std::int64_t>(attributes, name));
}

void read(const ffi::Dictionary& attributes, std::string_view name, Precision& place) {
  place = static_cast<Precision>(attribute<std::int64_t>(attributes, name));
}

void read(const ffi::Dictionary& attributes, std::string_view name, const Window& place) {
  const auto window = attribute<ffi::Span<const std::int64_t>>(attributes, name);
  place.left = window[0];
  place.right = window[1];
}

// An option that is no attribute has its default.
Wish make_wish(const ffi::Dictionary& attributes) {
  const auto text = [&](std::string_view name) { return attribute<std::string_view>(attributes, name); };
  Wish wish{.inputs = text("inputs"),
            .outputs = text("outputs"),
            .options = {},
            .execution = {},
            .device = {},
            .score_function = text("score_function"),
            .mask_function = text("mask_function")};
  bool return_max_logits = false;  // the outputs say so
  each_option(wish.options, wish.execution, return_max_logits, [&](std::string_view name, auto&& place) {
    if (attributes.contains(name)) read(attributes, name, place);
  });
  return wish;
}

template <bool backward_pass>
ffi::Error on_cpu(ffi::RemainingArgs inputs, ffi::RemainingRets outputs, ffi::Dictionary attributes) {
  Wish wish = make_wish(attributes);
  hear_signals_and_end(wish.execution);
  return run<backward_pass>(inputs, outputs, wish);
}

template <bool backward_pass>
ffi::Error on_cuda(void* stream, std::int32_t device, ffi::RemainingArgs inputs, ffi::RemainingRets outputs,
                   ffi::Dictionary attributes) {
  Wish wish = make_wish(attributes);
  wish.execution.stream = stream;
  wish.device = Device{.kind = Device::Kind::cuda, .index = device};
  return run<backward_pass>(inputs, outputs, wish);
}

template <bool backward_pass>
XLA_FFI_Error* cpu_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(&on_cpu<backward_pass>);
  return handler->Call(frame);
}

template <bool backward_pass>
XLA_FFI_Error* cuda_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .To(&on_cuda<backward_pass>);
  return handler->Call(frame);
}

}  // namespace

std::vector<JaxHandler> jax_handlers() {
  return {
      {"tandem_forward", "cpu", reinterpret_cast<const void*>(&cpu_handler<false>)},
      {"tandem_backward", "cpu", reinterpret_cast<const void*>(&cpu_handler<true>)},
      {"tandem_forward", "CUDA", reinterpret_cast<const void*>(&cuda_handler<false>)},
      {"tandem_backward", "CUDA", reinterpret_cast<const void*>(&cuda_handler<true>)},
  };
}

}  // namespace tandem::python
