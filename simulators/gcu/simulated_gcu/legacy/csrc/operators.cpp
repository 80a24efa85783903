// Operators that cannot go through the fallback: they make memory, look at strides, or cross devices.
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "views.h"

namespace simgcu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::optional;

// -- making tensors

c10::DeviceIndex chosen_card(optional<c10::Device> device) {
  auto card = device && device->has_index() ? device->index() : current_card();
  check_card(card);
  return card;
}

int64_t elements_spanned(IntArrayRef size, IntArrayRef stride) {
  int64_t last = 0;
  for (size_t i = 0; i < size.size(); ++i) {
    if (size[i] == 0) return 0;
    last += (size[i] - 1) * stride[i];
  }
  return last + 1;
}

Tensor make(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<c10::Device> device) {
  auto type = c10::dtype_or_default(dtype);
  if (at::isComplexType(type)) falls_back("aten::empty", /*complex=*/true);
  auto meta = at::scalarTypeToTypeMeta(type);
  size_t bytes = elements_spanned(size, stride) * meta.itemsize();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate(bytes, chosen_card(device)), card_allocator(),
                       /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kCardKey), meta);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<c10::Device> device, optional<bool>) {
  return make(size, stride, dtype, device);
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<c10::Device> device,
             optional<bool>, optional<at::MemoryFormat> format) {
  std::vector<int64_t> strides(size.size());
  int64_t stride = 1;
  for (size_t i = size.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(size[i], 1);
  }
  auto made = make(size, strides, dtype, device);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return made;
}

// -- views

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto old = self.storage().nbytes();
  at::native::resize_(self, size, format);
  if (self.storage().nbytes() == old) return self;
  // torch has enlarged the storage by a block of the current card: make it one of its own card.
  auto card = self.device().index();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (block_of(self.storage()) && block_of(self.storage())->card != card) {
    auto bytes = allocate(storage->nbytes(), card);
    std::memcpy(bytes.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(bytes));
  }
  return self;
}

// -- copies between devices

bool fills_storage(const Tensor& tensor) { return size_t(tensor.numel()) * tensor.itemsize() == tensor.storage().nbytes(); }

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto to = on_card(dst) ? host_view(dst) : dst;
  to.copy_(on_card(self) ? host_view(self) : self, non_blocking);
  if (!on_card(dst)) {
    run(self);
    return dst;
  }
  narrow_in_place(to);
  if (self.device() == dst.device()) {
    record({dst}, {self});
    return dst;
  }
  if (on_card(self)) run(self);  // the other card waits for it
  fills_storage(dst) ? arrived(dst) : record({dst}, {});
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

// -- convolution, which torch leaves to devices like this one as a whole, backward included

void check_together(const Tensor& one, const Tensor& other, const char* name) {
  if (one.device() != other.device()) refuse_mixture(one.device(), other.device(), name);
}

Tensor result_on_card(const Tensor& host, const Tensor& like) {
  auto result = to_card(host, like.device().index());
  narrow_in_place(host);
  return result;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const char* name = "aten::convolution";
  check_together(input, weight, name);
  falls_back(name, input.is_complex());
  std::vector<Tensor> read{input, weight};
  optional<Tensor> host_bias;
  if (bias && bias->defined()) {
    check_together(input, *bias, name);
    host_bias = host_view(*bias);
    read.push_back(*bias);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto host = at::convolution(host_view(input), host_view(weight), host_bias, stride, padding, dilation, transposed,
                              output_padding, groups);
  auto result = result_on_card(host, input);
  record({result}, read);
  return result;
}

// Restores the dispatcher's thread-local state, which a backward pass inside of an operator must do without.
class FreshDispatch {
 public:
  FreshDispatch() : saved_(c10::impl::tls_local_dispatch_key_set()) {
    c10::impl::_force_tls_local_dispatch_key_set(c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet()));
  }
  ~FreshDispatch() { c10::impl::_force_tls_local_dispatch_key_set(saved_); }

 private:
  c10::impl::LocalDispatchKeySet saved_;
};

// torch 1.10 has no single CPU kernel for this: differentiate the CPU's forward instead, over the same memory.
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad_output, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  const char* name = "aten::convolution_backward";
  check_together(grad_output, input, name);
  check_together(input, weight, name);
  std::vector<Tensor> gradients;
  {
    FreshDispatch fresh;
    at::AutoGradMode on(true);
    auto leaf = [](const Tensor& host, bool wants) { return host.set_requires_grad(wants); };
    auto x = leaf(host_view(input), wanted[0]);
    auto w = leaf(host_view(weight), wanted[1]);
    optional<Tensor> b;
    if (wanted[2]) b = leaf(at::zeros({transposed ? weight.size(1) * groups : weight.size(0)}, x.options()), true);
    auto y = at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups);
    std::vector<Tensor> asked;
    if (wanted[0]) asked.push_back(x);
    if (wanted[1]) asked.push_back(w);
    if (wanted[2]) asked.push_back(*b);
    gradients = torch::autograd::grad({y}, asked, {host_view(grad_output)});
  }
  std::array<Tensor, 3> results;
  std::vector<Tensor> written;
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!wanted[i]) continue;
    results[i] = result_on_card(gradients[next++].detach().contiguous(), input);
    written.push_back(results[i]);
  }
  if (!written.empty()) record(written, {grad_output, input, weight});
  return std::make_tuple(results[0], results[1], results[2]);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace simgcu
