// Threads of a pool, so that one that hangs in a system call blocks neither close nor the end of
// the process: they are detached and share ownership of their pool. All signals are blocked in
// them, and they never touch the interpreter. They do not survive a fork: in a forked child a
// pool refuses work, and its close does nothing.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace kvferry {

using Lock = std::unique_lock<std::mutex>;
using Deadline = std::chrono::steady_clock::time_point;

inline Deadline deadline_after(double timeout_s) {
  using Duration = std::chrono::steady_clock::duration;
  const std::chrono::duration<double> wait(std::clamp(timeout_s, 0.0, 1e9));
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<Duration>(wait);
}

// For threads that are busy for long: whoever wakes up meanwhile (the mover, the engine) gets a
// core at once, also where there are as many of them as cores. Fails silently: it is about speed.
inline void be_nice(int levels) {
  ::setpriority(PRIO_PROCESS, 0, ::getpriority(PRIO_PROCESS, 0) + levels);  // of this thread alone
}

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

class Crew {
 public:
  // Each thread calls `work()` once, which keeps the crew and the mutex alive. Call it locked.
  // Throws std::system_error where there is no further thread; those before it go on.
  template <class Work>
  void start(const Lock& lock, size_t thread_count, Work work) {
    const SignalsBlocked blocked;
    for (size_t i = 0; i < thread_count; ++i, ++live_count_) {
      std::thread([this, mutex = lock.mutex(), work] {
        work();
        const Lock leaving(*mutex);
        --live_count_;
        left_.notify_all();
      }).detach();
    }
  }

  // False if some thread has not returned from `work` in time.
  bool wait_gone(Lock& lock, Deadline deadline) {
    return left_.wait_until(lock, deadline, [this] { return live_count_ == 0; });
  }

  bool is_forked() const { return ::getpid() != process_; }

  void check_process() const {
    if (is_forked()) throw std::logic_error("this pool belongs to another process (fork)");
  }

 private:
  const pid_t process_ = ::getpid();
  std::condition_variable left_;
  size_t live_count_ = 0;
};

}  // namespace kvferry
