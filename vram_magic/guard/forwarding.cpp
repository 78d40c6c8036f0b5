// The native guard of CUDA, the second way: a CUDAAllocator of our own before torch's, which hands every call on.
//
// It serves where the first way (accelerator.cpp) finds an unknown ABI. Its overrides are generated from the installed
// header, so it depends on torch's version, and needs CUDA's headers. It does not see what a tensor that is older than
// it allocates: its storage remembers the allocator it came from. How bytes are counted, and which locks are taken, is
// told in tickets.h; here a mutex serialises putting in and taking out.
#include "interface.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <utility>

namespace c10::cuda::CUDACachingAllocator {
namespace {

class Forwarding final : public CUDAAllocator {
 public:
  CUDAAllocator* base = nullptr;

  DataPtr allocate(size_t n) override {
    return guarded(n, [&] { return base->allocate(n); });
  }
  void* raw_alloc(size_t n) override {
    return guarded(n, [&] { return base->raw_alloc(n); });
  }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override {
    return guarded(n, [&] { return base->raw_alloc_with_stream(n, stream); });
  }
#include "forwarding_overrides.h"
};

// Never deleted: storages remember it.
Forwarding& forwarding() {
  static auto* only = new Forwarding();
  return *only;
}
std::mutex installing;

}  // namespace
}  // namespace c10::cuda::CUDACachingAllocator

namespace torchs = c10::cuda::CUDACachingAllocator;

extern "C" {
// Limits the device from now on. Returns the reason why not, null when it is.
const char* vm_install(int type, int index, int) {
  if (index < 0 || index >= kDevices) return "its number is too high";
  if (forked.load()) return "this process was forked from one that uses it";
  if (type != static_cast<int>(c10::DeviceType::CUDA)) return "it is no CUDA device";
  std::lock_guard<std::mutex> hold(torchs::installing);
  auto& ours = torchs::forwarding();
  auto* now = torchs::get();
  if (!keeps_figures(now, index)) return "its allocator does not tell what is allocated";
  if (now != &ours) {
    ours.base = now;
    source = now;
    served_type = type;
    torchs::allocator.store(&ours);
    c10::SetAllocator(c10::DeviceType::CUDA, &ours);
  }
  limit(index);
  return nullptr;
}
void vm_uninstall(int, int index) {
  std::lock_guard<std::mutex> hold(torchs::installing);
  torchs::CUDAAllocator* ours = &torchs::forwarding();
  if (limited_after(index) || torchs::get() != ours) return;
  torchs::allocator.store(torchs::forwarding().base);
  c10::SetAllocator(c10::DeviceType::CUDA, torchs::forwarding().base);
}
int vm_installed(int) { return torchs::get() == &torchs::forwarding(); }
}
