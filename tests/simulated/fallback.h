// Operators without a kernel of their own run on the CPU's, over the very memory of the device.
//
// Device memory is host memory, so a tensor of the device is lent to the CPU kernel as a CPU tensor over the same bytes:
// nothing is copied in, and what is written in place is written. Results are copied into device memory; a result that is
// a view of an argument becomes a view of that argument. Tensors of mixed devices are refused as CUDA refuses them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "runtime.h"

namespace sim {

using at::Tensor;
using c10::IValue;

// CPU kernels call operators themselves; autograd and autocast have had their turn with the device's tensors.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard plain{c10::autocast_dispatch_keyset};
};

inline Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  constexpr c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, allocator(), key, dtype);
}

// The CPU tensors that stand for the device's during one call. Storages that are one there are one here, so kernels see
// overlaps and aliases.
class Lent {
 public:
  Tensor lend(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto& lent = tensors_[tensor.unsafeGetTensorImpl()];
    if (!lent.defined()) lent = over_same_memory(tensor);
    return lent;
  }

  // A kernel's result as a tensor of the device.
  Tensor take(const Tensor& result) {
    if (!result.defined() || result.is_cuda()) return result;
    TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided && !result.is_quantized(),
                                "the simulated GPU holds plain strided tensors only, not ", result.toString());
    auto found = storages_.find(result.storage().unsafeGetStorageImpl());
    return found == storages_.end() ? copied(result) : view(result, found->second);
  }

  // Told after a kernel ran: what it resized is resized on the device.
  void settle(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return;
    const Tensor& lent = tensors_.at(tensor.unsafeGetTensorImpl());
    settle_storage(tensor.storage(), lent.storage());
    if (tensor.sizes() != lent.sizes() || tensor.strides() != lent.strides() ||
        tensor.storage_offset() != lent.storage_offset()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(lent.sizes(), lent.strides(), lent.storage_offset());
    }
  }

 private:
  Tensor over_same_memory(const Tensor& tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "the simulated GPU holds strided tensors only");
    auto& storage = lent_storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = over_same_bytes(tensor.storage());
      storages_.emplace(storage.unsafeGetStorageImpl(), tensor);
    }
    auto lent = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = lent.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    copy_flags(tensor, lent);
    return lent;
  }

  // Keeps the device's storage as long as any kernel keeps the lent one.
  static c10::Storage over_same_bytes(const c10::Storage& storage) {
    auto drop = [](void* held) { delete static_cast<c10::Storage*>(held); };
    c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), drop, c10::Device(c10::DeviceType::CPU));
    return c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  }

  static Tensor copied(const Tensor& result) {
    Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
    Tensor copy = empty_on_device(dense.sizes(), dense.strides(), dense.scalar_type());
    if (dense.nbytes()) std::memcpy(copy.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    copy_flags(dense, copy);
    return copy;
  }

  static Tensor view(const Tensor& result, const Tensor& base) {
    auto keys = base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys, result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    copy_flags(result, view);
    return view;
  }

  static void copy_flags(const Tensor& from, const Tensor& to) {
    if (from.is_conj()) to.unsafeGetTensorImpl()->_set_conj(true);
    if (from.is_neg()) to.unsafeGetTensorImpl()->_set_neg(true);
  }

  static void settle_storage(const c10::Storage& device, const c10::Storage& lent) {
    if (device.data() == lent.data() && device.nbytes() == lent.nbytes()) return;
    auto data = allocator()->allocate(lent.nbytes());
    if (lent.nbytes()) std::memcpy(data.get(), lent.data(), lent.nbytes());
    device.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    device.unsafeGetStorageImpl()->set_nbytes(lent.nbytes());
  }

  std::unordered_map<c10::TensorImpl*, Tensor> tensors_;             // by the device's tensor
  std::unordered_map<c10::StorageImpl*, c10::Storage> lent_storages_;  // by the device's storage
  std::unordered_map<c10::StorageImpl*, Tensor> storages_;           // by the lent storage: a tensor of the device over it
};

