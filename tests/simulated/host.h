// Pinned memory: plain host memory that is remembered, so that `is_pinned` tells it from other memory.
//
// All figures are bytes. One mutex, a leaf.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>

namespace sim {

void free_pinned(void* block);

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* block = nullptr;
    if (n) {
      TORCH_CHECK_WITH(OutOfMemoryError, !posix_memalign(&block, 4096, n), "no memory to pin ", n, " bytes of");
      add(block, n);
    }
    return {block, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}  // it keeps none
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  void add(const void* block, size_t n) {
    std::lock_guard<std::mutex> hold(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(block)] = n;
  }
  bool remove(const void* block) {
    std::lock_guard<std::mutex> hold(mutex_);
    return ranges_.erase(reinterpret_cast<uintptr_t>(block));
  }
  // Any address inside counts, as the driver sees it.
  bool holds(const void* data) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto address = reinterpret_cast<uintptr_t>(data);
    auto after = ranges_.upper_bound(address);
    return after != ranges_.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

inline PinnedMemory& pinned() {
  static auto* instance = new PinnedMemory();
  return *instance;
}

inline void free_pinned(void* block) {
  if (block && pinned().remove(block)) std::free(block);
}

}  // namespace sim
