// CPU tensors over a card's memory, and the 32-bit arithmetic of the card.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>

#include "runtime.h"

namespace simgcu {

using at::Tensor;

bool on_card(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kGCU; }

c10::Storage host_storage(const c10::Storage& storage, bool owning) {
  c10::Device cpu(c10::kCPU);
  void* memory = storage.mutable_data();
  auto pointer = owning ? c10::DataPtr(memory, new c10::Storage(storage),
                                       [](void* owner) { delete static_cast<c10::Storage*>(owner); }, cpu)
                        : c10::DataPtr(memory, cpu);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetCPUAllocator(),
                      /*resizable=*/true);
}

Tensor rewrap(const Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return made;
}

Tensor host_view(const Tensor& tensor, bool owning) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "GCU: tensors of layout ", tensor.layout(),
                              " are not supported");
  return rewrap(tensor, host_storage(tensor.storage(), owning), c10::DispatchKey::CPU);
}

static bool int64_enabled() {
  const char* value = getenv("TORCH_GCU_ENABLE_INT64_AND_UINT64");  // asked each time, as by the vendor's
  return value && (std::string(value) == "true" || std::string(value) == "1");
}

void narrow_in_place(const Tensor& host) {
  if (!host.defined() || host.numel() == 0) return;
  auto type = host.scalar_type();
  if (type != at::kDouble && !(type == at::kLong && !int64_enabled())) return;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  auto narrow = host.to(type == at::kDouble ? at::kFloat : at::kInt).to(type);
  Tensor target = host;
  if (type == at::kDouble) {
    TORCH_WARN_ONCE("GCU has no float64: values of float64 tensors are computed and kept in 32 bits");
  } else {
    if (narrow.equal(host)) return;  // small numbers are the same in either width
    TORCH_WARN_ONCE("GCU has no int64: values of int64 tensors are kept in 32 bits; set ",
                    "TORCH_GCU_ENABLE_INT64_AND_UINT64=true for 64 bits where the card has them");
  }
  target.copy_(narrow);
}

}  // namespace simgcu
