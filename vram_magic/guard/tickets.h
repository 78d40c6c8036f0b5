// How the guards of accelerators count: by tickets, since frees cannot be seen.
//
// A deleter must stay the allocator's own (CUDA graph trees compare it), so what is live is asked of the allocator,
// which takes its lock and some microseconds. In between, tickets say what may be admitted unseen. Of each device, in
// bytes:
//   budget    what live and held bytes together may reach by an allocation
//   live      what the allocator has handed out, and `spent`: declared bytes of outside engines
//   held      what reservations still hold
//   inflight  admitted, but perhaps not in the allocator's figures yet
//   headroom  tickets: what may still be admitted without a look
// No request is ever missed, so what is admitted never passes the budget: a request enters inflight before it takes
// tickets or leaves held, and leaves it when the allocator has counted it; a look calls the tickets in, and then reads
// held, inflight and the figures, in this order. One that is just being handed over is counted twice: a look that would
// refuse because of it waits a moment and looks again.
//
// The allocator may count up to twice the bytes asked (the rest of a block that it does not split, its rounding
// options), so a look hands out half of the room in tickets; a request that is short of them looks itself.
//
// Locks: the mutex of a device, for a look and what changes its room. It is never held while calling back or waiting
// for the GIL; the allocator's own lock is taken inside it, as whoever holds that one waits for no one. An allocation
// that finds tickets takes no lock. Refuses to know how the guard was put before the allocator, and who leaves.
#pragma once

#include "room.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sched.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

namespace {

constexpr int64_t kGrain = 512;  // what c10's caching allocators round up to
constexpr int64_t kNoLimit = INT64_MAX / 4, kLargest = int64_t{1} << 60;
constexpr int kTries = 16, kPatience = 48, kYields = 16;

struct Figures {
  int64_t allocated = 0, peak = 0;
};

struct Look {
  int64_t live, held, inflight, room;
};

struct Ledger {
  alignas(64) std::atomic<int64_t> headroom{0};  // with what every allocation touches
  std::atomic<int64_t> inflight{0}, calls{0};
  std::atomic<bool> limited{false};
  alignas(64) std::mutex mutex;
  std::atomic<int64_t> budget{kNoLimit}, held{0}, spent{0};
  std::atomic<int64_t> seen{0}, top{0};  // what the allocator said at the last look; the most bytes live at any
  int64_t known_peak = 0;                // the allocator's own, when we last asked

