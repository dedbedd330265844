// Threads that read and write extents of files, and prove what they read. Several threads share an
// extent whose bytes go through the page cache: it is there sooner, and while it is young its bytes
// are still in the processor's cache for whoever takes them next.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "crew.h"
#include "operation.h"

namespace kvferry {

// What one thread does at once: slices of an extent, and what became of them.
struct Part {
  uint32_t first;
  uint32_t count;
  Outcome outcome = Outcome::kOk;
  int error_number = 0;
};

class IoPool : public std::enable_shared_from_this<IoPool> {
 public:
  void start(size_t read_thread_count, size_t write_thread_count);

  // Both return the job's number, from 1 on, and throw std::logic_error after close.
  uint64_t submit_reads(const std::vector<Operation>& operations, bool verify_payload);
  // `checksums`: of all slices of all operations in order, or empty: the pool computes them.
  uint64_t submit_writes(const std::vector<Operation>& operations,
                         const std::vector<uint64_t>& checksums);

  // So many threads read at most, at least one; those that are at it end what they have begun.
  void limit_reads(size_t thread_count);
  // Threads that read right now.
  size_t reading_count();

  // Results since the last call; at most `timeout_s` is spent on waiting for some.
  std::vector<Result> wait(double timeout_s);

  // Waits for all that was submitted. False if time ran out: what had not begun never will, and
  // what hangs keeps its buffer and its thread.
  bool close(double timeout_s);

 private:
  // `begun_count` slices were given out, `ended_count` of them have ended. `failed`: the first
  // slice of the part that decides the outcome.
  struct Task {
    Operation operation;
    Result result;
    bool verify_payload;
    bool has_checksums;
    bool is_direct;
    uint32_t part_slices = 0;
    uint32_t begun_count = 0;
    uint32_t ended_count = 0;
    uint32_t failed = UINT32_MAX;
  };
  struct Queue {
    std::deque<std::shared_ptr<Task>> tasks;
    std::condition_variable filled;
    size_t busy_count = 0;
    size_t busy_max = SIZE_MAX;
  };

  uint64_t submit(Queue& queue, const std::vector<std::shared_ptr<Task>>& tasks);
  void work(Queue& queue, void (*run)(Task&, Part&));
  void end_part(Task& task, const Part& part);

  std::mutex mutex_;
  Queue reads_;
  Queue writes_;
  Results results_;
  bool is_closed_ = false;
  Crew crew_;

  static std::shared_ptr<Task> make_task(const Operation& operation);
  static void read(Task& task, Part& part);
  static void write(Task& task, Part& part);
};

}  // namespace kvferry
