// A simulated GPU for the CPU build of torch: a device of type `cuda` whose memory is host memory under a capacity.
//
// memory.h is the device's allocator, host.h pinned memory, runtime.h streams, events and hooks, fallback.h runs all
// operators on the CPU's kernels. Here are the operators that need a kernel of their own, because they make or change
// storages, or because torch calls them on CUDA only.
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace sim {

using at::IntArrayRef;
using std::optional;

// ------------------------------------------------------------------------------------------------- making and changing

void check(const optional<at::Device>& device, const optional<bool>& pin) {
  if (device) check_device(*device);
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(IntArrayRef sizes, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device> device,
             optional<bool> pin, optional<at::MemoryFormat> format) {
  check(device, pin);
  constexpr c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(sizes, allocator(), key, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device> device, optional<bool> pin) {
  check(device, pin);
  return empty_on_device(sizes, strides, at::dtype_or_default(dtype));
}

// Copies may cross devices, so the fallback, which refuses that, does not do for them.
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  BelowAutograd plain;
  Lent lent;
  lent.lend(self).copy_(lent.lend(source));
  return self;
}

Tensor& set_(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

void record_stream(Tensor& self, at::Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

// --------------------------------------------------------------------------------------- what torch calls on CUDA only

// The CPU's kernel would draw from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// `softmax(half, dtype=float32)` is one kernel on CUDA; the CPU's does not convert.
Tensor softmax(const Tensor& self, int64_t dim, bool to_float) {
  BelowAutograd plain;
  Lent lent;
  Tensor input = lent.lend(self);
  return lent.take(at::_softmax(to_float ? input.to(at::kFloat) : input, dim, false));
}
Tensor log_softmax(const Tensor& self, int64_t dim, bool to_float) {
  BelowAutograd plain;
  Lent lent;
  Tensor input = lent.lend(self);
  return lent.take(at::_log_softmax(to_float ? input.to(at::kFloat) : input, dim, false));
}
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  BelowAutograd plain;
  Lent lent;
  Tensor result = at::_softmax_backward_data(lent.lend(grad), lent.lend(output), dim, grad.scalar_type());
  return lent.take(result.to(dtype));
}
Tensor log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  BelowAutograd plain;
  Lent lent;
  Tensor result = at::_log_softmax_backward_data(lent.lend(grad), lent.lend(output), dim, grad.scalar_type());
  return lent.take(result.to(dtype));
}

Tensor with_bias(const Tensor& gates, const optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
Tensor or_zeros(const optional<Tensor>& grad, const Tensor& like) {
  return grad && grad->defined() ? *grad : at::zeros_like(like);
}

// The cells of LSTM and GRU; the workspace is what their own backward reads.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                             const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  auto parts = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const optional<Tensor>& grad_hy, const optional<Tensor>& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  Tensor in = gates[0], forget = gates[1], cell = gates[2], out = gates[3], bent = cy.tanh();
  Tensor of_hy = or_zeros(grad_hy, cy), of_cy = or_zeros(grad_cy, cy) + of_hy * out * (1 - bent * bent);
  Tensor grad = at::cat({of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
                         of_cy * in * (1 - cell * cell), of_hy * bent * out * (1 - out)}, 1);
  return {grad, of_cy * forget, has_bias ? grad.sum(0) : Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  auto from_input = with_bias(input, input_bias).chunk(3, 1), from_hidden = with_bias(hidden, hidden_bias).chunk(3, 1);
  Tensor reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
  Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace,
                                                                     bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  Tensor reset = kept[0], update = kept[1], fresh = kept[2], hx = kept[3], hidden = kept[4];
  Tensor of_fresh = grad * (1 - update) * (1 - fresh * fresh);
  Tensor of_reset = of_fresh * hidden * reset * (1 - reset), of_update = grad * (hx - fresh) * update * (1 - update);
  Tensor of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  Tensor of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad * update, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool,
                         optional<double>, bool) {
  return 0;  // the composite one: there are no fused kernels here
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("copy_", &sim::copy_);
  m.impl("resize_", &at::native::resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_", &sim::set_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("record_stream", &sim::record_stream);

  // Torch's composites would choose kernels of CUDA's own.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
  m.impl("_fused_sdp_choice", &sim::choose_attention);
  m.impl("native_dropout", &sim::native_dropout);
  m.impl("_softmax", &sim::softmax);
  m.impl("_log_softmax", &sim::log_softmax);
  m.impl("_softmax_backward_data", &sim::softmax_backward);
  m.impl("_log_softmax_backward_data", &sim::log_softmax_backward);
  m.impl("_thnn_fused_lstm_cell", &sim::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &sim::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &sim::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &sim::gru_cell_backward);
}

// What Python needs of the device and the CPU build gives no way to: as operators, so that errors keep their class.
TORCH_LIBRARY(sim, m) {
  m.def("default_generator() -> Generator?", [] { return sim::default_generator(); });
  m.def("resize_storage(Tensor self, int bytes) -> ()", [](const at::Tensor& self, int64_t bytes) {
    at::native::resize_bytes_cpu(self.storage().unsafeGetStorageImpl(), static_cast<size_t>(bytes));
  });
  m.def("elapsed_ms(int start, int end) -> float", [](int64_t start, int64_t end) {
    return sim::Guard().elapsedTime(reinterpret_cast<void*>(start), reinterpret_cast<void*>(end), 0);
  });
}

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, ::sim::Guard)
}
namespace at {
using ::sim::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

static const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &sim::memory());
  at::setHostAllocator(at::kCUDA, &sim::pinned());
  return true;
}();

extern "C" {
void sim_set_capacity(uint64_t bytes) { sim::memory().set_capacity(bytes); }
void sim_set_foreign(uint64_t bytes) { sim::memory().set_foreign(bytes); }
void sim_set_poison(int on) { sim::memory().set_poison(on != 0); }
void sim_set_capturing(int on) { sim::capturing = on != 0; }
int64_t sim_live() { return sim::memory().getDeviceStats(0).allocated_bytes[0].current; }
// As `cudaHostRegister` and `cudaHostUnregister`.
void sim_pin(const void* data, uint64_t bytes) { sim::pinned().add(data, bytes); }
int sim_unpin(const void* data) { return sim::pinned().remove(data); }
}
