// What one I/O thread of a UsrbioPool does with its ring, until the pool is closed.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "usrbio_pool.h"

namespace kvferry {

class RingWork {
 public:
  RingWork(UsrbioPool& pool, UsrbioPool::Queue& queue, const Hf3fsIor& ring)
      : pool_(pool), queue_(queue), ring_(ring), is_read_(ring.for_read),
        ios_(pool.settings_.entry_max) {}

  void run();

 private:
  struct Io {
    std::shared_ptr<UsrbioPool::Task> task;  // none: the entry is free
    uint64_t number = 0;                     // its userdata: no other I/O has had it
    size_t place = 0;                        // in the extent
    size_t length_bytes = 0;
    Deadline deadline;
    Deadline ring_deadline;
    bool is_overdue = false;
  };

  bool take();
  void begin_all();
  bool begin_next(const std::shared_ptr<UsrbioPool::Task>& task);
  void finish_ready();
  Io* find_out(const void* userdata);
  void finish(const Hf3fsCqe& done);
  void end_if_done(const std::shared_ptr<UsrbioPool::Task>& task);
  void look_for_overdue();
  void abandon();
  void renew_ring();
  void fail_begun(int error_number);
  bool has_room() const {
    return !is_ending_ && timely_bytes_ < pool_.settings_.ring_bytes_max;
  }
  bool is_full() const { return out_count_ == ios_.size(); }
  size_t timely_count() const { return out_count_ - overdue_count_; }

  UsrbioPool& pool_;
  UsrbioPool::Queue& queue_;
  Hf3fsIor ring_;
  const bool is_read_;
  bool has_ring_ = true;
  bool is_ending_ = false;  // the ring takes nothing new
  std::vector<Io> ios_;
  std::deque<std::shared_ptr<UsrbioPool::Task>> begun_;  // taken, not all of it in the ring
  uint64_t begun_count_ = 0;
  size_t out_count_ = 0;
  size_t overdue_count_ = 0;
  size_t timely_bytes_ = 0;
  bool is_submitted_ = true;
};

}  // namespace kvferry
