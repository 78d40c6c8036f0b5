// The native guard of the CPU device: torch's CPU allocator with a budget.
//
// It owns three counters, all in bytes:
//   committed  what torch has allocated through this guard (and storages adopted from before it) and not freed, plus
//              room promised to reservations; never passes the budget by an allocation
//   held       what reservations still hold; committed less held is what is live
//   peak       the highest live value since it was last reset
// A request that would pass the budget calls back, with no lock held; the callback either grants it (it has then
// committed the bytes in this request's name) or gives up, and the request throws c10::OutOfMemoryError, which Python
// sees as torch.OutOfMemoryError. It refuses to know who leaves, and what a model is.
//
// Rules learnt the hard way:
//   * The context of a DataPtr must be its data pointer: oneDNN and convolutions call raw_allocate, which asserts it.
//     So the exact size sits in a header in front of the data; malloc_usable_size would count more than was asked,
//     and a request for exactly the free bytes would then pass the budget.
//   * No exception may cross the callback, and a thread inside the callback never calls back again.
//   * The library is never unloaded: memory that it handed out is freed through it, whenever that is.
//
// There is one CPU: the device index of the common interface is 0 here. Needs the c10 headers only.
#include "room.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <mutex>
#include <new>
#include <unordered_map>

namespace {

constexpr size_t kHeader = 64;  // c10's alignment: the data behind the header stays as aligned as it was
constexpr int kCpu = 0;

std::atomic<int64_t> committed{0}, held{0}, peak{0}, budget{INT64_MAX};

c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_free = nullptr;

bool commit(int64_t n) {
  int64_t now = committed.load();
  do {
    if (now > budget.load(std::memory_order_relaxed) - n) return false;
  } while (!committed.compare_exchange_weak(now, now + n));
  return true;
}

// The part of n that this thread's reservation pays for.
int64_t draw(Reservation* from, int64_t n) {
  int64_t part = take(from, n);
  if (part) held.fetch_sub(part);
  return part;
}

void undraw(Reservation* from, int64_t n) {
  if (!n) return;
  held.fetch_add(n);
  if (put_back(from, n)) return;
  held.fetch_sub(n);
  committed.fetch_sub(n);
}

// Commits what the reservation does not pay; asks for room where the budget would be passed, throws when there is none.
void admit(int64_t need, int64_t size) {
  if (C10_LIKELY(commit(need))) return;
  if (drawings[kCpu].prepaid) {
    committed.fetch_add(need);  // a few bytes beyond what was promised; refusing them would break a move half way
    return;
  }
  if (!may_ask(kCpu) || !ask(kCpu, need, kBudget, size)) refuse(out_of_budget(budget, committed, need));
}

int64_t live() { return committed.load() - held.load(); }

void note_peak() {
  int64_t now = live(), top = peak.load(std::memory_order_relaxed);
  while (now > top && !peak.compare_exchange_weak(top, now)) {
  }
}

void gave(int64_t n) { committed.fetch_sub(n); }

void release(void* data) {
  if (!data) return;
  char* raw = static_cast<char*>(data) - kHeader;
  gave(*reinterpret_cast<int64_t*>(raw));
  base_free(raw);
}

// Storages from before the guard carry no header: their sizes are kept aside.
std::mutex adopted_mutex;
std::unordered_map<void*, int64_t>& adopted() {
  static auto* map = new std::unordered_map<void*, int64_t>();
  return *map;
}
void release_adopted(void* data) {
  {
    std::lock_guard<std::mutex> hold(adopted_mutex);
    auto found = adopted().find(data);
    if (found != adopted().end()) {
      gave(found->second);
      adopted().erase(found);
    }
  }
  base_free(data);
}

struct Guard final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return base->allocate(0);
    auto* from = drawings[kCpu].from;  // the callback may change what this thread draws on
    int64_t size = static_cast<int64_t>(n), own = draw(from, size);
    if (size > own) {
      try {
        admit(size - own, size);
      } catch (...) {
        undraw(from, own);
        throw;
      }
    }
    void* raw;
    try {
      raw = base->allocate(n + kHeader).release_context();
    } catch (...) {  // the machine itself has no memory
      undraw(from, own);
      committed.fetch_sub(size - own);
      throw;
    }
    *static_cast<int64_t*>(raw) = size;
    note_peak();
    void* data = static_cast<char*>(raw) + kHeader;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
Guard guard;

}  // namespace

