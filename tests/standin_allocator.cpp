// An allocator with figures for a device type that this torch has no kernels for: two devices without memory.
//
// It counts in blocks and hands out addresses that nobody may touch. Tests allocate through it in C++, in many threads
// at once and without Python's lock, as the operations of an accelerator do.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr int kDevices = 2;
constexpr size_t kGrain = 512;

thread_local c10::DeviceIndex current = 0;

struct Memory {
  int64_t capacity = INT64_MAX, live = 0, peak = 0, reserved = 0;
};
std::mutex mutex;
Memory memories[kDevices];
std::unordered_map<void*, std::pair<int, int64_t>> blocks;
uintptr_t next_address = uintptr_t{1} << 40;
int64_t block_bytes = kGrain;  // requests beyond it are handed out in whole blocks, as from a cache of large ones

void free_block(void* address) {
  std::lock_guard<std::mutex> hold(mutex);
  auto [device, size] = blocks.at(address);
  blocks.erase(address);
  memories[device].live -= size;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    int device = current;
    std::lock_guard<std::mutex> hold(mutex);
    Memory& memory = memories[device];
    size_t grain = static_cast<int64_t>(n) > block_bytes ? block_bytes : kGrain;
    int64_t size = static_cast<int64_t>((n + grain - 1) / grain * grain);
    TORCH_CHECK_WITH(OutOfMemoryError, memory.live + size <= memory.capacity, "the stand-in has no ", size, " bytes");
    memory.live += size;
    memory.peak = std::max(memory.peak, memory.live);
    memory.reserved = std::max(memory.reserved, memory.live);
    auto* address = reinterpret_cast<void*>(next_address += kGrain);
    blocks[address] = {device, size};
    return {address, address, &free_block, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = memories[device].live;
    stats.allocated_bytes[0].peak = memories[device].peak;
    stats.reserved_bytes[0].current = memories[device].reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(mutex);
    memories[device].peak = memories[device].live;
  }
};
Allocator allocator, another;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, current}; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    current = device.index();
    return before;
  }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard());

}  // namespace

extern "C" {
void standin_start() { c10::SetAllocator(kType, &allocator); }
void standin_replace() { c10::SetAllocator(kType, &another); }
void standin_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
void standin_capacity(int index, int64_t n) { memories[index].capacity = n; }
void standin_block(int64_t n) { block_bytes = n; }
int64_t standin_live(int index) {
  std::lock_guard<std::mutex> hold(mutex);
  return memories[index].live;
}
int64_t standin_peak(int index) {
  std::lock_guard<std::mutex> hold(mutex);
  return memories[index].peak;
}
// What the allocator object points to: the table of its virtual functions.
void* standin_table() { return *reinterpret_cast<void**>(&allocator); }

// The address; null when refused, and then the reason is in `reason`.
void* standin_allocate(int64_t n, char* reason, size_t length) {
  try {
    return c10::GetAllocator(kType)->raw_allocate(static_cast<size_t>(n));
  } catch (const c10::OutOfMemoryError& error) {
    std::snprintf(reason, length, "%s", error.what_without_backtrace());
    return nullptr;
  }
}
void standin_free(void* address) { c10::GetAllocator(kType)->raw_deallocate(address); }

// Allocates and frees `rounds` times, `kept` at once of 1 to `most` grains; returns how many were refused.
int64_t standin_hammer(uint64_t seed, int64_t rounds, int kept, int64_t most) {
  std::vector<c10::DataPtr> held(kept);
  int64_t refusals = 0;
  for (int64_t i = 0; i < rounds; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    auto& place = held[(seed >> 33) % kept];
    place.clear();
    try {
      place = c10::GetAllocator(kType)->allocate(kGrain * (1 + (seed >> 40) % most));
    } catch (const c10::OutOfMemoryError&) {
      refusals++;
    }
  }
  return refusals;
}
}
