#include "io_pool.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "checksum.h"

namespace kvferry {
namespace {

Outcome outcome_of(int error_number) {
  const bool is_full = error_number == ENOSPC || error_number == EDQUOT;
  return is_full ? Outcome::kNoSpace : Outcome::kIoError;
}

// Buffered I/O goes piece by piece, so that the checksum finds in the processor's cache what was
// just copied, or brings there what is about to be. Direct I/O takes the extent at once.
constexpr size_t kPieceBytes = 256 << 10;

// While more is queued, who waits is woken for so many results and not for each.
constexpr size_t kResultsAtOnce = 8;

bool is_direct(const Operation& operation) {
  return ::fcntl(operation.descriptor, F_GETFL) & O_DIRECT;
}

struct Transfer {
  size_t done_bytes = 0;
  int error_number = 0;
};

// Bytes of an extent.
struct Range {
  size_t start_bytes;
  size_t length_bytes;
};

Range whole(const Operation& operation) {
  return {0, operation.slice_count * operation.slice_bytes};
}

// Repeats `call` (pread or pwrite) until the range is done, nothing more comes or it fails.
template <class Call>
Transfer transfer(const Operation& operation, Range range, Call call) {
  Transfer state;
  while (state.done_bytes < range.length_bytes) {
    const size_t place_bytes = range.start_bytes + state.done_bytes;
    const ssize_t moved_bytes = call(operation.descriptor, operation.slice(0) + place_bytes,
                                     range.length_bytes - state.done_bytes,
                                     static_cast<off_t>(operation.offset_bytes + place_bytes));
    if (moved_bytes < 0 && errno == EINTR) continue;
    if (moved_bytes < 0) state.error_number = errno;
    if (moved_bytes <= 0) break;
    state.done_bytes += moved_bytes;
  }
  return state;
}

bool read_range(const Operation& operation, Range range, Result& result) {
  const Transfer state = transfer(operation, range, ::pread);
  if (state.done_bytes == range.length_bytes) return true;
  result.error_number = state.error_number;
  result.outcome = state.error_number ? Outcome::kIoError : Outcome::kShort;
  return false;
}

bool write_range(const Operation& operation, Range range, Result& result) {
  const Transfer state = transfer(operation, range, ::pwrite);
  if (state.done_bytes == range.length_bytes) return true;
  result.error_number = state.error_number ? state.error_number : EIO;
  result.outcome = outcome_of(result.error_number);
  return false;
}

bool check_header(const Operation& operation, uint32_t index, Result& result) {
  const SliceHeader& header = operation.header(index);
  result.outcome = verify(header, operation.page, operation.first_slice + index);
  if (result.outcome != Outcome::kOk) return false;
  result.checksums.push_back(header.payload_checksum);
  return true;
}

void stamp_header(const Operation& operation, uint32_t index, const Result& result) {
  stamp(operation.header(index), operation.page, operation.first_slice + index,
        result.checksums[index]);
}

// Proves a slice, and reads it before if it is not there yet. The header comes first.
bool take_slice(const Operation& operation, uint32_t index, bool is_there, bool verify_payload,
                Result& result) {
  RunningChecksum running;
  size_t proven_bytes = kHeaderBytes;
  for (size_t place = 0; place < operation.slice_bytes; place += kPieceBytes) {
    const size_t end = std::min(place + kPieceBytes, operation.slice_bytes);
    const Range piece{index * operation.slice_bytes + place, end - place};
    if (!is_there && !read_range(operation, piece, result)) return false;
    if (place == 0 && !check_header(operation, index, result)) return false;
    if (verify_payload) running.add(operation.slice(index) + proven_bytes, end - proven_bytes);
    proven_bytes = end;
  }
  if (!verify_payload || running.value() == result.checksums.back()) return true;
  result.outcome = Outcome::kCorrupt;
  return false;
}

// Writes a slice whose checksum is not known yet. The header goes last.
bool put_slice(const Operation& operation, uint32_t index, Result& result) {
  RunningChecksum running;
  const size_t start = index * operation.slice_bytes;
  for (size_t place = kHeaderBytes; place < operation.slice_bytes; place += kPieceBytes) {
    const size_t length = std::min(kPieceBytes, operation.slice_bytes - place);
    running.add(operation.slice(index) + place, length);
    if (!write_range(operation, {start + place, length}, result)) return false;
  }
  result.checksums.push_back(running.value());
  stamp_header(operation, index, result);
  return write_range(operation, {start, kHeaderBytes}, result);
}

void compute_checksums(const Operation& operation, Result& result) {
  for (uint32_t i = 0; i < operation.slice_count; ++i) {
    const size_t payload_bytes = operation.slice_bytes - kHeaderBytes;
    result.checksums.push_back(checksum(operation.slice(i) + kHeaderBytes, payload_bytes));
  }
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
    if (queue.tasks.empty() || results_.size() >= kResultsAtOnce) has_results_.notify_all();
  }
}

void IoPool::read(Task& task) {
  const Operation& operation = task.operation;
  const bool is_there = is_direct(operation);
  if (is_there && !read_range(operation, whole(operation), task.result)) return;
  for (uint32_t i = 0; i < operation.slice_count; ++i) {
    if (!take_slice(operation, i, is_there, task.verify_payload, task.result)) return;
  }
}

void IoPool::write(Task& task) {
  const Operation& operation = task.operation;
  Result& result = task.result;
  const bool has_checksums = !result.checksums.empty();
  if (!has_checksums && !is_direct(operation)) {
    for (uint32_t i = 0; i < operation.slice_count; ++i) {
      if (!put_slice(operation, i, result)) return;
    }
    return;
  }
  if (!has_checksums) compute_checksums(operation, result);
  for (uint32_t i = 0; i < operation.slice_count; ++i) stamp_header(operation, i, result);
  write_range(operation, whole(operation), result);
}

}  // namespace kvferry