extern "C" {
// Returns the reason why not, null when it is in.
const char* vm_install(int, int, int) {
  auto* now = c10::GetCPUAllocator();
  if (now == &guard) return nullptr;
  base = now;
  base_free = base->raw_deleter();
  c10::SetCPUAllocator(&guard, 100);
  return nullptr;
}
void vm_uninstall(int, int) {
  if (base && c10::GetCPUAllocator() == &guard) c10::SetCPUAllocator(base, 100);
}
int vm_installed(int) { return c10::GetCPUAllocator() == &guard; }
// In a forked child nobody could answer, and a lock that another thread held stays locked.
void vm_forked(int) {
  callbacks[kCpu].pressure = nullptr;
  budget = INT64_MAX;
  new (&adopted_mutex) std::mutex;
}
void vm_set_budget(int, int64_t n) { budget = n; }
int64_t vm_live(int) { return live(); }
int64_t vm_committed(int) { return committed; }
int64_t vm_peak(int) { return peak; }
void vm_reset_peak(int) { peak = live(); }
int64_t vm_start_lap(int) { return peak.exchange(live()); }

// Takes n bytes of the free room, or returns null.
Reservation* vm_reserve(int, int64_t n) {
  held.fetch_add(n);  // before the commit: in between, live reads too low, where the other order would raise the peak
  if (commit(n)) return new Reservation{kCpu, {n}};
  held.fetch_sub(n);
  return nullptr;
}
// Hands the bytes left to whoever is named in the callback's answer: they stay committed.
void vm_transfer(Reservation* r) {
  if (r) held.fetch_sub(close(r));
}
void vm_release(Reservation* r) {
  if (!r) return;
  int64_t left = close(r);
  committed.fetch_sub(left);
  held.fetch_sub(left);
}
// Declared bytes of an outside engine: counted, never allocated here.
void vm_spend(int, Reservation* r, int64_t n) {
  int64_t promised = take(r, n);
  committed.fetch_add(n - promised);
  held.fetch_sub(promised);
  note_peak();
}
void vm_give_back(int, int64_t n) { gave(n); }

// Whether the memory is the CPU allocator's, counted or not: then freeing it gives room.
int vm_owns(int, c10::StorageImpl* storage) {
  auto free = storage->_mutable_data_ptr_no_checks().get_deleter();
  return free == &release || free == &release_adopted || (base_free && free == base_free);
}

// Whether it is in the live bytes: memory from before the guard is not, unless it was adopted.
int vm_counts(int, c10::StorageImpl* storage) {
  auto free = storage->_mutable_data_ptr_no_checks().get_deleter();
  return free == &release || free == &release_adopted;
}

// Counts a storage that was allocated before the guard. Returns its bytes, 0 when it is counted already or empty,
// -1 when its memory is not the CPU allocator's (a mapping, numpy's).
int64_t vm_adopt(int, c10::StorageImpl* storage) {
  auto& pointer = storage->_mutable_data_ptr_no_checks();
  if (!pointer.get()) return 0;
  auto free = pointer.get_deleter();
  if (free == &release || free == &release_adopted) return 0;
  if (!base_free || free != base_free) return -1;
  int64_t size = static_cast<int64_t>(storage->nbytes());
  std::lock_guard<std::mutex> hold(adopted_mutex);
  if (!pointer.compare_exchange_deleter(base_free, &release_adopted)) return -1;
  adopted()[pointer.get()] = size;
  committed.fetch_add(size);
  note_peak();
  return size;
}
}
