// Threads that read and write extents of files on 3FS through rings of shared memory, and prove
// what they read. Each thread has a ring of its own, for one direction: it alone fills and empties
// it.
//
// An I/O whose completion does not come keeps its buffer: the operation's result is not returned
// until the completion comes or its ring is ended. A ring with such an I/O takes nothing new from
// `ring_deadline_s` on and is ended when what is timely in it has ended; another one takes its
// place. That is late on purpose: a daemon that lives has by then given up what it still moved.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "crew.h"
#include "hf3fs.h"
#include "operation.h"

namespace kvferry {

struct UsrbioSettings {
  std::string mount_point;
  int entry_max;             // I/Os out in one ring
  size_t ring_bytes_max;     // bytes out in one ring; an operation of more is out alone
  size_t io_bytes_max;       // an I/O ends at a multiple of this in its file
  double io_deadline_s;      // then an I/O is overdue: it no longer counts, its buffer stays out
  double ring_deadline_s;    // then its ring is ended: its operation failed with ETIMEDOUT
};

class UsrbioPool : public std::enable_shared_from_this<UsrbioPool> {
 public:
  UsrbioPool(const Hf3fs& library, UsrbioSettings settings)
      : library_(library), settings_(std::move(settings)) {}

  // 0, or the errno of the ring that could not be made: then none is left and no thread runs.
  // Throws std::system_error where there is no further thread: `close` ends those before it.
  int start(size_t read_thread_count, size_t write_thread_count);

  // Memory that a link in the mount names by `id`. Returns 0 or errno.
  int add_memory(uint64_t address, size_t length_bytes, const char* id);
  // Only of memory without I/O.
  void remove_memory(uint64_t address);

  // As those of IoPool. Throws std::invalid_argument for a buffer in no memory of this pool.
  uint64_t submit_reads(const std::vector<Operation>& operations, bool verify_payload);
  uint64_t submit_writes(const std::vector<Operation>& operations,
                         const std::vector<uint64_t>& checksums);
  std::vector<Result> wait(double timeout_s);
  // Waits so long for what is out, then ends the rings, whatever they hold. False if a thread does
  // not come back from the library.
  bool close(double timeout_s);

  // I/Os that were out for longer than the deadline, so far.
  uint64_t overdue_count() const { return overdue_count_; }
  // Those that still are.
  uint64_t overdue_now_count() const { return overdue_now_count_; }

  struct Task {
    Operation operation;
    Result result;
    Hf3fsIov memory;
    bool is_read;
    bool verify_payload;
    bool has_checksums;
    size_t begun_bytes = 0;
    int out_count = 0;  // I/Os of it in the ring
    size_t failed_at = SIZE_MAX;  // the first place that failed decides the outcome

    size_t length_bytes() const { return operation.slice_count * operation.slice_bytes; }
    bool is_begun() const { return begun_bytes == length_bytes() || failed_at != SIZE_MAX; }
    bool is_ended() const { return is_begun() && out_count == 0; }
    void fail(size_t place, Outcome outcome, int error_number);
  };

 private:
  friend class RingWork;
  struct Queue {
    std::deque<std::shared_ptr<Task>> tasks;
    std::condition_variable filled;
    size_t thread_count = 0;
  };

  int make_ring(Hf3fsIor* ring, bool is_read) const;  // 0 or errno
  std::shared_ptr<Task> make_task(const Operation& operation) const;
  uint64_t submit(Queue& queue, const std::vector<std::shared_ptr<Task>>& tasks);
  void put(std::shared_ptr<Task> task);

  const Hf3fs library_;
  const UsrbioSettings settings_;
  std::mutex mutex_;
  std::vector<Hf3fsIov> memories_;
  Queue reads_;
  Queue writes_;
  Results results_;
  std::atomic<uint64_t> overdue_count_{0};
  std::atomic<uint64_t> overdue_now_count_{0};
  std::atomic<bool> must_abandon_{false};
  bool is_closed_ = false;
  Crew crew_;
};

}  // namespace kvferry
