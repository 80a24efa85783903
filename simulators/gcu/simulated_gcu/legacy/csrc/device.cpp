// What torch asks of a device type: a guard that selects cards, and a timer for its DDP's statistics.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10d/reducer.hpp>

#include "cards.h"

namespace simgcu {
namespace {

c10::Stream only_stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kCard; }
  c10::Device getDevice() const override { return {kCard, current_card()}; }
  void setDevice(c10::Device device) const override { select_card(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { select_card_unchecked(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    select_card(device.index());
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(settings().count); }

  // One stream for each card, which is always done.
  c10::Stream getStream(c10::Device device) const noexcept override { return only_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
};

// torch's reducer wants a timer for its device type.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  c10::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? c10::make_optional(*to - *from) : c10::nullopt;
  }
};

C10_REGISTER_GUARD_IMPL(XLA, Guard);

}  // namespace
}  // namespace simgcu

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kXLA, simgcu::Timer);
}