// One operator, called with boxed arguments.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    auto arguments = torch::jit::last(stack, schema_.arguments().size());
    given_.assign(arguments.begin(), arguments.end());
  }

  void run() {
    look();
    size_t first = stack_->size() - given_.size();
    for (size_t i = 0; i < given_.size(); i++) (*stack_)[first + i] = argument(i);
    {
      BelowAutograd plain;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    for (size_t i = 0; i < given_.size(); i++) {
      if (written(schema_.arguments()[i])) each(given_[i], [&](const Tensor& tensor) { lent_.settle(tensor); });
    }
    first = stack_->size() - schema_.returns().size();
    for (size_t i = 0; i < schema_.returns().size(); i++) (*stack_)[first + i] = result(i, (*stack_)[first + i]);
  }

 private:
  static bool written(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  }

  template <class Action>
  static void each(const IValue& value, Action action) {
    if (value.isTensor()) {
      action(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) action(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor) action(*tensor);
      }
    }
  }

  // Refuses what CUDA refuses. A CPU scalar may take part where it is one number among tensors, and CPU indices may
  // select from a tensor of the device.
  void look() {
    const auto& name = schema_.name();
    for (size_t i = 0; i < given_.size(); i++) {
      const auto& argument = schema_.arguments()[i];
      if (given_[i].isDevice()) on_device_ |= given_[i].toDevice().is_cuda();
      each(given_[i], [&](const Tensor& tensor) { on_device_ |= tensor.defined() && tensor.is_cuda(); });
      bool anywhere = argument.name() == "indices" && name.find("index") != std::string::npos;
      anywhere |= name == "aten::_ctc_loss" && argument.name().find("lengths") != std::string::npos;
      bool scalar = takes_scalars();
      each(given_[i], [&](const Tensor& tensor) {
        if (!tensor.defined() || tensor.is_cuda() || anywhere) return;
        if (scalar && tensor.dim() == 0 && !written(argument)) return;
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", kDevice,
                    " and ", tensor.device(), "! (when checking argument for argument ", argument.name(),
                    " in method wrapper_CUDA_", name.substr(name.find(':') + 2), ")");
      });
    }
  }

  // Whether one number may come from the CPU: where CUDA's kernel goes element by element, which the tag tells of most.
  bool takes_scalars() const {
    static const std::unordered_set<std::string> untagged{
        "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "index_put", "index_put_",
        "_index_put_impl_", "where", "isclose", "floor_divide", "floor_divide_", "eq_", "ne_", "lt_", "le_", "gt_", "ge_"};
    return op_.hasTag(at::Tag::pointwise) || untagged.count(schema_.name().substr(sizeof("aten::") - 1));
  }

  IValue argument(size_t i) {
    const IValue& value = given_[i];
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    if (value.isGenerator()) return engine_of(value.toGenerator());
    if (value.isNone() && on_device_ && takes_generator(schema_.arguments()[i])) return engine_of(default_generator());
    if (value.isTensor()) return lent_.lend(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(lent_.lend(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::make_optional(lent_.lend(*tensor)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  static bool takes_generator(const c10::Argument& argument) {
    auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  static at::Generator engine_of(const at::Generator& generator) {
    auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(ours, "Expected a 'cuda' device type for generator but found '", generator.device(), "'");
    return ours->engine();
  }

  IValue result(size_t i, const IValue& value) {
    const auto* alias = schema_.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t a = 0; a < given_.size(); a++) {
        const auto* of = schema_.arguments()[a].alias_info();
        if (of && *of == *alias) return given_[a];
      }
    }
    if (!on_device_) return value;
    if (value.isTensor()) return lent_.take(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(lent_.take(tensor));
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<IValue> given_;
  bool on_device_ = false;
  Lent lent_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace sim
