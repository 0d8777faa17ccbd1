// The one stream of the stand-in's collectives, where calls are deferred: they run in order on a
// thread of its own, and the host waits for them only when it computes with the device or reads it.
#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

using Issue = std::function<c10::intrusive_ptr<c10d::Work>()>;
using Flag = std::shared_ptr<std::atomic<bool>>;

class CallStream {
 public:
  static CallStream& get() {
    static auto* stream = new CallStream;  // never destroyed: its thread may wait for ever
    return *stream;
  }
  bool deferred = false;

  uint64_t enqueue(Issue issue, Flag aborted) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!running) std::thread([this] { run(); }).detach();
    running = true;
    calls.emplace_back(std::move(issue), std::move(aborted));
    changed.notify_all();
    return ++enqueued;
  }
  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex);
    return enqueued;
  }
  bool done(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex);
    return completed >= number;
  }
  void drain() {
    if (!deferred) return;
    std::unique_lock<std::mutex> lock(mutex);
    auto until = enqueued;
    changed.wait(lock, [&] { return completed >= until; });
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return !calls.empty(); });
      auto [issue, aborted] = std::move(calls.front());
      calls.pop_front();
      lock.unlock();
      try {
        auto work = *aborted ? nullptr : issue();
        while (work && !work->isCompleted() && !*aborted)
          std::this_thread::sleep_for(std::chrono::microseconds(200));
      } catch (const std::exception&) {  // a stream raises nothing
      }
      lock.lock();
      ++completed;
      changed.notify_all();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<Issue, Flag>> calls;
  uint64_t enqueued = 0, completed = 0;
  bool running = false;
};

// A call on the stream: to wait for it makes the stream wait, not the host.
struct StreamWork final : c10d::Work {
  uint64_t number;
  explicit StreamWork(uint64_t number_) : number(number_) {}
  bool isCompleted() override { return CallStream::get().done(number); }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
};
