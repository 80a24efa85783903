#include "views.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>

namespace simgcu {

using at::Tensor;

bool on_card(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kCard; }

c10::Storage host_storage(const c10::Storage& storage, bool owning) {
  c10::Device cpu(c10::kCPU);
  auto bytes = owning ? c10::DataPtr(storage.data(), new c10::Storage(storage),
                                     [](void* owner) { delete static_cast<c10::Storage*>(owner); }, cpu)
                      : c10::DataPtr(storage.data(), cpu);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetCPUAllocator(),
                      /*resizable=*/true);
}

Tensor rewrap(const Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return made;
}

Tensor host_view(const Tensor& tensor, bool owning) {
  return rewrap(tensor, host_storage(tensor.storage(), owning), c10::DispatchKey::CPU);
}

c10::Storage card_storage(const c10::Storage& cpu, c10::DeviceIndex card) {
  return c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(), adopt(cpu, card), card_allocator(),
                      /*resizable=*/true);
}

Tensor to_card(const Tensor& cpu, c10::DeviceIndex card) {
  return cpu.defined() ? rewrap(cpu, card_storage(cpu.storage(), card), kCardKey) : cpu;
}

void narrow_in_place(const Tensor& host) {
  if (!host.defined() || host.numel() == 0) return;
  auto type = host.scalar_type();
  if (type != at::kDouble && !(type == at::kLong && !settings().wide_integers)) return;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  auto narrow = host.to(type == at::kDouble ? at::kFloat : at::kInt);
  if (type == at::kDouble) {
    TORCH_WARN_ONCE("GCU has no float64: values of float64 tensors are computed and kept in 32 bits");
  } else {
    if (narrow.to(at::kLong).equal(host)) return;  // small numbers are the same in either width
    TORCH_WARN_ONCE("GCU has no int64: values of int64 tensors are kept in 32 bits; set ",
                    "TORCH_GCU_ENABLE_INT64_AND_UINT64=true for 64 bits where the card has them");
  }
  Tensor target = host;
  target.copy_(narrow);
}

void run(const Tensor& tensor) {
  if (auto* block = block_of(tensor.storage())) block->pending.run();
}

void record(const std::vector<Tensor>& written, const std::vector<Tensor>& read) {
  std::vector<const Pending*> inputs;
  for (auto* tensors : {&read, &written}) {
    for (auto& tensor : *tensors) {
      if (auto* block = block_of(tensor.storage())) inputs.push_back(&block->pending);
    }
  }
  auto operation = record(inputs);
  for (auto& tensor : written) {
    if (auto* block = block_of(tensor.storage())) block->pending.set(operation);
  }
}

void arrived(const Tensor& tensor) {
  if (auto* block = block_of(tensor.storage())) block->pending.set(nullptr);
}

void refuse_mixture(c10::Device one, c10::Device other, const std::string& name) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "! (when calling ", name, ")");
}

}  // namespace simgcu
