// Operators that make tensors, views and copies: those that a device has to define itself.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "runtime.h"

namespace simgcu {
namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using Sizes = c10::SymIntArrayRef;
template <typename T>
using Optional = std::optional<T>;

Device place(Optional<Device> device) {
  auto index = device && device->has_index() ? device->index() : current_device();
  lazy_init();
  check_ordinal(index);
  return Device(kGCU, index);
}

Tensor empty(Sizes size, Optional<at::ScalarType> type, Optional<at::Layout> layout, Optional<Device> device,
             Optional<bool> pinned, Optional<at::MemoryFormat> format) {
  TORCH_CHECK(!(pinned && *pinned), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided, "GCU: tensors of layout ",
                              c10::layout_or_default(layout), " are not supported");
  c10::DeviceGuard guard(place(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), card_allocator(),
                                   DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}

Tensor empty_strided(Sizes size, Sizes stride, Optional<at::ScalarType> type, Optional<at::Layout>,
                     Optional<Device> device, Optional<bool>) {
  c10::DeviceGuard guard(place(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           card_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

Tensor efficient_zeros(Sizes size, Optional<at::ScalarType> type, Optional<at::Layout>, Optional<Device> device,
                       Optional<bool>) {
  at::native::ZeroTensorAllocator allocator(place(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   DispatchKeySet(DispatchKey::PrivateUse1) | DispatchKeySet(DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(type), std::nullopt);
}

Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, Optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? Optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor view(const Tensor& self, Sizes size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, Sizes size, Optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage_offset(Tensor& self, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(Tensor& self, at::Storage storage) { return at::native::set_(self, std::move(storage)); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_nothing(Tensor& self) { return self.set_(at::empty({0}, self.options())); }

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto to = on_card(target) ? host_view(target, false) : target;
  const bool from_host = !on_card(source), to_host = !on_card(target);
  // A real card converts before or after the copy: what crosses is of the source's type.
  count_copy(from_host ? &source : to_host ? &target : nullptr, from_host ? "to card" : to_host ? "to host" : "within",
             source.numel() * source.element_size(), non_blocking);
  to.copy_(on_card(source) ? host_view(source, false) : source, non_blocking);
  if (on_card(target) && !(on_card(source) && source.scalar_type() == target.scalar_type())) narrow_in_place(to);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// Nothing is ever still in use by another stream.
void record_stream(Tensor&, at::Stream) {}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Optional<Tensor>& mask,
                         double dropout, bool causal, Optional<double> scale, bool grouped) {
  // Flash attention takes half precision only on this card; the memory-efficient kernel is chosen for all else, and lacks
  // float32: TOPSATEN_STATUS_NOT_SUPPORT, or a missing symbol and SIGABRT.
  TORCH_CHECK_NOT_IMPLEMENTED(
      profile() != Profile::l600 || query.scalar_type() != at::kFloat || !at::globalContext().userEnabledMemEfficientSDP(),
      "GCU (L600): fused attention in float32 ends the process on a real card (topsatenScaledDotProductEfficientAttention); ",
      "compute attention of other operators, turn torch.backends.cuda.enable_mem_efficient_sdp off, or use half precision");
  // What the CPU would choose, so that a run here is the CPU's, bit for bit. Under vmap there is no memory to look at.
  for (auto* tensor : {&query, &key, &value})
    if (!tensor->has_storage()) return static_cast<int64_t>(at::SDPBackend::math);
  at::AutoDispatchBelowADInplaceOrView below;
  auto host = [](const Tensor& tensor) {
    auto view = on_card(tensor) ? host_view(tensor, false) : tensor.detach();
    if (tensor.requires_grad()) view.set_requires_grad(true);
    return view;
  };
  auto host_mask = mask && mask->defined() ? Optional<Tensor>(host(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(host(query), host(key), host(value), host_mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &choose_attention);
}

}  // namespace

int64_t choose_attention_stub(const Tensor& query, const Tensor& key, const Tensor& value, const Optional<Tensor>& mask,
                              double dropout, bool causal, Optional<double> scale, bool grouped) {
  return choose_attention(query, key, value, mask, dropout, causal, scale, grouped);
}

}  // namespace simgcu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgcu::choose_attention_stub)
}
