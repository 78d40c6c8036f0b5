// Device memory: host memory under a hard capacity, handed out by a caching allocator as CUDA's is.
//
// All figures are bytes. Sizes are rounded up to 512 like CUDA's; a freed block stays reserved and serves the next
// request of its size, until the cache is emptied or the capacity would be passed. One mutex, a leaf. It knows nothing of
// tensors and streams.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

constexpr size_t kGranule = 512;             // CUDA's kMinBlockSize
constexpr size_t kSmall = size_t{1} << 20;   // up to here CUDA counts a block to its small pool
constexpr int kPoison = 0xEE;                // as float32: -3.7e28, seen at once in any result
const c10::Device kDevice(c10::DeviceType::CUDA, 0);

void free_block(void* block);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  // Context and data pointer are the same, as with CUDA's allocator: convolutions insist on it.
  c10::DataPtr allocate(size_t n) override {
    void* block = n ? take(n) : nullptr;
    return {block, block, &free_block, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }

  bool initialized() override { return used_.load(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // all work is done when its call returns
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> hold(mutex_);
    flush();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> hold(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto* stats : counted()) for (auto& stat : *stats) stat.reset_accumulated();
    stats_.num_alloc_retries = stats_.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto* stats : counted()) for (auto& stat : *stats) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> hold(mutex_);
    return {free_bytes(), capacity_};
  }

  void set_capacity(size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    capacity_ = bytes;
  }
  void set_foreign(size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    foreign_ = bytes;
  }
  void set_poison(bool on) { poison_ = on; }
  bool poisons() const { return poison_; }

  void give_back(void* block) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = taken_.find(block);
    if (poison_) std::memset(block, kPoison, found->second.size);
    count_block(found->second, -1);
    cache_[found->second.size].push_back(block);
    taken_.erase(found);
  }

 private:
  struct Block {
    size_t size, requested;
  };

  void* take(size_t requested) {
    Block block{(requested + kGranule - 1) / kGranule * kGranule, requested};
    std::unique_lock<std::mutex> hold(mutex_);
    used_ = true;
    void* memory = from_cache(block.size);
    if (!memory) memory = from_device(block.size);
    if (!memory) {
      stats_.num_ooms++;
      std::string text = out_of_memory(requested);
      hold.unlock();
      TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    }
    taken_[memory] = block;
    count_block(block, +1);
    return memory;
  }

  void* from_cache(size_t size) {
    auto found = cache_.find(size);
    if (found == cache_.end() || found->second.empty()) return nullptr;
    void* memory = found->second.back();
    found->second.pop_back();
    return memory;
  }

  void* from_device(size_t size) {
    if (size > free_bytes() && reserved()) {
      stats_.num_alloc_retries++;
      flush();
    }
    void* memory = nullptr;
    if (size > free_bytes() || posix_memalign(&memory, kGranule, size)) return nullptr;
    stats_.num_device_alloc++;
    // Fresh pages are zero, and zeros hide reads of what nobody wrote.
    if (poison_) std::memset(memory, kPoison, size);
    count(stats_.reserved_bytes, size, size, +1);
    count(stats_.segment, size, 1, +1);
    return memory;
  }

  void flush() {
    for (auto& [size, blocks] : cache_) {
      for (void* memory : blocks) {
        std::free(memory);
        stats_.num_device_free++;
        count(stats_.reserved_bytes, size, size, -1);
        count(stats_.segment, size, 1, -1);
      }
    }
    cache_.clear();
  }

  size_t reserved() const { return static_cast<size_t>(stats_.reserved_bytes[0].current); }
  size_t free_bytes() const {
    size_t taken = reserved() + foreign_;
    return taken < capacity_ ? capacity_ - taken : 0;
  }

  void count_block(const Block& block, int sign) {
    count(stats_.allocation, block.size, 1, sign);
    count(stats_.active, block.size, 1, sign);
    count(stats_.allocated_bytes, block.size, block.size, sign);
    count(stats_.active_bytes, block.size, block.size, sign);
    count(stats_.requested_bytes, block.size, block.requested, sign);
  }
  static void count(c10::CachingAllocator::StatArray& stats, size_t size, size_t amount, int sign) {
    using Type = c10::CachingAllocator::StatType;
    for (auto type : {Type::AGGREGATE, size <= kSmall ? Type::SMALL_POOL : Type::LARGE_POOL}) {
      auto& stat = stats[static_cast<size_t>(type)];
      sign > 0 ? stat.increase(amount) : stat.decrease(amount);
    }
  }
  std::vector<c10::CachingAllocator::StatArray*> counted() {
    return {&stats_.allocation,     &stats_.segment,      &stats_.active,         &stats_.allocated_bytes,
            &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes};
  }

  std::string out_of_memory(size_t requested) const {
    auto mib = [](size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
    size_t allocated = static_cast<size_t>(stats_.allocated_bytes[0].current);
    return "CUDA out of memory. Tried to allocate " + mib(requested) + ". GPU 0 has a total capacity of " +
           mib(capacity_) + " of which " + mib(free_bytes()) + " is free. Of the allocated memory " + mib(allocated) +
           " is allocated by PyTorch, and " + mib(reserved() - allocated) +
           " is reserved by PyTorch but unallocated.";
  }

  std::mutex mutex_;
  std::atomic<bool> used_{false}, poison_{true};
  size_t capacity_ = 0, foreign_ = 0;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  std::unordered_map<void*, Block> taken_;
  std::unordered_map<size_t, std::vector<void*>> cache_;
};

// Never destroyed: tensors that outlive the interpreter still free into it.
inline DeviceMemory& memory() {
  static auto* instance = new DeviceMemory();
  return *instance;
}

// What torch calls: through the register, so that a guard which took the allocator's place is asked too.
inline c10::Allocator* allocator() { return c10::GetAllocator(c10::DeviceType::CUDA); }

inline void free_block(void* block) {
  if (block) memory().give_back(block);
}

}  // namespace sim
