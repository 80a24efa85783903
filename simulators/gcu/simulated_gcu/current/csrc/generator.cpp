// Each card has a random generator of its own: a CPU generator under the card's name.
#include <ATen/CPUGeneratorImpl.h>

#include "runtime.h"

namespace simgcu {
namespace {

struct CardGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();

  explicit CardGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kGCU, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the generator of a simulated GCU has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the generator of a simulated GCU has no offset"); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  CardGenerator* clone_impl() const override {
    auto* copy = new CardGenerator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) made->push_back(at::make_generator<CardGenerator>(i));
    return made;
  }();
  if (device < 0) device = current_device();
  check_ordinal(device);
  return (*generators)[device];
}

at::Generator new_generator(int device) {
  return at::make_generator<CardGenerator>(device < 0 ? current_device() : static_cast<c10::DeviceIndex>(device));
}

at::Generator& inner_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kGCU, "Expected a 'gcu' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<CardGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace simgcu
