// Every operator that is not in operators.cpp: arguments are lent to the CPU's kernel as views of the card's memory, and
// what it returns becomes the card's.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

#include "runtime.h"

namespace simgcu {
namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;

// The tensors of one call of an operator, and their counterparts on the other side.
class Call {
 public:
  std::optional<Device> card;   // that its tensors lie on
  std::optional<Device> other;  // of a tensor that lies elsewhere
  bool complex = false;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_complex()) complex = true;
    if (!on_card(tensor)) {
      if (!(tensor.is_cpu() && tensor.dim() == 0)) other = tensor.device();  // numbers may come from the CPU
      foreign_.emplace(tensor.unsafeGetTensorImpl(), tensor);
      return tensor;
    }
    if (card && *card != tensor.device() && !other) other = tensor.device();
    if (!card) card = tensor.device();
    auto known = views_.find(tensor.unsafeGetTensorImpl());
    if (known != views_.end()) return known->second;
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && !tensor.is_quantized(), "GCU: ", tensor.layout(),
                                tensor.is_quantized() ? " quantised" : "", " tensors are not supported");
    auto view = rewrap(tensor, storage_on_host(tensor.storage()), DispatchKey::CPU);
    views_.emplace(tensor.unsafeGetTensorImpl(), view);
    origins_.emplace(view.unsafeGetTensorImpl(), tensor);
    return view;
  }

  Tensor to_card(const Tensor& tensor, Device device) {
    if (!tensor.defined() || on_card(tensor)) return tensor;
    auto origin = origins_.find(tensor.unsafeGetTensorImpl());
    if (origin != origins_.end()) return origin->second;
    if (foreign_.count(tensor.unsafeGetTensorImpl())) return tensor;
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized(),
                                "GCU: ", tensor.layout(), tensor.is_quantized() ? " quantised" : "",
                                " tensors are not supported");
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto known = to_card_.find(impl);
    if (known == to_card_.end()) {
      narrow_in_place(tensor);  // of an operator's own making; views of arguments are narrow already
      c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                           adopt(tensor.storage(), device.index()), card_allocator(), true);
      known = to_card_.emplace(impl, storage).first;
    }
    return rewrap(tensor, known->second, DispatchKey::PrivateUse1);
  }

  // An out= argument or resize_ may have got other memory or another shape.
  void write_back() {
    for (auto& [impl, view] : views_) {
      const Tensor& origin = origins_.at(view.unsafeGetTensorImpl());
      auto& mine = view.storage();
      auto* storage = origin.storage().unsafeGetStorageImpl();
      if (mine.data() != storage->data() || mine.nbytes() != storage->nbytes()) {
        auto fresh = allocate_on(mine.nbytes(), origin.device().index());
        if (mine.nbytes()) memcpy(fresh.get(), mine.data(), mine.nbytes());
        storage->set_data_ptr_noswap(std::move(fresh));
        storage->set_nbytes(mine.nbytes());
      }
      if (view.sizes() != origin.sizes() || view.strides() != origin.strides() ||
          view.storage_offset() != origin.storage_offset())
        origin.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    }
  }

  // Arguments that the operator wrote to.
  void narrow_written(const Tensor& view) {
    if (origins_.count(view.unsafeGetTensorImpl())) narrow_in_place(view);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_host_, to_card_;
  std::unordered_map<c10::TensorImpl*, Tensor> views_;    // by the card's tensor
  std::unordered_map<c10::TensorImpl*, Tensor> origins_;  // by the view
  std::unordered_map<c10::TensorImpl*, Tensor> foreign_;

  c10::Storage storage_on_host(const c10::Storage& storage) {
    auto* impl = storage.unsafeGetStorageImpl();
    auto known = on_host_.find(impl);
    if (known == on_host_.end()) {
      known = on_host_.emplace(impl, host_storage(storage, false)).first;
      to_card_.emplace(known->second.unsafeGetStorageImpl(), storage);
    }
    return known->second;
  }
};

// Operators that take some operands from the CPU on every kind of card.
bool takes_host_operands(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_pack_padded_sequence",
      "aten::_pad_packed_sequence", "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_foreach_copy_"};
  return names.count(name) > 0;
}

int64_t bytes_of(const Tensor& tensor) { return tensor.defined() ? tensor.numel() * tensor.element_size() : 0; }

int64_t bytes_of(const c10::IValue& value) {
  int64_t bytes = 0;
  if (value.isTensor()) bytes = bytes_of(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& tensor : value.toTensorList()) bytes += bytes_of(tensor);
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) bytes += tensor ? bytes_of(*tensor) : 0;
  return bytes;
}

bool is_generator(const c10::Argument& argument) {
  auto kind = argument.type()->kind();
  if (kind == c10::TypeKind::OptionalType)
    kind = argument.type()->castRaw<c10::OptionalType>()->getElementType()->kind();
  return kind == c10::TypeKind::GeneratorType;
}

