// Every operator that has no kernel of its own here: run the CPU's over the card's memory.
//
// The boxed fallback sees each call before any kernel: it replaces card tensors by CPU views of the same bytes, calls
// the CPU kernel, and makes card tensors of what comes back. Nothing is copied.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "views.h"

namespace simgcu {
namespace {

using at::Tensor;

// The tensors of one call, with their CPU views.
class Call {
 public:
  // The CPU view of an argument; remembers where it lies.
  Tensor enter(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_card(tensor)) {
      bool scalar = tensor.is_cpu() && tensor.dim() == 0;  // torch lets numbers stay on the CPU
      if (!scalar) elsewhere_ = tensor.device();
      foreign_.emplace(tensor.unsafeGetTensorImpl());
      return tensor;
    }
    if (!device_) device_ = tensor.device();
    if (*device_ != tensor.device()) elsewhere_ = tensor.device();
    complex_ = complex_ || tensor.is_complex();
    auto known = views_.find(tensor.unsafeGetTensorImpl());
    if (known != views_.end()) return known->second;
    // Views of one storage must share one CPU storage too: kernels look for overlap.
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto host = host_storages_.find(storage);
    if (host == host_storages_.end()) {
      host = host_storages_.emplace(storage, host_storage(tensor.storage(), /*owning=*/false)).first;
      card_storages_.emplace(host->second.unsafeGetStorageImpl(), tensor.storage());
    }
    auto view = rewrap(tensor, host->second, c10::DispatchKey::CPU);
    views_.emplace(tensor.unsafeGetTensorImpl(), view);
    originals_.emplace(view.unsafeGetTensorImpl(), tensor);
    inputs_.push_back(tensor);
    return view;
  }

  // The card tensor of a result: an argument again, a view of one, or new memory.
  Tensor leave(const Tensor& tensor, c10::DeviceIndex card) {
    if (!tensor.defined() || on_card(tensor)) return tensor;
    auto original = originals_.find(tensor.unsafeGetTensorImpl());
    if (original != originals_.end()) return original->second;
    if (foreign_.count(tensor.unsafeGetTensorImpl())) return tensor;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto known = card_storages_.find(storage);
    bool fresh = known == card_storages_.end();
    if (fresh) known = card_storages_.emplace(storage, card_storage(tensor.storage(), card)).first;
    auto result = rewrap(tensor, known->second, kCardKey);
    if (fresh) written(result, tensor);
    return result;
  }

  // `tensor` has been written to, through its CPU view `host`.
  void written(const Tensor& tensor, const Tensor& host) {
    narrow_in_place(host);
    written_.push_back(tensor);
  }

  void written(const Tensor& tensor) {
    if (on_card(tensor)) written(tensor, views_.at(tensor.unsafeGetTensorImpl()));
  }

  // Kernels may give an argument other memory and another shape (resize_, set_, out=): follow.
  void follow_arguments() {
    for (auto& tensor : inputs_) {
      auto& view = views_.at(tensor.unsafeGetTensorImpl());
      auto* impl = tensor.unsafeGetTensorImpl();
      bool moved = view.storage().data() != tensor.storage().data();
      if (moved || view.storage().nbytes() != tensor.storage().nbytes()) {
        auto bytes = allocate(view.storage().nbytes(), tensor.device().index());
        if (view.storage().nbytes()) std::memcpy(bytes.get(), view.storage().data(), view.storage().nbytes());
        auto* storage = tensor.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(std::move(bytes));
        storage->set_nbytes(view.storage().nbytes());
      }
      if (view.sizes() != tensor.sizes() || view.strides() != tensor.strides()) {
        impl->set_sizes_and_strides(view.sizes(), view.strides());
      }
      if (view.storage_offset() != tensor.storage_offset()) impl->set_storage_offset(view.storage_offset());
    }
  }

