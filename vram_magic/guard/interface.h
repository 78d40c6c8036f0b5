// What Python calls of a guard that counts by tickets: the same functions as the CPU's guard has.
//
// All figures are bytes. Whatever changes a device's room takes the mutex of its ledger, as told in tickets.h; nothing
// here calls back. Putting in and taking out is left to each guard's own source.
#pragma once

#include "tickets.h"

#include <c10/core/StorageImpl.h>

#include <new>

namespace {

// The allocator's own peak where it has grown since we last asked, with what is spent; else the most that was seen.
int64_t peak_of(Ledger& ledger) {
  ledger.glance();
  int64_t theirs = figures(ledger).peak;  // once: one that is reached between two reads would be in neither
  if (theirs > ledger.known_peak) ledger.top = std::max(ledger.top.load(), theirs + ledger.spent.load());
  ledger.known_peak = theirs;  // lower, where somebody else has reset it
  return ledger.top;
}

int64_t start_peak(Ledger& ledger) {
  int64_t until_now = peak_of(ledger);
  ledger.top = 0;
  ledger.glance();
  return until_now;
}

// Declared bytes come or go; under the mutex. The allocator's peak until now goes with those of until now.
void spend(Ledger& ledger, int64_t n) {
  peak_of(ledger);
  ledger.spent.fetch_add(n);
  ledger.glance();
}

// Begins to limit the device.
void limit(int index) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  ledger.headroom = 0;
  start_peak(ledger);
  ledger.limited = true;
}

// Whether a device is still limited after this one is not.
bool limited_after(int index) {
  ledgers[index].limited = false;
  return std::any_of(ledgers, ledgers + kDevices, [](const Ledger& ledger) { return ledger.limited.load(); });
}

}  // namespace

extern "C" {
// In a forked child nobody could answer, and a lock that another thread held stays locked.
void vm_forked(int index) {
  Ledger& ledger = ledgers[index];
  ledger.limited = false;
  ledger.budget = kNoLimit;
  forked = true;
  callbacks[index].pressure = nullptr;
  new (&ledger.mutex) std::mutex;
}
void vm_set_budget(int index, int64_t n) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  ledger.budget = std::min(n, kNoLimit);
  ledger.headroom.exchange(0);
}
int64_t vm_live(int index) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  return ledger.glance().live;
}
// With what is in flight: a plan that left it out would think that there is room where `vm_reserve` finds none.
int64_t vm_committed(int index) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  for (int round = 0; round < kYields && ledger.inflight.load(); round++) sched_yield();
  Look now = ledger.glance();
  return now.live + now.held + now.inflight;
}
int64_t vm_calls(int index) { return ledgers[index].calls; }
int64_t vm_peak(int index) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  return peak_of(ledger);
}
// Starts a new peak without touching the allocator's own, which others may read.
int64_t vm_start_lap(int index) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  return start_peak(ledger);
}
void vm_reset_peak(int index) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  auto* from = source.load();
  try {
    if (from && !forked.load() && from->initialized()) from->resetPeakStats(static_cast<c10::DeviceIndex>(index));
  } catch (const std::exception&) {  // then the peak is the most that was seen
  }
  start_peak(ledger);
}

// Takes n bytes of the free room, or returns null.
Reservation* vm_reserve(int index, int64_t n) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  if (ledger.look(n, 0).room < n) return nullptr;
  ledger.held.fetch_add(n);
  return new Reservation{index, {n}};
}
// Hands the bytes left to the request that is asking in this thread.
void vm_transfer(Reservation* r) {
  if (!r) return;
  int64_t left = close(r);
  Request::grant(ledgers[r->device], left);
  ledgers[r->device].held.fetch_sub(left);
}
void vm_release(Reservation* r) {
  if (r) ledgers[r->device].held.fetch_sub(close(r));
}
// Declared bytes of an outside engine: counted, never allocated here.
void vm_spend(int index, Reservation* r, int64_t n) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  int64_t promised = take(r, n);
  spend(ledger, n);
  ledger.held.fetch_sub(promised);
  ledger.headroom.exchange(0);
}
void vm_give_back(int index, int64_t n) {
  Ledger& ledger = ledgers[index];
  std::lock_guard<std::mutex> hold(ledger.mutex);
  spend(ledger, -n);
}

// Whether the memory came from this allocator and device, so that freeing it gives room.
int vm_owns(int index, c10::StorageImpl* storage) {
  auto* from = source.load();
  auto& pointer = storage->_mutable_data_ptr_no_checks();
  return from && static_cast<int>(pointer.device().type()) == served_type.load() && pointer.device().index() == index &&
         pointer.get_deleter() == from->raw_deleter();
}
int vm_counts(int index, c10::StorageImpl* storage) { return vm_owns(index, storage); }
int64_t vm_adopt(int, c10::StorageImpl*) { return 0; }  // the allocator has counted it since it was made

// Nanoseconds for so many allocations of n bytes and their frees, without Python; -1 when one failed.
int64_t vm_bench(int type, int64_t n, int64_t reps) {
  auto start = std::chrono::steady_clock::now();
  try {
    for (int64_t i = 0; i < reps; i++) c10::GetAllocator(static_cast<c10::DeviceType>(type))->allocate(n);
  } catch (const std::exception&) {
    return -1;
  }
  auto took = std::chrono::steady_clock::now() - start;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
}
}
