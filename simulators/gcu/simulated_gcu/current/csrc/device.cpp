// Torch's two ways to ask about a device: the hooks of PrivateUse1, and the guard with its streams and events.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>

#include "runtime.h"

namespace simgcu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override { lazy_init(); }
  bool hasPrimaryContext(DeviceIndex) const override { return is_initialized(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device();
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    auto before = current_device();
    if (device >= 0) set_device(device);
    return before;
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(kGCU, current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = allocate_on(bytes, storage.device().index());
    if (storage.data() && bytes) memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};
const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Every operator has finished when its call returns, so that any order of streams is kept; an event is a time stamp.
thread_local std::array<c10::StreamId, kMaxCards> current_stream{};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType type) { TORCH_INTERNAL_ASSERT(type == kGCU); }
  c10::DeviceType type() const override { return kGCU; }
  Device exchangeDevice(Device device) const override {
    Device before(kGCU, current_device());
    set_device(device.index());
    return before;
  }
  Device getDevice() const override { return Device(kGCU, current_device()); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { set_device_unchecked(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }

  static DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_device(); }
  static Stream stream(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(kGCU, index(device)), id); }
  Stream getStream(Device device) const override { return stream(device, current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return stream(device, next++);
  }
  Stream exchangeStream(Stream chosen) const override {
    auto before = getStream(chosen.device());
    current_stream[chosen.device_index()] = chosen.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { count_wait("stream"); }
  void synchronizeDevice(const DeviceIndex) const override { count_wait("device"); }

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new double;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { count_wait("event"); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return *static_cast<double*>(second) - *static_cast<double*>(first);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace simgcu