  int index() const;
  bool has_tickets(int64_t n);
  bool admit_after_look(int64_t n, int64_t own);
  Look look(int64_t wanted, int64_t own);
  Look glance();
};
Ledger ledgers[kDevices];

int Ledger::index() const { return static_cast<int>(this - ledgers); }

std::atomic<c10::DeviceAllocator*> source{nullptr};  // of the figures: torch's allocator
std::atomic<int> served_type{-1};                    // of device; there is one accelerator type in a process
std::atomic<bool> forked{false};

// Whether the allocator tells figures at all, as far as is known before the device was first used. Asked with no lock
// held: one that does not, throws, and torch may need the GIL to describe where.
bool keeps_figures(c10::DeviceAllocator* allocator, int index) {
  try {
    if (allocator->initialized()) allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Zeros before the device was first used. A forked child asks nobody: there the allocator's lock may stay locked.
Figures figures(const Ledger& ledger) {
  auto* from = source.load();
  if (!from || forked.load()) return {ledger.seen.load(), 0};
  try {
    if (!from->initialized()) return {};
    auto stats = from->getDeviceStats(static_cast<c10::DeviceIndex>(ledger.index()));
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak};
  } catch (const std::exception&) {
    return {};
  }
}

// Under the mutex.
Look Ledger::glance() {
  Look now{};
  now.held = held.load();
  now.inflight = inflight.load();
  seen = figures(*this).allocated;
  now.live = seen.load() + spent.load();
  now.room = budget.load() - now.live - now.held - now.inflight;
  if (now.live > top.load()) top = now.live;
  return now;
}

void wait_a_little(int round) {
  if (round < kYields) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// The room, with the tickets called in; under the mutex. Where only requests in flight (but for the caller's `own`)
// stand in the way of `wanted`, some may be counted twice: they are waited for, for some milliseconds at most.
Look Ledger::look(int64_t wanted, int64_t own) {
  headroom.exchange(0);
  for (int round = 0;; round++) {
    Look now = glance();
    if (now.room >= wanted || now.room + now.inflight - own < wanted || round == kPatience) return now;
    wait_a_little(round);
  }
}

// Compare and swap, not subtract and undo: an undo after a look would hand out tickets that the look called in.
bool Ledger::has_tickets(int64_t n) {
  int64_t there = headroom.load(std::memory_order_relaxed);
  if (C10_UNLIKELY(there < n)) return false;
  inflight.fetch_add(n);
  do {
    if (there < n) {
      inflight.fetch_sub(n);
      return false;
    }
  } while (!headroom.compare_exchange_weak(there, there - n));
  return true;
}

bool Ledger::admit_after_look(int64_t n, int64_t own) {
  std::lock_guard<std::mutex> hold(mutex);
  Look now = look(n, own);
  if (now.room < n) return false;
  inflight.fetch_add(n);
  // Added, not set: what was taken beyond the tickets since the look must stay taken.
  headroom.fetch_add(std::max<int64_t>((now.room - now.inflight - 2 * n) / 2, 0));
  return true;
}

// One allocation on its way through the guard. What has been paid of it is in the device's inflight.
class Request {
 public:
  Request(Ledger& ledger, size_t n) : ledger_(ledger), size_(rounded(n)) {
    ledger.calls.fetch_add(1, std::memory_order_relaxed);
  }
  ~Request() { withdraw(); }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  // Pays for the bytes: by the reservation, by what was granted, by tickets. Asks for room; throws when there is none.
  void admit() {
    for (int asked = 0;; asked++) {
      draw();
      int64_t rest = unpaid();
      if (rest == 0 || ledger_.has_tickets(rest) || ledger_.admit_after_look(rest, paid_)) {
        paid_ += rest;
        return;
      }
      // Our own moves go beyond what was promised: refusing some bytes would break a move half way.
      if (drawings[ledger_.index()].prepaid || !ledger_.limited.load()) return overdraw(rest);
      give_back();
      if (asked == kTries || !may_ask(ledger_.index()) || !ask(kBudget)) {
        refuse(out_of_budget(ledger_.budget, ledger_.seen + ledger_.spent + ledger_.held, size_));
      }
    }
  }

  // Asks in this request's name; true when room was granted, by `grant`.
  bool ask(int32_t why) {
    int64_t need = std::max<int64_t>(unpaid() - vm_credit(ledger_.index()), 0);
    asking = this;
    bool granted = ::ask(ledger_.index(), need, why, size_);
    asking = nullptr;
    return granted;
  }

  // Held bytes become this thread's request's; false when it has none on the device.
  static bool grant(const Ledger& ledger, int64_t n) {
    if (!asking || &asking->ledger_ != &ledger) return false;
    asking->pay(n);
    return true;
  }

  void done() { drawn_ = 0; }  // the allocator counts the bytes now

  void withdraw() {
    give_back();
    ledger_.inflight.fetch_sub(std::exchange(paid_, 0));
  }

 private:
  static int64_t rounded(size_t n) {
    int64_t size = n > static_cast<size_t>(kLargest) ? kLargest : static_cast<int64_t>(n);
    return (size + kGrain - 1) / kGrain * kGrain;
  }

  int64_t unpaid() const { return std::max<int64_t>(size_ - paid_, 0); }  // more may be granted than was asked for

  void pay(int64_t n) {
    ledger_.inflight.fetch_add(n);
    paid_ += n;
  }

  void draw() {
    from_ = drawings[ledger_.index()].from;
    drawn_ = take(from_, unpaid());
    if (!drawn_) return;
    pay(drawn_);
    ledger_.held.fetch_sub(drawn_);
    ledger_.headroom.fetch_sub(drawn_);  // the allocator may count twice as much, and nobody else would notice
  }

  void overdraw(int64_t n) {
    pay(n);
    ledger_.headroom.fetch_sub(n);
  }

  void give_back() {
    int64_t n = std::exchange(drawn_, 0);
    if (!n) return;
    ledger_.held.fetch_add(n);
    if (!put_back(from_, n)) ledger_.held.fetch_sub(n);
    ledger_.inflight.fetch_sub(n);
    paid_ -= n;
  }

  static thread_local Request* asking;

  Ledger& ledger_;
  const int64_t size_;
  Reservation* from_ = nullptr;
  int64_t drawn_ = 0, paid_ = 0;
};
thread_local Request* Request::asking = nullptr;

// The ledger of the device that an allocation now goes to, null when it is not limited.
Ledger* limited_ledger() {
  static std::atomic<int> count{0};
  auto* impl = c10::impl::getDeviceGuardImpl(static_cast<c10::DeviceType>(served_type.load(std::memory_order_relaxed)));
  int known = count.load(std::memory_order_relaxed), index = 0;
  if (C10_UNLIKELY(known == 0)) count = known = impl->deviceCount();
  if (known > 1) index = impl->getDevice().index();
  if (C10_UNLIKELY(index < 0 || index >= kDevices)) return nullptr;
  return ledgers[index].limited.load(std::memory_order_relaxed) ? &ledgers[index] : nullptr;
}

// Runs the allocator's own `allocate` within the limit; where it finds no memory itself, asks for room and tries again.
template <class Allocate>
auto guarded(size_t n, Allocate&& allocate) -> decltype(allocate()) {
  Ledger* ledger = n ? limited_ledger() : nullptr;
  if (!ledger) return allocate();
  Request request(*ledger, n);
  request.admit();
  for (int retries = 0;; retries++) {
    std::exception_ptr failure;
    try {
      auto memory = allocate();
      request.done();
      return memory;
    } catch (const c10::OutOfMemoryError&) {
      failure = std::current_exception();
    }
    request.withdraw();
    if (retries == kTries || !may_ask(ledger->index())) std::rethrow_exception(failure);
    if (!request.ask(kOutOfMemory + retries)) {
      if (!message.empty()) refuse({});
      std::rethrow_exception(failure);
    }
    request.admit();
  }
}

}  // namespace