// Some operators draw random numbers without a generator argument: the CPU's default one stands in for the card's.
class LendGenerator {
 public:
  explicit LendGenerator(at::Generator card) : cpu_(at::detail::getDefaultCPUGenerator()), card_(std::move(card)) {
    saved_ = cpu_.get_state();
    cpu_.set_state(card_.get_state());
  }
  ~LendGenerator() {
    card_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  at::Generator cpu_, card_;
  Tensor saved_;
};

void run_on_host_views(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto begin = stack->size() - arguments.size();
  Call call;
  std::optional<Device> wanted;
  std::vector<size_t> generators;
  std::vector<Tensor> written;
  int64_t bytes = 0;  // that a real card would send to the CPU and get back
  std::string reduction;
  bool masked = false;  // values put where a mask is true: how many, only the card knows (to read them, it is asked)
  const bool puts = schema.name().find("index_put") != std::string::npos && (*stack)[begin + 2].toTensor().numel() != 1;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = arguments[i].alias_info();
    const bool writes = alias && alias->isWrite();
    if (!arguments[i].is_out()) bytes += bytes_of(value);
    if (writes) bytes += bytes_of(value);
    if (arguments[i].name() == "reduce" && value.isString()) reduction = value.toStringRef();
    if (value.isTensor()) {
      auto view = call.to_host(value.toTensor());
      if (writes && view.defined()) written.push_back(view);
      value = view;
    } else if (value.isTensorList()) {
      c10::List<Tensor> views;
      for (const Tensor& tensor : value.toTensorList()) {
        views.push_back(call.to_host(tensor));
        if (writes) written.push_back(views.get(views.size() - 1));
      }
      value = views;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> views;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        masked = masked || (puts && tensor && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte));
        views.push_back(tensor ? std::optional<Tensor>(call.to_host(*tensor)) : tensor);
      }
      value = views;
    } else if (value.isDevice() && value.toDevice().type() == kGCU) {
      wanted = value.toDevice();
      value = Device(c10::kCPU);
    }
    if (is_generator(arguments[i])) generators.push_back(begin + i);
  }
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  if (call.card && call.other && !takes_host_operands(schema.name()))
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                call.card->str(), " and ", call.other->str(), "! (when checking arguments in method ", schema.name(), ")");
  const bool fallen = falls_back(name.substr(name.find("::") + 2), reduction, call.complex);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), "GCU has no kernel for ", schema.name(),
                              ", and neither has the CPU to fall back to");
  Device device = call.card ? *call.card : wanted ? *wanted : Device(kGCU, current_device());
  if (!device.has_index()) device = Device(kGCU, current_device());

  at::AutoDispatchBelowADInplaceOrView below;
  for (auto i : generators) {
    auto& value = (*stack)[i];
    value = inner_generator(value.isNone() ? default_generator(device.index()) : value.toGenerator());
  }
  std::optional<LendGenerator> lent;
  if (generators.empty() && op.hasTag(at::Tag::nondeterministic_seeded))
    lent.emplace(inner_generator(default_generator(device.index())));
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  lent.reset();

  for (const auto& tensor : written) call.narrow_written(tensor);
  call.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto* alias = schema.returns()[i + schema.returns().size() - stack->size()].alias_info();
    if (!alias) bytes += bytes_of(value);
    if (value.isTensor()) {
      value = call.to_card(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorList()) made.push_back(call.to_card(tensor, device));
      value = made;
    }
  }
  if (keeps_statistics()) count_use(name);
  if (waits(name) || masked) count_wait(name);
  if (fallen) count_fallback(schema.name(), bytes);
}

auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&run_on_host_views>(); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Operators that are composed of others never reach the catch-all below: name those that the plug-in has kernels of
  // its own for, as far as the CPU has one to do their work. What it leaves to be composed is so here, too.
  for (const auto& operation : c10::Dispatcher::singleton().getAllOpNames()) {
    if (operation.name.rfind("aten::", 0) != 0) continue;
    const auto& overload = operation.overload_name;
    const auto name = operation.name.substr(6) + (overload.empty() ? "" : "." + overload);
    auto op = c10::Dispatcher::singleton().findOp(operation);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    const bool composed = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                          op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool computed = op->hasKernelForDispatchKey(DispatchKey::CPU) || name.rfind("_foreach_", 0) == 0 ||
                          name.rfind("convolution", 0) == 0 || name == "repeat_interleave.self_Tensor" ||
                          is_sent_to_cpu(name, "");
    if (composed && computed && is_native(name) && name != "_foreach_copy_") m.impl(name.c_str(), boxed());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed()); }

}  // namespace
}  // namespace simgcu
