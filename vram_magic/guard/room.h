// What the guards share: reservations, what a thread draws on, and the question for room.
//
// All figures are bytes. A reservation is room promised to one taker; it belongs to one device, and an allocation draws
// only on reservations of its own device. The question goes to a callback of the device, with no lock held. Takes no
// lock, and refuses to know how a guard counts, who leaves, and what a model is.
//
// Everything stands in an unnamed namespace: the guards of the CPU and of an accelerator live in one process and must
// not share state, and the dynamic linker would merge their `inline` variables, local libraries or not.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace {

constexpr int kGranted = 1, kInterrupted = 2, kRefused = 4, kAsks = 3, kDevices = 64;
constexpr int64_t kReleased = INT64_MIN;  // in place of what is left: whoever gives something back now learns of it

// Why there is a question: the budget would be passed; or the allocator itself found no memory, after it had flushed its
// cache. One more than that for each time that it happened to the same request although room had been granted.
constexpr int32_t kBudget = 0, kOutOfMemory = 1;

using PressureFn = int64_t (*)(int64_t need, int32_t why, int64_t size);
using InterruptFn = void (*)();

// Never deleted: a thread may still draw on one when another lets it go. They take sixteen bytes each.
struct Reservation {
  const int device;
  std::atomic<int64_t> left;
};

// Takes up to n of what is left; returns how much.
int64_t take(Reservation* from, int64_t n) {
  if (C10_LIKELY(!from)) return 0;
  int64_t left = from->left.load(), part;
  do {
    if (left <= 0) return 0;
    part = std::min(left, n);
  } while (!from->left.compare_exchange_weak(left, left - part));
  return part;
}

// False when it has been released since: then the bytes are nobody's.
bool put_back(Reservation* from, int64_t n) {
  int64_t left = from->left.load();
  do {
    if (left == kReleased) return false;
  } while (!from->left.compare_exchange_weak(left, left + n));
  return true;
}

// Ends it; returns what was left. Twice is once.
int64_t close(Reservation* from) { return std::max<int64_t>(from->left.exchange(kReleased), 0); }

struct Drawing {
  Reservation* from = nullptr;  // allocations of this thread are paid by it first
  bool prepaid = false;         // our own moves: never call back, or a reload would wait for itself
};
thread_local Drawing drawings[kDevices];

thread_local bool inside = false;  // the callback: it never calls back again
thread_local std::string message;  // of the error that this thread's refused request is about to raise

struct Callback {
  std::atomic<PressureFn> pressure{nullptr};
  std::atomic<InterruptFn> interrupt{nullptr};
  std::atomic<int64_t> asks{0}, oom_asks{0};
};
Callback callbacks[kDevices];

bool may_ask(int device) {
  return !inside && !drawings[device].prepaid && callbacks[device].pressure.load() != nullptr;
}

// Whether room for `need` of the `size` bytes was granted. An interrupt is raised when the operation has ended.
bool ask(int device, int64_t need, int32_t why, int64_t size) {
  Callback& callback = callbacks[device];
  auto pressure = callback.pressure.load();
  if (!pressure) return false;
  (why == kBudget ? callback.asks : callback.oom_asks).fetch_add(1);
  inside = true;
  int64_t answer = 0;
  bool interrupted = false;
  // No answer at all: an interrupt hit the callback before it could guard itself. It is raised later, and asked again.
  for (int i = 0; i < kAsks && !(answer & (kGranted | kRefused)); i++) {
    answer = pressure(need, why, size);
    interrupted |= (answer & kInterrupted) || !answer;
  }
  inside = false;
  if (interrupted) {
    if (auto raise = callback.interrupt.load()) raise();
  }
  return answer & kGranted;
}

[[noreturn]] void refuse(const std::string& unexplained) {
  std::string text = message.empty() ? unexplained : std::move(message);
  message.clear();
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

std::string out_of_budget(int64_t budget, int64_t taken, int64_t size) {
  return "out of memory: the budget is " + std::to_string(budget) + " bytes, " + std::to_string(taken) +
         " are taken, tried to allocate " + std::to_string(size);
}

}  // namespace

extern "C" {
// c10's number of a type of device, such as "cuda"; -1 when it has none.
int vm_device_type(const char* name) {
  try {
    return static_cast<int>(c10::Device(name).type());
  } catch (const std::exception&) {
    return -1;
  }
}
void vm_callbacks(int device, PressureFn pressure, InterruptFn interrupt) {
  callbacks[device].interrupt = interrupt;
  callbacks[device].pressure = pressure;
}
void vm_message(const char* text) { message = text; }
int64_t vm_asks(int device) { return callbacks[device].asks; }
int64_t vm_oom_asks(int device) { return callbacks[device].oom_asks; }
// This thread's allocations on the device draw on r (null: on nothing).
void vm_draw_on(int device, Reservation* r, int own_move) { drawings[device] = {r, own_move != 0}; }
int64_t vm_left(Reservation* r) { return std::max<int64_t>(r->left, 0); }
int64_t vm_credit(int device) {
  auto* from = drawings[device].from;
  return from ? vm_left(from) : 0;
}
}