  void check_together(const std::string& name) const {
    // Indices may lie on the CPU, as on other devices.
    static const std::unordered_set<std::string> tolerant{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
    if (device_ && elsewhere_ && !tolerant.count(name)) refuse_mixture(*device_, *elsewhere_, name);
  }

  // What the call leaves in the lazy graph. A call that gives a number, or that the CPU does, has read its arguments.
  void record_in_graph(bool gives_tensors, bool on_cpu) const {
    if (on_cpu || (!gives_tensors && written_.empty())) {
      for (auto& tensor : inputs_) run(tensor);
    }
    if (!written_.empty() && !on_cpu) record(written_, inputs_);
    if (on_cpu) {
      for (auto& tensor : written_) arrived(tensor);
    }
  }

  const c10::optional<c10::Device>& device() const { return device_; }
  bool complex() const { return complex_; }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_, card_storages_;
  std::unordered_map<c10::TensorImpl*, Tensor> views_, originals_;
  std::unordered_set<c10::TensorImpl*> foreign_;
  std::vector<Tensor> inputs_, written_;
  c10::optional<c10::Device> device_, elsewhere_;
  bool complex_ = false;
};

// What of an operator's schema matters here; asking the schema itself at every call would cost more than small kernels.
struct Plan {
  std::vector<size_t> written;         // arguments that it writes to
  std::vector<size_t> optional_lists;  // arguments that are lists of tensors or None
  std::vector<size_t> generators;
  std::vector<size_t> types;  // arguments that choose a dtype
};

bool holds(const c10::Argument& argument, const char* type) {
  return argument.type()->str().find(type) != std::string::npos;
}

Plan make_plan(const std::vector<c10::Argument>& arguments) {
  Plan plan;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& alias = arguments[i].alias_info();
    if (alias && alias->isWrite()) plan.written.push_back(i);
    if (holds(arguments[i], "Tensor?[]")) plan.optional_lists.push_back(i);
    if (holds(arguments[i], "Generator")) plan.generators.push_back(i);
    if (arguments[i].name() == "dtype") plan.types.push_back(i);
  }
  return plan;
}

const Plan& plan_of(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Plan> plans;
  auto known = plans.find(&schema);
  if (known == plans.end()) known = plans.emplace(&schema, make_plan(schema.arguments())).first;
  return known->second;
}

template <class Change>
c10::List<Tensor> changed(const c10::IValue& list, Change change) {
  c10::List<Tensor> result;
  for (const Tensor& tensor : list.toTensorVector()) result.push_back(change(tensor));
  return result;
}

bool asks_for_complex(const Plan& plan, const c10::IValue* values) {
  for (auto i : plan.types) {
    if (values[i].isInt() && at::isComplexType(at::ScalarType(values[i].toInt()))) return true;
  }
  return false;
}

// The tensors among the arguments that the operator writes to.
std::vector<Tensor> written_arguments(const Plan& plan, const c10::IValue* values) {
  std::vector<Tensor> written;
  for (auto i : plan.written) {
    if (values[i].isTensor()) {
      written.push_back(values[i].toTensor());
    } else if (values[i].isTensorList()) {
      for (const Tensor& tensor : values[i].toTensorVector()) written.push_back(tensor);
    }
  }
  return written;
}

// Replace the arguments on the stack by what the CPU kernel takes; returns the device that one of them names.
c10::optional<c10::Device> enter_arguments(Call& call, const Plan& plan, c10::IValue* values, size_t count) {
  c10::optional<c10::Device> named;
  for (auto i : plan.optional_lists) {
    c10::List<c10::optional<Tensor>> entered;
    for (const c10::IValue& element : values[i].toListRef()) {
      entered.push_back(element.isNone() ? c10::optional<Tensor>() : call.enter(element.toTensor()));
    }
    values[i] = entered;
  }
  for (size_t i = 0; i < count; ++i) {
    auto& value = values[i];
    if (value.isTensor()) {
      value = call.enter(value.toTensor());
    } else if (value.isTensorList()) {
      value = changed(value, [&](const Tensor& tensor) { return call.enter(tensor); });
    } else if (value.isDevice() && value.toDevice().type() == kCard) {
      named = value.toDevice();
      value = c10::Device(c10::kCPU);
    }
  }
  return named;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& plan = plan_of(schema);
  const size_t count = schema.arguments().size();
  auto* values = stack->data() + stack->size() - count;
  auto written = written_arguments(plan, values);
  bool complex = asks_for_complex(plan, values);

  Call call;
  auto named = enter_arguments(call, plan, values, count);
  call.check_together(schema.name());
  bool on_cpu = falls_back(schema.name(), complex || call.complex());

  auto card = call.device() ? call.device()->index() : named && named->has_index() ? named->index() : current_card();
  check_card(card);
  for (auto i : plan.generators) {
    if (values[i].isNone()) values[i] = generator(card);
  }

  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  call.follow_arguments();
  for (auto& tensor : written) call.written(tensor);
  bool gives_tensors = false;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      gives_tensors = true;
      value = call.leave(value.toTensor(), card);
    } else if (value.isTensorList()) {
      gives_tensors = true;
      value = changed(value, [&](const Tensor& tensor) { return call.leave(tensor, card); });
    }
  }
  call.record_in_graph(gives_tensors, on_cpu);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, XLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// These have kernels for every device, made of other operators; the CPU's own are faster, and what the card's would be.
TORCH_LIBRARY_IMPL(aten, XLA, m) {
  for (auto* name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_batch_norm",
                     "native_batch_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace simgcu
