#include "ring_work.h"

#include <algorithm>
#include <cerrno>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

constexpr auto kLookForTasks = 1ms;  // while I/O is out and more may be begun
constexpr auto kLookForReady = 20ms;  // while nothing else can be done
constexpr auto kLookForOverdue = 50ms;
constexpr int kNiceLevels = 5;
constexpr int kReadyMax = 64;

timespec wall_clock_after(std::chrono::nanoseconds wait) {
  timespec time;
  ::clock_gettime(CLOCK_REALTIME, &time);
  const auto nanoseconds = time.tv_nsec + wait.count();
  return {time.tv_sec + nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
}

}  // namespace

void RingWork::run() {
  be_nice(kNiceLevels);
  while (take()) {
    if (!has_ring_) renew_ring();
    begin_all();
    finish_ready();
    look_for_overdue();
    if (pool_.must_abandon_ || (is_ending_ && timely_count() == 0)) abandon();
  }
  if (has_ring_) pool_.library_.iordestroy(&ring_);
}

// Waits for tasks if no completion is to be expected; false at the end. Takes its share, so that
// a batch occupies all threads: the proof of what is read takes a processor.
bool RingWork::take() {
  Lock lock(pool_.mutex_);
  if (pool_.must_abandon_) queue_.tasks.clear();
  const auto has_work = [this] { return pool_.is_closed_ || !queue_.tasks.empty(); };
  if (out_count_ == 0 && begun_.empty()) {
    queue_.filled.wait(lock, has_work);
    if (queue_.tasks.empty()) return false;
  } else if (timely_count() == 0 && (begun_.empty() || is_full())) {
    queue_.filled.wait_for(lock, kLookForOverdue, [this] {
      return pool_.must_abandon_ || (has_room() && !is_full() && !queue_.tasks.empty());
    });
  }
  if (!begun_.empty() || !has_room() || is_full()) return true;
  size_t share = (queue_.tasks.size() + queue_.thread_count - 1) / queue_.thread_count;
  for (size_t bytes = timely_bytes_; share > 0 && bytes < pool_.settings_.ring_bytes_max; --share) {
    begun_.push_back(std::move(queue_.tasks.front()));
    queue_.tasks.pop_front();
    bytes += begun_.back()->length_bytes();
  }
  return true;
}

void RingWork::begin_all() {
  while (!begun_.empty() && has_room()) {
    const auto task = begun_.front();
    if (task->begun_bytes == 0 && !task->is_read) {
      for (uint32_t i = 0; i < task->operation.slice_count; ++i) {
        stamp_slice(task->operation, i, task->has_checksums, task->result.checksums[i]);
      }
    }
    while (!task->is_begun() && begin_next(task)) {
    }
    if (!task->is_begun()) break;
    begun_.pop_front();
    end_if_done(task);
  }
  if (!is_submitted_) is_submitted_ = pool_.library_.submit_ios(&ring_) == 0;
}

// Puts the next I/O of a task into the ring; false if there is no room.
bool RingWork::begin_next(const std::shared_ptr<UsrbioPool::Task>& task) {
  const auto entry = std::find_if(ios_.begin(), ios_.end(), [](const Io& io) { return !io.task; });
  if (entry == ios_.end()) return false;
  const Operation& operation = task->operation;
  const size_t io_max = pool_.settings_.io_bytes_max;
  const size_t offset = operation.offset_bytes + task->begun_bytes;
  const size_t left = task->length_bytes() - task->begun_bytes;
  const size_t length = std::min(left, io_max - offset % io_max);
  const uint64_t number = begun_count_ * ios_.size() + (entry - ios_.begin());
  const int index = pool_.library_.prep_io(
      &ring_, &task->memory, task->is_read, operation.slice(0) + task->begun_bytes,
      operation.descriptor, offset, length, reinterpret_cast<void*>(number));
  if (index == -EAGAIN && out_count_ > 0) return false;
  if (index < 0) {
    task->fail(task->begun_bytes, Outcome::kIoError, -index);
    return true;
  }
  *entry = {task, number, task->begun_bytes, length,
            deadline_after(pool_.settings_.io_deadline_s),
            deadline_after(pool_.settings_.ring_deadline_s), false};
  task->begun_bytes += length;
  ++task->out_count;
  ++begun_count_;
  ++out_count_;
  timely_bytes_ += length;
  is_submitted_ = false;
  return true;
}

