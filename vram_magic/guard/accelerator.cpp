// The native guard of accelerators: the live allocator object with some of its virtual functions replaced.
//
// The object gets a private copy of its vtable in which `allocate`, and for CUDA's allocator the two `raw_alloc`, lead
// through the guard (tickets.h); everything else stays the allocator's own, so nothing here depends on its class, and
// tensors made before are covered too. How bytes are counted, and which locks are taken, is told there; here a mutex
// serialises putting in and taking out. Refuses to know CUDA's headers: it needs those of c10 only, and links c10 only.
//
// A wrong slot would kill the process. So its index is computed by the compiler; the old table must lie in a loaded
// library, and a replaced slot must hold code of one; a table that somebody else has changed is left alone. Our tables
// are never freed, and the library is never unloaded: a call may be on its way through them.
//
// Ways that were tried and fail: observers of out-of-memory cannot try again; callbacks for freeing memory and an
// interposed cudaMalloc run under the allocator's lock, and deadlock with a thread that assigns `param.data`.
#include "interface.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__))
#error "the guard knows the C++ ABI of Linux on x86-64 and aarch64 only"
#endif

namespace {

constexpr size_t kBefore = 2;        // words in front of what an object points to: offset to top, type information
constexpr size_t kMostWords = 1024;  // of a table; copying more than it has does no harm
constexpr int kEntries = 8;

using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
using RawAlloc = void* (*)(c10::Allocator*, size_t);
using RawAllocWithStream = void* (*)(c10::Allocator*, size_t, void*);

// One allocator object; an entry is made once and stays.
struct Entry {
  c10::Allocator* object;
  void** theirs;
  void** ours;
  Allocate allocate;
  RawAlloc raw_alloc;
  RawAllocWithStream raw_alloc_with_stream;
};
Entry entries[kEntries];
std::atomic<int> entry_count{0};
std::mutex installing;

Entry* entry_of(const c10::Allocator* object) {
  for (int i = 0, n = entry_count.load(std::memory_order_acquire); i < n; i++) {
    if (entries[i].object == object) return &entries[i];
  }
  return nullptr;
}

// A virtual member function has the calling convention of a function whose first argument is the object.
c10::DataPtr allocate(c10::Allocator* self, size_t n) {
  Entry& entry = *entry_of(self);
  return guarded(n, [&] { return entry.allocate(self, n); });
}
void* raw_alloc(c10::Allocator* self, size_t n) {
  Entry& entry = *entry_of(self);
  return guarded(n, [&] { return entry.raw_alloc(self, n); });
}
void* raw_alloc_with_stream(c10::Allocator* self, size_t n, void* stream) {
  Entry& entry = *entry_of(self);
  return guarded(n, [&] { return entry.raw_alloc_with_stream(self, n, stream); });
}

// The place of a virtual function in its table. The two ABIs mark a virtual one in different words of the pointer.
template <class Method>
size_t slot_of(Method method) {
  struct {
    uintptr_t pointer;
    ptrdiff_t adjustment;
  } parts;
  static_assert(sizeof parts == sizeof method, "not a pointer to a member function as we know it");
  std::memcpy(&parts, &method, sizeof parts);
#if defined(__aarch64__)
  return parts.pointer / sizeof(void*);
#else
  return (parts.pointer - 1) / sizeof(void*);
#endif
}

// The first slot behind DeviceAllocator's own is where a derived class puts its first virtual function.
struct Derived : c10::DeviceAllocator {
  virtual void first() = 0;
};

struct Segment {
  uintptr_t wanted, end;
  bool executable;
};

int find_segment(dl_phdr_info* library, size_t, void* data) {
  auto* segment = static_cast<Segment*>(data);
  for (int i = 0; i < library->dlpi_phnum; i++) {
    const auto& header = library->dlpi_phdr[i];
    uintptr_t start = library->dlpi_addr + header.p_vaddr, end = start + header.p_memsz;
    if (header.p_type != PT_LOAD || segment->wanted < start || segment->wanted >= end) continue;
    segment->end = end;
    segment->executable = header.p_flags & PF_X;
    return 1;
  }
  return 0;
}

// The part of a loaded library that holds the address; its end is 0 when none does.
Segment segment_of(const void* address) {
  Segment segment{reinterpret_cast<uintptr_t>(address), 0, false};
  dl_iterate_phdr(&find_segment, &segment);
  return segment;
}

// CUDA's own allocator, through the variable that all of torch reads; null where torch was built without CUDA.
c10::Allocator* cuda_allocator() {
  void* library = dlopen("libc10_cuda.so", RTLD_NOLOAD | RTLD_NOW);
  if (!library) return nullptr;
  auto* current =
      static_cast<std::atomic<c10::Allocator*>*>(dlsym(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE"));
  dlclose(library);  // the count of users only: it was loaded before
  return current ? current->load() : nullptr;
}

c10::Allocator* target(int type) {
  auto* cuda = type == static_cast<int>(c10::DeviceType::CUDA) ? cuda_allocator() : nullptr;
  return cuda ? cuda : c10::GetAllocator(static_cast<c10::DeviceType>(type));
}

void**& table_of(c10::Allocator* object) { return *reinterpret_cast<void***>(object); }

bool swap_table(c10::Allocator* object, void** from, void** to) {
  return __atomic_compare_exchange_n(&table_of(object), &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// Fills the entry; returns the reason why not, null when it is filled.
const char* prepare(Entry& entry, c10::Allocator* object, bool with_raw) {
  void** theirs = table_of(object);
  Segment segment = segment_of(theirs);
  size_t words = std::min((segment.end - segment.wanted) / sizeof(void*), kMostWords);
  size_t slot = slot_of(&c10::Allocator::allocate), raw = slot_of(&Derived::first);
  if (!segment.end || words <= raw + 1) return "the allocator's table of functions is in no loaded library";
  for (size_t checked : {slot, raw, raw + 1}) {
    if (checked != slot && !with_raw) continue;
    if (!segment_of(theirs[checked]).executable) return "the allocator's table of functions is not as expected";
  }
  void** ours = new void*[kBefore + words] + kBefore;
  std::memcpy(ours - kBefore, theirs - kBefore, (kBefore + words) * sizeof(void*));
  ours[slot] = reinterpret_cast<void*>(&allocate);
  if (with_raw) {
    ours[raw] = reinterpret_cast<void*>(&raw_alloc);
    ours[raw + 1] = reinterpret_cast<void*>(&raw_alloc_with_stream);
  }
  entry = {object,
           theirs,
           ours,
           reinterpret_cast<Allocate>(theirs[slot]),
           reinterpret_cast<RawAlloc>(theirs[raw]),
           reinterpret_cast<RawAllocWithStream>(theirs[raw + 1])};
  return nullptr;
}

const char* put_in(c10::Allocator* object, bool with_raw) {
  Entry* entry = entry_of(object);
  if (!entry) {
    int n = entry_count.load();
    if (n == kEntries) return "the allocator was replaced too often";
    if (const char* reason = prepare(entries[n], object, with_raw)) return reason;
    entry = &entries[n];
    entry_count.store(n + 1, std::memory_order_release);
  }
  if (table_of(object) == entry->ours || swap_table(object, entry->theirs, entry->ours)) return nullptr;
  return "somebody else has changed the allocator's table of functions";
}

}  // namespace

extern "C" {
// Limits the device from now on. Returns the reason why not, null when it is. `with_raw`: whether CUDA's allocator is
// known to have `raw_alloc` and `raw_alloc_with_stream` as its first virtual functions.
const char* vm_install(int type, int index, int with_raw) {
  if (index < 0 || index >= kDevices) return "its number is too high";
  if (forked.load()) return "this process was forked from one that uses it";
  std::lock_guard<std::mutex> hold(installing);
  auto* object = target(type);
  auto* device_allocator = dynamic_cast<c10::DeviceAllocator*>(object);
  if (!device_allocator || !c10::impl::hasDeviceGuardImpl(static_cast<c10::DeviceType>(type))) {
    return "torch has no caching allocator for it";
  }
  if (!keeps_figures(device_allocator, index)) return "its allocator does not tell what is allocated";
  int none = -1;
  if (!served_type.compare_exchange_strong(none, type) && none != type) return "another type of device is limited";
  source = device_allocator;
  if (const char* reason = put_in(object, with_raw && object == cuda_allocator())) return reason;
  limit(index);
  return nullptr;
}
void vm_uninstall(int type, int index) {
  std::lock_guard<std::mutex> hold(installing);
  auto* object = target(type);
  Entry* entry = object ? entry_of(object) : nullptr;
  if (!limited_after(index) && entry) swap_table(object, entry->ours, entry->theirs);
}
int vm_installed(int type) {
  auto* object = target(type);
  Entry* entry = object ? entry_of(object) : nullptr;
  return entry && table_of(object) == entry->ours;
}
}
