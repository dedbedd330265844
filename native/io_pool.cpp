#include "io_pool.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "checksum.h"

namespace kvferry {
namespace {

Outcome outcome_of(int error_number) {
  const bool is_full = error_number == ENOSPC || error_number == EDQUOT;
  return is_full ? Outcome::kNoSpace : Outcome::kIoError;
}

uint64_t payload_checksum(const Operation& operation, uint32_t index) {
  return checksum(operation.slice(index) + kHeaderBytes, operation.slice_bytes - kHeaderBytes);
}

// Buffered I/O goes slice by slice: what was just copied, or is about to be, is still in the
// processor's cache for the checksum. Direct I/O takes the extent at once.
uint32_t slices_at_once(const Operation& operation) {
  const bool is_direct = ::fcntl(operation.descriptor, F_GETFL) & O_DIRECT;
  return is_direct ? operation.slice_count : 1;
}

struct Transfer {
  size_t done_bytes = 0;
  int error_number = 0;
};

// Repeats `call` (pread or pwrite) until these slices are done, nothing more comes or it fails.
template <class Call>
Transfer transfer(const Operation& operation, uint32_t first, uint32_t count, Call call) {
  const size_t start_bytes = first * operation.slice_bytes;
  const size_t total_bytes = count * operation.slice_bytes;
  Transfer state;
  while (state.done_bytes < total_bytes) {
    const size_t place_bytes = start_bytes + state.done_bytes;
    const ssize_t moved_bytes =
        call(operation.descriptor, operation.slice(0) + place_bytes, total_bytes - state.done_bytes,
             static_cast<off_t>(operation.offset_bytes + place_bytes));
    if (moved_bytes < 0 && errno == EINTR) continue;
    if (moved_bytes < 0) state.error_number = errno;
    if (moved_bytes <= 0) break;
    state.done_bytes += moved_bytes;
  }
  return state;
}

bool read_slices(const Operation& operation, uint32_t first, uint32_t count, Result& result) {
  const Transfer state = transfer(operation, first, count, ::pread);
  if (state.done_bytes == count * operation.slice_bytes) return true;
  result.error_number = state.error_number;
  result.outcome = state.error_number ? Outcome::kIoError : Outcome::kShort;
  return false;
}

bool check_slice(const Operation& operation, uint32_t index, bool verify_payload, Result& result) {
  const SliceHeader& header = operation.header(index);
  result.outcome = verify(header, operation.page, operation.first_slice + index);
  if (result.outcome != Outcome::kOk) return false;
  result.checksums.push_back(header.payload_checksum);
  if (verify_payload && payload_checksum(operation, index) != header.payload_checksum) {
    result.outcome = Outcome::kCorrupt;
  }
  return result.outcome == Outcome::kOk;
}

bool write_slices(const Operation& operation, uint32_t first, uint32_t count, Result& result) {
  const Transfer state = transfer(operation, first, count, ::pwrite);
  if (state.done_bytes == count * operation.slice_bytes) return true;
  result.error_number = state.error_number ? state.error_number : EIO;
  result.outcome = outcome_of(result.error_number);
  return false;
}

}  // namespace

void IoPool::start(size_t read_thread_count, size_t write_thread_count) {
  const Lock lock(mutex_);
  auto self = shared_from_this();
  crew_.start(lock, read_thread_count, [self] { self->work(self->reads_, read); });
  crew_.start(lock, write_thread_count, [self] { self->work(self->writes_, write); });
}

uint64_t IoPool::submit_reads(std::vector<Operation> operations, bool verify_payload) {
  std::vector<Task> tasks;
  for (Operation& operation : operations) tasks.push_back({operation, {}, verify_payload});
  return submit(reads_, std::move(tasks));
}

uint64_t IoPool::submit_writes(std::vector<Operation> operations,
                               const std::vector<uint64_t>& checksums) {
  std::vector<Task> tasks;
  auto next = checksums.begin();
  for (Operation& operation : operations) {
    tasks.push_back({operation, {}, false});
    if (checksums.empty()) continue;
    tasks.back().result.checksums.assign(next, next + operation.slice_count);
    next += operation.slice_count;
  }
  return submit(writes_, std::move(tasks));
}

uint64_t IoPool::submit(Queue& queue, std::vector<Task> tasks) {
  crew_.check_process();
  const Lock lock(mutex_);
  if (is_closed_) throw std::logic_error("the I/O pool is closed");
  ++last_job_;
  for (size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].result.job = last_job_;
    tasks[i].result.index = i;
    queue.tasks.push_back(std::move(tasks[i]));
    queue.filled.notify_one();
  }
  return last_job_;
}

std::vector<Result> IoPool::wait(double timeout_s) {
  crew_.check_process();
  Lock lock(mutex_);
  has_results_.wait_until(lock, deadline_after(timeout_s), [this] { return !results_.empty(); });
  return std::exchange(results_, {});
}

bool IoPool::close(double timeout_s) {
  if (crew_.is_forked()) return true;
  Lock lock(mutex_);
  is_closed_ = true;
  reads_.filled.notify_all();
  writes_.filled.notify_all();
  const bool is_gone = crew_.wait_gone(lock, deadline_after(timeout_s));
  reads_.tasks.clear();
  writes_.tasks.clear();
  return is_gone;
}

void IoPool::work(Queue& queue, void (*run)(Task&)) {
  Lock lock(mutex_);
  while (true) {
    queue.filled.wait(lock, [&] { return is_closed_ || !queue.tasks.empty(); });
    if (queue.tasks.empty()) return;
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    lock.unlock();
    run(task);
    lock.lock();
    results_.push_back(std::move(task.result));
    has_results_.notify_all();
  }
}

void IoPool::read(Task& task) {
  const Operation& operation = task.operation;
  const uint32_t step = slices_at_once(operation);
  for (uint32_t first = 0; first < operation.slice_count; first += step) {
    if (!read_slices(operation, first, step, task.result)) return;
    for (uint32_t i = first; i < first + step; ++i) {
      if (!check_slice(operation, i, task.verify_payload, task.result)) return;
    }
  }
}

void IoPool::write(Task& task) {
  const Operation& operation = task.operation;
  const bool has_checksums = !task.result.checksums.empty();
  const uint32_t step = slices_at_once(operation);
  for (uint32_t first = 0; first < operation.slice_count; first += step) {
    for (uint32_t i = first; i < first + step; ++i) {
      if (!has_checksums) task.result.checksums.push_back(payload_checksum(operation, i));
      stamp(operation.header(i), operation.page, operation.first_slice + i,
            task.result.checksums[i]);
    }
    if (!write_slices(operation, first, step, task.result)) return;
  }
}

}  // namespace kvferry