void RingWork::finish_ready() {
  if (out_count_ == 0) return;
  Hf3fsCqe ready[kReadyMax];
  const bool may_take = begun_.empty() && has_room() && !is_full();
  const std::chrono::nanoseconds wait = may_take ? kLookForTasks : kLookForReady;
  const timespec until = wall_clock_after(timely_count() == 0 ? 0ns : wait);
  const int count = pool_.library_.wait_for_ios(&ring_, ready, kReadyMax, 1, &until);
  for (int i = 0; i < count; ++i) finish(ready[i]);
  // One that fails at once is not asked again at once.
  if (count < 0) ::clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &until, nullptr);
}

// None: of an I/O that has ended, or of no I/O of this ring.
RingWork::Io* RingWork::find_out(const void* userdata) {
  const auto number = reinterpret_cast<uint64_t>(userdata);
  Io& io = ios_[number % ios_.size()];
  return io.task && io.number == number ? &io : nullptr;
}

void RingWork::finish(const Hf3fsCqe& done) {
  Io* const found = find_out(done.userdata);
  if (!found) return;
  Io& io = *found;
  const auto task = std::move(io.task);
  io.task = nullptr;
  --out_count_;
  if (io.is_overdue) {
    --overdue_count_;
    --pool_.overdue_now_count_;
  } else {
    timely_bytes_ -= io.length_bytes;
  }
  --task->out_count;
  if (done.result < 0) {
    const int error_number = static_cast<int>(-done.result);
    const Outcome of_read = error_number == ENODATA ? Outcome::kAbsent : Outcome::kIoError;
    task->fail(io.place, task->is_read ? of_read : outcome_of_write(error_number),
               task->is_read && error_number == ENODATA ? 0 : error_number);
  } else if (static_cast<size_t>(done.result) != io.length_bytes) {
    task->fail(io.place, task->is_read ? Outcome::kShort : Outcome::kIoError,
               task->is_read ? 0 : EIO);
  }
  if (begun_.empty() || begun_.front() != task) end_if_done(task);
}

void RingWork::end_if_done(const std::shared_ptr<UsrbioPool::Task>& task) {
  if (!task->is_ended()) return;
  Result& result = task->result;
  for (uint32_t i = 0; task->is_read && i < task->operation.slice_count; ++i) {
    if (result.outcome != Outcome::kOk) break;
    result.outcome =
        prove_slice(task->operation, i, task->verify_payload, result.checksums[i]);
  }
  pool_.put(task);
}

void RingWork::look_for_overdue() {
  const Deadline now = std::chrono::steady_clock::now();
  for (Io& io : ios_) {
    if (io.task && now >= io.ring_deadline) is_ending_ = true;
    if (!io.task || io.is_overdue || now < io.deadline) continue;
    io.is_overdue = true;
    ++overdue_count_;
    ++pool_.overdue_count_;
    ++pool_.overdue_now_count_;
    timely_bytes_ -= io.length_bytes;
  }
}

// Ends the ring with all that is out in it: that has failed, and its buffers are free.
void RingWork::abandon() {
  if (has_ring_) pool_.library_.iordestroy(&ring_);
  has_ring_ = is_ending_ = false;
  is_submitted_ = true;
  for (Io& io : ios_) {
    if (!io.task) continue;
    Hf3fsCqe done{};
    done.result = -ETIMEDOUT;
    done.userdata = reinterpret_cast<void*>(io.number);
    finish(done);
  }
  if (pool_.must_abandon_) begun_.clear();
}

void RingWork::renew_ring() {
  const int error_number = pool_.make_ring(&ring_, is_read_);
  has_ring_ = error_number == 0;
  if (!has_ring_) fail_begun(error_number);
}

// What has been taken, and has nothing in a ring.
void RingWork::fail_begun(int error_number) {
  for (const auto& task : begun_) task->fail(task->begun_bytes, Outcome::kIoError, error_number);
}

}  // namespace kvferry
