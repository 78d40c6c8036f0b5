// The runtime: one device, streams and events that are done at once, random numbers of its own, and torch's hooks.
//
// A stream is a number, an event the time at which it was recorded; each has a number of its own. No lock.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "host.h"
#include "memory.h"

namespace sim {

inline std::atomic<bool> capturing{false};

// Numbers from the CPU's engine, but from an engine of the device's own: drawing there leaves the CPU's stream alone.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed = c10::detail::getNonDeterministicRandom())
      : Generator(at::detail::createCPUGenerator(seed)) {}
  explicit Generator(at::Generator engine)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)), engine_(std::move(engine)) {}

  void set_current_seed(uint64_t seed) override { engine_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { engine_.set_offset(offset); }
  uint64_t get_offset() const override { return engine_.get_offset(); }
  uint64_t current_seed() const override { return engine_.current_seed(); }
  uint64_t seed() override { return engine_.seed(); }
  void set_state(const c10::TensorImpl& state) override { engine_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return engine_.unsafeGetGeneratorImpl()->get_state();
  }
  const at::Generator& engine() const { return engine_; }

 private:
  Generator* clone_impl() const override { return new Generator(engine_.clone()); }
  at::Generator engine_;
};

inline const at::Generator& default_generator() {
  static auto* instance = new at::Generator(at::make_generator<Generator>(c10::default_rng_seed_val));
  return *instance;
}

inline void check_device(c10::Device device) {
  TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal");
}

struct Event {
  std::chrono::steady_clock::time_point recorded;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    check_device(device);
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { check_device(device); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  Stream getStream(c10::Device) const override { return stream(current()); }
  Stream getDefaultStream(c10::Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(next()); }
  Stream getNewStream(c10::Device, int) const override { return stream(next()); }
  Stream exchangeStream(Stream to) const override { return stream(std::exchange(current(), to.id())); }
  void* getStreamNativeHandle(const Stream of) const override { return reinterpret_cast<void*>(of.id()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  bool isStreamCapturing(const Stream&) const override { return capturing; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    memory().recordStream(data, on);
  }

  void record(void** event, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->recorded = std::chrono::steady_clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto taken = static_cast<Event*>(to)->recorded - static_cast<Event*>(from)->recorded;
    return std::chrono::duration<double, std::milli>(taken).count();
  }

 private:
  static Stream stream(c10::StreamId id) { return Stream(Stream::UNSAFE, kDevice, id); }
  static c10::StreamId& current() {
    thread_local c10::StreamId id = 0;
    return id;
  }
  static c10::StreamId next() {
    static std::atomic<c10::StreamId> last{0};
    return ++last;
  }
};

// The names that torch's registries ask for; it looks them up once, while torch is imported.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return memory().initialized(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_device(c10::Device(kDevice.type(), index));
    return 0;
  }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

}  // namespace sim
